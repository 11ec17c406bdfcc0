"""The time of one engine step: any mix of prefill chunks and decodes, under tensor, pipeline and data parallelism."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.cost.catalogue import Accelerator, kv_precision, precision_of
from shared.cost.efficiency import Efficiencies, EfficiencyTable
from shared.cost.geometry import ExpertSplit, ModelGeometry
from shared.cost.layers import LayerCost
from shared.errors import InvalidRequest

_BLOCK = 512  # token counts whose times are worked out at once

Segment = tuple[int, float, float]  # steps whose time grows linearly: how many, seconds of the first and of the last


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes.

    prefill: (tokens computed now, tokens computed before) of each chunk. Decodes: their number, and their total
    context without the tokens under way.
    """

    prefill: tuple[tuple[int, int], ...] = ()
    decode_count: int = 0
    decode_context_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that pass through the weight matrices."""
        return self.decode_count + sum(tokens for tokens, _ in self.prefill)


class StepTimes(Protocol):
    """What a batch costs on an instance, such as `StepModel` and `shared.cost.pipeline.Pipeline`."""

    def step_time_s(self, batch: Batch) -> float:
        """Seconds from the start of a step to its tokens; 0 for an empty batch."""
        ...

    def decode_time_s(self, count: int, context_tokens: int) -> float:
        """Seconds of a step of `count` decodes whose contexts sum to `context_tokens`."""
        ...

    def decode_segments(self, count: int, context_tokens: int, steps: int) -> tuple[Segment, ...]:
        """The next `steps` decode steps, each context longer by one token at each step."""
        ...


@dataclass(frozen=True, slots=True)
class Speed:
    """How measured steps differ from the catalogue's.

    compute, bandwidth: multiples of the accelerator's. step_s, sequence_s: the costs of a step, and of each of its
    sequences, besides the kernels.
    """

    compute: float
    bandwidth: float
    step_s: float
    sequence_s: float


class StepModel:
    """Step times of one model on one instance. Times that depend on token counts alone are kept."""

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
        self._weights_dtype = dtype or geometry.dtype
        self.dtype = precision_of(self._weights_dtype)
        self.kv_dtype = kv_precision(self.dtype, kv_dtype)
        self.experts = experts
        self.efficiencies = efficiencies or EfficiencyTable.from_file().for_device(accelerator.name)
        self._layers = LayerCost(
            accelerator,
            geometry,
            tensor_parallel,
            pipeline_parallel,
            self._weights_dtype,
            self.kv_dtype,
            self.efficiencies,
            experts,
        )
        self._dense_s = _ByCount(self._layers.dense_s)
        self._head_s = _ByCount(self._layers.head_s)

    def at_speed(self, speed: Speed) -> "StepModel":
        device, flops = self.accelerator, self.accelerator.matrix_flops
        return StepModel(
            replace(
                device,
                bandwidth_bytes_s=device.bandwidth_bytes_s * speed.bandwidth,
                matrix_flops={precision: rate * speed.compute for precision, rate in flops.items()},
            ),
            self.geometry,
            self.tensor_parallel,
            self.pipeline_parallel,
            self._weights_dtype,
            replace(self.efficiencies, step_s=speed.step_s, sequence_s=speed.sequence_s),
            self.kv_dtype,
            self.experts,
        )

    def step_time_s(self, batch: Batch) -> float:
        count, contexts = batch.decode_count, batch.decode_context_tokens
        if not batch.prefill:
            return self.decode_time_s(count, contexts)
        tokens = count + sum(new for new, _ in batch.prefill)
        attention = self._layers.mixed_attention_s(batch.prefill, count, contexts)
        return self._dense_s(tokens) + attention + self._head_s(count + len(batch.prefill))

    def decode_time_s(self, count: int, context_tokens: int) -> float:
        if count == 0:
            return 0.0
        return self._dense_s(count) + self._head_s(count) + self._layers.decode_attention_s(count, context_tokens)

    def experts_time_s(self, tokens: int) -> float:
        """Seconds of a step in routed experts, for `tokens` tokens of all engines that share them."""
        return float(self._layers.experts_s(float(max(1, tokens))))

    def prefill_time_s(self, tokens: int, context: int = 0) -> float:
        """Seconds of a step that computes one chunk of `tokens` after `context` earlier tokens."""
        return self.step_time_s(Batch(((tokens, context),)))

    def decode_segments(self, count: int, context_tokens: int, steps: int) -> tuple[Segment, ...]:
        """See `StepTimes`. Exact, because the decode time is piecewise linear in the context."""
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
        """Steps, in order, at which the decode time may change its slope."""
        found: list[int] = []
        for kink in self._layers.decode_kinks:
            if mean_context - 2.0 < kink < mean_context + steps + 2.0:
                # The steps around a kink stand alone, so that no segment spans it.
                before = math.ceil(kink - mean_context) - 2
                found.extend(step for step in range(before, before + 4) if 0 < step < steps)
        return sorted(set(found)) if found else found


class _ByCount:
    """A time by a token or sequence count, worked out for a block of counts at once and kept."""

    __slots__ = ("_blocks", "_time_s")

    def __init__(self, time_s: Callable[[NDArray[np.float64]], Iterable[float]]) -> None:
        self._time_s = time_s
        self._blocks: dict[int, list[float]] = {}

    def __call__(self, count: int) -> float:
        block = self._blocks.get(count // _BLOCK)
        if block is None:
            first = count // _BLOCK * _BLOCK
            counts = np.maximum(np.arange(first, first + _BLOCK, dtype=np.float64), 1.0)
            block = self._blocks[count // _BLOCK] = [float(x) for x in self._time_s(counts)]
        return block[count % _BLOCK]


@dataclass(frozen=True, slots=True)
class ScaledSteps:
    """Step times of a model, multiplied by `factor`, with `chunk_s` more for each prefill chunk."""

    model: StepTimes
    factor: float = 1.0
    chunk_s: float = 0.0

    def times(self, factor: float) -> "ScaledSteps":
        return ScaledSteps(self.model, self.factor * factor, self.chunk_s * factor)

    def step_time_s(self, batch: Batch) -> float:
        return self.factor * self.model.step_time_s(batch) + self.chunk_s * len(batch.prefill)

    def prefill_time_s(self, tokens: int) -> float:
        """Seconds of a step of one chunk without earlier context."""
        return self.step_time_s(Batch(((tokens, 0),)))

    def decode_time_s(self, count: int, context_tokens: int) -> float:
        return self.factor * self.model.decode_time_s(count, context_tokens)

    def decode_segments(self, count: int, context_tokens: int, steps: int) -> tuple[Segment, ...]:
        runs = self.model.decode_segments(count, context_tokens, steps)
        return tuple((taken, self.factor * first, self.factor * last) for taken, first, last in runs)


@dataclass(frozen=True, slots=True)
class Lockstep:
    """Step times of data-parallel engines that share a mixture's experts, taken as one instance with all requests.

    model: the step times of each of the `model.experts.engines` engines. No engine starts a layer's experts before all
    engines are there, idle ones with an empty batch (vLLM). Requests are divided evenly; a step takes what the engine
    with most work takes besides the experts, and the experts once for the tokens of all.
    """

    model: StepModel

    def step_time_s(self, batch: Batch) -> float:
        if not batch.prefill:
            return self.decode_time_s(batch.decode_count, batch.decode_context_tokens)
        engines = self.model.experts.engines
        own_s = max(
            self.model.step_time_s(part) - self.model.experts_time_s(part.tokens * engines)
            for part in _dealt(batch, engines)
            if part.tokens
        )
        return own_s + self.model.experts_time_s(batch.tokens)

    def decode_time_s(self, count: int, context_tokens: int) -> float:
        return self.model.decode_time_s(*self._share(count, context_tokens)) if count else 0.0

    def decode_segments(self, count: int, context_tokens: int, steps: int) -> tuple[Segment, ...]:
        return self.model.decode_segments(*self._share(count, context_tokens), steps)

    def _share(self, count: int, context_tokens: int) -> tuple[int, int]:
        """Decodes and context of the engine with most decodes."""
        most = -(-count // self.model.experts.engines)
        return most, context_tokens * most // count


def _dealt(batch: Batch, engines: int) -> list[Batch]:
    """The engines' parts of a batch: the longest chunks first, each to the engine with the fewest tokens so far."""
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
