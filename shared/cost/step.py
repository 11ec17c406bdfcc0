"""The time of one engine step: any mix of prefill chunks and decodes, under tensor and pipeline parallelism."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shared.cost.catalogue import Accelerator, bytes_of, precision_of
from shared.cost.efficiency import Efficiencies, EfficiencyTable
from shared.cost.geometry import ExpertSplit, ModelGeometry
from shared.cost.layers import LayerCost
from shared.errors import InvalidRequest

_BLOCK = 512  # token counts priced at once


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes.

    prefill: (tokens computed now, tokens computed before) of each chunk. Decodes: their number, and their total
    context without the tokens under way.
    """

    prefill: tuple[tuple[int, int], ...] = ()
    decode_count: int = 0
    decode_context_tokens: int = 0

    @classmethod
    def of(cls, prefill: Iterable[tuple[int, int]] = (), decode_contexts: Iterable[int] = ()) -> "Batch":
        """A batch from the contexts of its decode requests."""
        contexts = tuple(decode_contexts)
        return cls(tuple(prefill), len(contexts), sum(contexts))

    @property
    def tokens(self) -> int:
        """Tokens that pass through the weight matrices."""
        return self.decode_count + sum(tokens for tokens, _ in self.prefill)


class StepTimes(Protocol):
    """What a batch costs on an instance; `StepModel` and `shared.cost.pipeline.Pipeline` are such."""

    def step_time_s(self, batch: Batch) -> float:
        """Seconds of one step."""
        ...

    def decode_time_s(self, count: int, context_tokens: int) -> float:
        """Seconds of a step of `count` decodes whose contexts sum to `context_tokens`."""
        ...

    def decode_segments(self, count: int, context_tokens: int, steps: int) -> tuple[tuple[int, float, float], ...]:
        """The next `steps` decode steps as runs in which the step time grows linearly.

        Each run is (steps in it, seconds of its first step, seconds of its last).
        """
        ...


class StepModel:
    """Step times of one model on one instance: constants, and a memo of what depends on token counts alone.

    Deterministic: equal arguments give equal times, in any order of calls.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        geometry: ModelGeometry,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        dtype: str | None = None,
        efficiencies: Efficiencies | None = None,
        kv_dtype: str | None = None,
        experts: ExpertSplit = ExpertSplit(),
    ) -> None:
        if tensor_parallel < 1 or pipeline_parallel < 1:
            raise InvalidRequest("tensor_parallel and pipeline_parallel must be at least 1")
        if pipeline_parallel > geometry.layers:
            raise InvalidRequest(
                f"pipeline_parallel {pipeline_parallel} exceeds the {geometry.layers} layers of {geometry.name}"
            )
        self.accelerator = accelerator
        self.geometry = geometry
        self.tensor_parallel = tensor_parallel
        self.pipeline_parallel = pipeline_parallel
        self.dtype = precision_of(dtype or geometry.dtype)
        self.kv_dtype = precision_of(kv_dtype or ("bf16" if bytes_of(self.dtype) < 2 else self.dtype))
        self.experts = experts
        self.efficiencies = efficiencies or EfficiencyTable.from_file().for_device(accelerator.name)
        self._layers = LayerCost(
            accelerator,
            geometry,
            tensor_parallel,
            pipeline_parallel,
            dtype or geometry.dtype,
            self.kv_dtype,
            self.efficiencies,
            experts,
        )
        self._dense: dict[int, list[float]] = {}
        self._heads: dict[int, list[float]] = {}

    def step_time_s(self, batch: Batch) -> float:
        """Seconds from the start of a step to its tokens; 0 for an empty batch."""
        count, contexts = batch.decode_count, batch.decode_context_tokens
        if not batch.prefill:
            return self.decode_time_s(count, contexts)
        tokens = count + sum(new for new, _ in batch.prefill)
        attention = self._layers.mixed_attention_s(batch.prefill, count, contexts)
        return self._dense_s(tokens) + attention + self._head_s(count + len(batch.prefill))

    def decode_time_s(self, count: int, context_tokens: int) -> float:
        """Seconds of a step of `count` decodes whose contexts sum to `context_tokens`."""
        if count == 0:
            return 0.0
        return self._dense_s(count) + self._head_s(count) + self._layers.decode_attention_s(count, context_tokens)

    def experts_time_s(self, tokens: int) -> float:
        """Seconds of a step in routed experts, for `tokens` tokens of all engines that share them; see Lockstep."""
        return float(self._layers.experts_s(float(max(1, tokens))))

    def prefill_time_s(self, tokens: int, context: int = 0) -> float:
        """Seconds of a step that computes one chunk of `tokens` after `context` earlier tokens."""
        return self.step_time_s(Batch(((tokens, context),)))

    def decode_segments(self, count: int, context_tokens: int, steps: int) -> tuple[tuple[int, float, float], ...]:
        """The next `steps` decode steps, each context longer by one token at every step, as runs of linear growth.

        Each run is (steps in it, seconds of its first step, seconds of its last). Exact, because the decode time is
        piecewise linear in the context.
        """
        fixed = self._dense_s(count) + self._head_s(count)
        attention = self._layers.decode_attention_s
        runs = []
        start = 0
        for stop in (*self._kinks_after(context_tokens / count, steps), steps):
            first = attention(count, context_tokens + start * count)
            last = attention(count, context_tokens + (stop - 1) * count)
            runs.append((stop - start, fixed + first, fixed + last))
            start = stop
        return tuple(runs)

    def decode_span_s(self, count: int, context_tokens: int, steps: int) -> float:
        """Seconds of `steps` decode steps in a row: within rounding the sum of their `decode_time_s`."""
        if count == 0 or steps <= 0:
            return 0.0
        runs = self.decode_segments(count, context_tokens, steps)
        return sum(taken * (first + last) / 2.0 for taken, first, last in runs)

    def _kinks_after(self, mean_context: float, steps: int) -> list[int]:
        """Steps, in order, at which the decode time may change its slope: segments in between are linear."""
        found: list[int] = []
        for kink in self._layers.decode_kinks:
            if mean_context - 2.0 < kink < mean_context + steps + 2.0:
                # The steps around a kink stand alone, so that no segment spans it.
                before = math.ceil(kink - mean_context) - 2
                found.extend(step for step in range(before, before + 4) if 0 < step < steps)
        return sorted(set(found)) if found else found

    def _dense_s(self, tokens: int) -> float:
        block = tokens // _BLOCK
        known = self._dense.get(block)
        if known is None:
            counts = np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=np.float64)
            known = self._dense[block] = [float(x) for x in self._layers.dense_s(np.maximum(counts, 1.0))]
        return known[tokens % _BLOCK]

    def _head_s(self, sequences: int) -> float:
        block = sequences // _BLOCK
        known = self._heads.get(block)
        if known is None:
            counts = np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=np.float64)
            known = self._heads[block] = [float(x) for x in self._layers.head_s(np.maximum(counts, 1.0))]
        return known[sequences % _BLOCK]


# MERGED lockstep.py
# Data-parallel engines that share a mixture's experts: none starts a layer's experts before all are there.


@dataclass(frozen=True, slots=True)
class Lockstep:
    """Step times of a whole group of data-parallel engines, taken as one instance with all their requests.

    model: one engine's step times, `model.experts.engines` of them in the group. Requests are dealt evenly; a step
    takes what the engine with most to do takes besides the experts, and the experts once for the tokens of all.
    Source: ours (F); vLLM's data-parallel engines meet at each mixture layer, idle ones with an empty batch.
    """

    model: StepModel

    def step_time_s(self, batch: Batch) -> float:
        """Seconds of a step in which the group computes `batch`."""
        if not batch.prefill:
            return self.decode_time_s(batch.decode_count, batch.decode_context_tokens)
        engines = self.model.experts.engines
        own_s = max(self._own_s(part) for part in _dealt(batch, engines) if part.tokens)
        return own_s + self.model.experts_time_s(batch.tokens)

    def decode_time_s(self, count: int, context_tokens: int) -> float:
        """Seconds of a step of `count` decodes, context_tokens in all, evenly over the engines."""
        return self.model.decode_time_s(*self._share(count, context_tokens)) if count else 0.0

    def decode_segments(self, count: int, context_tokens: int, steps: int) -> tuple[tuple[int, float, float], ...]:
        """See StepModel: the next `steps` decode steps as runs of linear growth."""
        return self.model.decode_segments(*self._share(count, context_tokens), steps)

    def _own_s(self, part: Batch) -> float:
        """What one engine takes for its part, experts apart."""
        together = part.tokens * self.model.experts.engines
        return self.model.step_time_s(part) - self.model.experts_time_s(together)

    def _share(self, count: int, context_tokens: int) -> tuple[int, int]:
        """Decodes and context of the engine with most of them."""
        most = -(-count // self.model.experts.engines)
        return most, context_tokens * most // count


def _dealt(batch: Batch, engines: int) -> list[Batch]:
    """The parts of the engines: the longest chunks first, each to the engine with the fewest tokens so far."""
    chunks: list[list[tuple[int, int]]] = [[] for _ in range(engines)]
    loads = [0] * engines
    for chunk in sorted(batch.prefill, reverse=True):
        at = loads.index(min(loads))
        chunks[at].append(chunk)
        loads[at] += chunk[0]
    parts = []
    for at, own in enumerate(chunks):
        count = batch.decode_count // engines + (at < batch.decode_count % engines)
        contexts = batch.decode_context_tokens * count // batch.decode_count if batch.decode_count else 0
        parts.append(Batch(tuple(own), count, contexts))
    return parts
