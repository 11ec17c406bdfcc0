"""What a classifier has to beat, and what nobody can: the commonest bucket, the prompt's length, the noise. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from predictor.buckets import Buckets
from predictor.data.examples import Example
from predictor.observed import ObservedLengths


class Ceiling(msgspec.Struct, frozen=True):
    """The most that can be right of answers that differ each time, out of several to each prompt.

    upper: of who knows the very answers, which flatters few samples. lower: of who knows all answers to a prompt but
    the one in question. The truth lies between. prompts: with several answers.
    """

    prompts: int
    lower: float
    upper: float


def commonest(train: Iterable[Example], buckets: Buckets) -> list[float]:
    """Shares of the buckets: what is said of every prompt by who looks at none."""
    seen = Counter(buckets.of(example.output_tokens) for example in train)
    return [seen[bucket] / seen.total() for bucket in range(buckets.count)]


def by_prompt_length(train: Sequence[Example], buckets: Buckets) -> ObservedLengths:
    """Who looks at the prompt's length alone: what the service falls back to, having seen all of `train`."""
    observed = ObservedLengths(buckets, half_life=float(max(1, len(train))))
    for example in train:
        observed.observe(example.prompt_tokens, example.output_tokens)
    return observed


def ceiling(examples: Iterable[Example], buckets: Buckets) -> Ceiling | None:
    """None where no prompt has several answers."""
    answers: dict[tuple[str, int], list[int]] = defaultdict(list)
    for example in examples:
        answers[example.text, example.prompt_tokens].append(buckets.of(example.output_tokens))
    several = [found for found in answers.values() if len(found) > 1]
    if not several:
        return None
    upper = [Counter(found).most_common(1)[0][1] / len(found) for found in several]
    return Ceiling(len(several), sum(map(_left_out, several)) / len(several), sum(upper) / len(several))


def _left_out(found: Sequence[int]) -> float:
    """How often an answer is as most of the others are; of equally common ones by chance."""
    seen, right = Counter(found), 0.0
    for bucket in found:
        others = seen - Counter([bucket])
        most = max(others.values())
        leaders = [one for one, count in others.items() if count == most]
        right += (bucket in leaders) / len(leaders)
    return right / len(found)
