"""Chats of several turns, each of whose prompts is all that was said before and something new."""

from dataclasses import dataclass
from random import Random

_WORDS = """
river stone house quiet garden harbour copper engine people road winter morning letter window market bridge forest
silver table captain island summer machine paper village mountain teacher station yellow button
"""
SYSTEM_WORDS, FIRST_WORDS, LATER_WORDS, ANSWER_WORDS = 60, (150, 350), (30, 90), (30, 60)
PAUSE_S = (3.0, 9.0)  # between an answer and what its reader says next: uniform


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a chat. messages: its whole prompt; pause_s: after the answer before."""

    messages: tuple[tuple[str, str], ...]  # role, text
    pause_s: float


@dataclass(frozen=True, slots=True)
class Chat:
    """starts_s: of its first turn."""

    starts_s: float
    turns: tuple[Turn, ...]


def chats(count: int, turns: int, per_s: float, seed: int) -> list[Chat]:
    """`count` chats that begin as a Poisson process, `per_s` a second, the first at once. All have one system prompt.

    What the assistant said is written down beforehand, as in a replay of chats that were, so that every system gets the
    same prompts.
    """
    rng = Random(seed)
    system, made, at_s = ("system", _text(rng, SYSTEM_WORDS)), [], 0.0
    for _ in range(count):
        made.append(Chat(at_s, _turns(rng, system, turns)))
        at_s += rng.expovariate(per_s)
    return made


def _turns(rng: Random, system: tuple[str, str], count: int) -> tuple[Turn, ...]:
    said, found = [system], []
    for number in range(count):
        said.append(("user", _text(rng, rng.randint(*(LATER_WORDS if number else FIRST_WORDS)))))
        found.append(Turn(tuple(said), rng.uniform(*PAUSE_S) if number else 0.0))
        said.append(("assistant", _text(rng, rng.randint(*ANSWER_WORDS))))
    return tuple(found)


def messages_of(turn: Turn) -> list[dict[str, str]]:
    """As the API takes them."""
    return [{"role": role, "content": text} for role, text in turn.messages]


def _text(rng: Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS.split(), k=words))
