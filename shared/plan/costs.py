"""What a group's engine costs on a workload: a few numbers out of the step times that the simulator takes, too."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np

from shared.cost.catalogue import bytes_of
from shared.cost.kinds import EngineKind
from shared.cost.step import Batch
from shared.plan.problem import Problem, Sample
from shared.sim.workload import Times

KV_SHARE = 0.8  # of the memory that decodes fill where work still flows: above it they preempt each other


@dataclass(frozen=True, slots=True)
class EngineCost:
    """prefill_s: of each sampled prompt alone, chunk by chunk, shape [n]. lanes: batches in flight.

    batch: decodes of a lane that its memory and its seats hold. base_s, more_s: a decode step of b of them takes
    base_s + more_s * b, at the workload's mean context.
    """

    prefill_s: Times
    lanes: int
    batch: float
    base_s: float
    more_s: float

    @property
    def prefills_per_s(self) -> float:
        """Prompts a second when it does nothing else."""
        return self.lanes / float(self.prefill_s.mean())

    def decode_s(self, batch: float) -> float:
        """A step of so many decodes of a lane."""
        return self.base_s + self.more_s * batch

    def batch_within(self, step_s: float) -> float:
        """Decodes of a lane that a step of that length and the memory allow."""
        by_time = (step_s - self.base_s) / self.more_s if self.more_s > 0 else inf
        return max(0.0, min(self.batch, by_time))


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine's cost follows from.

    chunk_s: of a step that computes so many tokens after so many. decode_s: of a lane's step of so many decodes whose
    contexts sum to so many tokens. lane_tokens, seats: of KV and of decodes, of a lane. chunk: tokens of a step.
    """

    chunk_s: Callable[[int, int], float]
    decode_s: Callable[[int, int], float]
    lanes: int
    lane_tokens: int
    seats: int
    chunk: int

    def cost(self, sample: Sample, held: float = 0.0) -> EngineCost:
        """On such requests. held: the share of a prompt that is there before it comes, in a prefix cache."""
        prefill_s = np.array([self._prompt_s(tokens, int(held * tokens)) for tokens in sample.prompts.tolist()])
        batch = min(KV_SHARE * self.lane_tokens / sample.context, float(max(1, self.seats)))
        one, most = 1, max(2, int(batch))
        first_s = self.decode_s(one, int(sample.context))
        last_s = self.decode_s(most, int(most * sample.context))
        more_s = max(0.0, last_s - first_s) / (most - one)
        return EngineCost(prefill_s, self.lanes, max(1.0, batch), first_s - more_s, more_s)

    def _prompt_s(self, tokens: int, held: int) -> float:
        """A prompt that has the engine to itself."""
        return sum(self.chunk_s(min(self.chunk, tokens - at), at) for at in range(held, tokens, self.chunk))


class EngineCosts(Protocol):
    """Engine costs of one problem. kv_bytes: of a token, as engines keep it."""

    kv_bytes: float

    def of(self, kind: EngineKind) -> EngineCost | None:
        """What such an engine costs; None for a kind that the model does not fit."""
        ...


class Costs:
    """By the cost model, each worked out once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._known: dict[EngineKind, EngineCost | None] = {}
        geometry = problem.shop.geometry
        self._longest = problem.longest
        self.kv_bytes = geometry.kv_bytes_per_token(
            bytes_of(geometry.dtype if problem.dtype is None else problem.dtype)
        )

    def of(self, kind: EngineKind) -> EngineCost | None:
        """See `EngineCosts`."""
        if kind not in self._known:
            self._known[kind] = self._made(kind)
        return self._known[kind]

    def _made(self, kind: EngineKind) -> EngineCost | None:
        problem = self._problem
        lane_tokens = problem.shop.kv_tokens(kind) // kind.lanes
        if lane_tokens < self._longest:
            return None
        times, limits = problem.shop.times(kind), problem.limits

        def chunk_s(tokens: int, before: int) -> float:
            return times.step_time_s(Batch(((tokens, before),)))

        seats = limits.sequences // kind.lanes
        engine = Engine(chunk_s, times.decode_time_s, kind.lanes, lane_tokens, seats, limits.batched_tokens)
        return engine.cost(problem.sample)
