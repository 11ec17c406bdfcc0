"""Step times made from those of `StepModel`: scaled by a factor, and of data-parallel engines in lockstep."""

from dataclasses import dataclass

from shared.cost.step import Batch, Segment, StepModel, StepTimes


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
        segments = self.model.decode_segments(count, context_tokens, steps)
        return tuple((taken, self.factor * first, self.factor * last) for taken, first, last in segments)


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
        if count == 0:
            return 0.0
        return self.model.decode_time_s(*self._share(count, context_tokens))

    def decode_segments(self, count: int, context_tokens: int, steps: int) -> tuple[Segment, ...]:
        if count == 0:
            return ((steps, 0.0, 0.0),)
        return self.model.decode_segments(*self._share(count, context_tokens), steps)

    def _share(self, count: int, context_tokens: int) -> tuple[int, int]:
        """Decodes and context of the engine with most decodes; `count` is at least 1."""
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
