"""Prompts of every length, for any model: a text of ordinary words, as that model's tokens, read from many places."""

from random import Random

from lab.demo.client import ApiClient

_WORDS = (
    "river",
    "stone",
    "garden",
    "winter",
    "letter",
    "music",
    "paper",
    "morning",
    "shadow",
    "engine",
    "harbour",
    "copper",
    "silver",
    "forest",
    "window",
    "kitchen",
    "market",
    "travel",
    "answer",
    "bridge",
    "summer",
    "candle",
    "meadow",
    "thunder",
    "ladder",
    "pocket",
    "village",
    "ocean",
    "mirror",
    "yellow",
    "number",
    "question",
    "quiet",
    "little",
    "people",
    "under",
    "between",
    "every",
    "after",
    "before",
    "with",
    "from",
    "about",
    "the",
    "a",
    "and",
    "of",
    "to",
    "in",
    "is",
    "was",
    "it",
    "that",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "have",
    "or",
    "one",
    "had",
    "by",
    "word",
    "but",
    "not",
    "what",
    "all",
)
_AT_ONCE = 250  # words in one call
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 150, 200, 300, 400, 512, 700, 900, 1100)


class Prompts:
    """Distinct prompts of wished lengths in tokens."""

    def __init__(self, tokens: list[int], max_model_len: int) -> None:
        self._tokens = tokens
        self._max_model_len = max_model_len

    @classmethod
    async def of(cls, api: ApiClient) -> "Prompts":
        """For the model behind an API."""
        rng = Random(7)
        words = [rng.choice(_WORDS) + rng.choice(("", "", "", ",", ".")) for _ in range(4000)]
        tokens: list[int] = []
        for start in range(0, len(words), _AT_ONCE):  # a text that is longer than the model's context is refused
            tokens += await api.tokenize(" ".join(words[start : start + _AT_ONCE]))
        return cls(tokens, await api.max_model_len())

    def of_length(self, tokens: int, seed: int) -> list[int]:
        """One prompt; another seed gives another one."""
        start = Random(seed).randrange(len(self._tokens) - tokens)
        return self._tokens[start : start + tokens]

    def ladder(self, room: int) -> list[list[int]]:
        """25 prompts of 1 to over 1,000 tokens, as far as the context leaves `room` for the answer."""
        longest = self._max_model_len - room
        return [self.of_length(min(length, longest), 100 + i) for i, length in enumerate(LENGTHS)]

    def various(self, count: int, low: int, high: int, seed: int) -> list[list[int]]:
        """`count` prompts of `low` to `high` tokens."""
        rng = Random(seed)
        return [self.of_length(rng.randint(low, high), rng.getrandbits(30)) for _ in range(count)]
