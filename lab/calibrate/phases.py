"""The controlled load: what is asked of the cluster so that its steps show every kind of batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from lab.calibrate.step_reader import StepReader
from lab.calibrate.target import Target
from lab.calibrate.traffic import Sample, Shot, Traffic
from shared.domain.instance import Role
from shared.sim.measured import LiveInstance

_LONGEST = 4096  # prompt tokens: longer ones say little more of a step
_SHARE = 0.4  # of the time that a decode or prefill instance shall be busy in the last phase
_CORES_SHARE = 0.3  # the same of the cores that it shares
_PERIOD_S, _MOST_RATE, _LEAST, _MOST = 20.0, 20.0, 24, 200


@dataclass(frozen=True, slots=True)
class Observed:
    """What the client saw: one request at a time, and then a moderate load."""

    alone: tuple[Sample, ...]
    moderate: tuple[Sample, ...]


async def run_phases(
    target: Target, traffic: Traffic, instances: Sequence[LiveInstance], reader: StepReader, cores: int, seed: int
) -> Observed:
    """All of it. Raises Unavailable when a request fails."""
    rng = Random(seed)
    prefills = sum(one.role is Role.PREFILL for one in instances)
    decodes = len(instances) - prefills
    longest = min(_LONGEST, traffic.max_model_len - 64)
    ladder = [max(8, longest * share // 64) for share in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)]
    await traffic.closed([Shot(64, 4)] * 4 * max(prefills, decodes), 2)  # connections, caches, first kernels
    await reader.skip()
    async with target.policies(split="full"):
        alone = await traffic.closed([Shot(tokens, 12) for tokens in [*ladder, *ladder[::-1]]], 1)
        await reader.read()
        await traffic.closed([Shot(rng.choice(ladder[:6]), 1) for _ in range(12 * prefills)], 3 * prefills)
        for batch in (2, 4, 8, 16):
            shots = [Shot(rng.choice(ladder[:5]), rng.randint(16, 32)) for _ in range(2 * batch * decodes)]
            await traffic.closed(shots, batch * decodes)
        await reader.read()
    async with target.policies(split="none"):
        shots = [Shot(rng.choice(ladder[:8]), rng.randint(8, 24)) for _ in range(16 * decodes)]
        await traffic.closed(shots, 4 * decodes)
        await reader.read()
    async with target.policies(split="full"):
        rate = _moderate_rate(alone, prefills, decodes, cores)
        moderate = await traffic.timed(_moderate(rng, rate, ladder))
        await reader.read()
    return Observed(tuple(alone), tuple(moderate))


def _moderate(rng: Random, rate: float, ladder: Sequence[int]) -> list[Shot]:
    """A Poisson process for some 20 s."""
    count = min(_MOST, max(_LEAST, round(rate * _PERIOD_S)))
    at_s, shots = 0.0, []
    for _ in range(count):
        shots.append(Shot(rng.choice(ladder[:7]), rng.randint(12, 48), at_s))
        at_s += rng.expovariate(rate)
    return shots


def _moderate_rate(alone: Sequence[Sample], prefills: int, decodes: int, cores: int) -> float:
    """Requests a second at which instances are busy `_SHARE` of the time, and cores `_CORES_SHARE`."""
    prefill_s = fmean(sample.ttft_s for sample in alone) / 2.0  # the prompts of this phase are half as long
    decode_s = 30.0 * fmean(sample.tpot_s or 0.0 for sample in alone)
    rates = (_SHARE * prefills / prefill_s, _SHARE * decodes / decode_s, _CORES_SHARE * cores / (prefill_s + decode_s))
    return min(_MOST_RATE, *rates)
