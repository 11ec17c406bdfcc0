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
# The step that reaches a kink, and this many steps before and after it, are segments of their own: rounding of the mean
# context may put the kink one step off.
_ALONE = 1
_NEAR = _ALONE + 1.0  # tokens of mean context: the cuts of a kink that is farther from a span are all outside the span

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
        """See `StepTimes`. Exact, because the decode time is linear in the context between kinks."""
        if count == 0:
            return ((steps, 0.0, 0.0),)
        fixed = self._dense_s(count) + self._head_s(count)
        attention = self._layers.decode_attention_s
        segments = []
        start = 0
        for stop in (*self._cuts(context_tokens / count, steps), steps):
            first = attention(count, context_tokens + start * count)
            last = attention(count, context_tokens + (stop - 1) * count)
            segments.append((stop - start, fixed + first, fixed + last))
            start = stop
        return tuple(segments)

    def decode_span_s(self, count: int, context_tokens: int, steps: int) -> float:
        """Seconds of `steps` decode steps in a row: within rounding the sum of their `decode_time_s`."""
        if count == 0 or steps <= 0:
            return 0.0
        segments = self.decode_segments(count, context_tokens, steps)
        return sum(taken * (first + last) / 2.0 for taken, first, last in segments)

    def _cuts(self, mean_context: float, steps: int) -> list[int]:
        """Steps, in order, at which a new segment starts, so that no segment spans a kink.

        A kink is a mean context at which the decode time changes its slope: the length of an attention window, or the
        depth up to which a longer context adds latency (`LayerCost.decode_kinks`). Step 0 reads `mean_context + 1`
        tokens of each sequence, the token under way included, and each later step one more.
        """
        cuts: list[int] = []
        for kink in self._layers.decode_kinks:
            if mean_context - _NEAR < kink < mean_context + steps + _NEAR:
                reached = math.ceil(kink - mean_context) - 1  # the first step at or beyond the kink
                first, last = reached - _ALONE, reached + _ALONE
                cuts += [step for step in range(first, last + 2) if 0 < step < steps]  # before each, after the last
        if not cuts:  # as of most spans
            return cuts
        return sorted(set(cuts))


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
