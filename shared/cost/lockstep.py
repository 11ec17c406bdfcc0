"""Data-parallel engines that share a mixture's experts: none starts a layer's experts before all are there."""

from dataclasses import dataclass

from shared.cost.step import Batch, StepModel


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
