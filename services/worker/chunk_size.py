"""The tokens of this instance's steps: a setting, or as many as saturate it by what it has learned of its steps."""

from collections.abc import Callable

from services.worker.settings import WorkerSettings
from shared.domain.rates import StepRates
from shared.policy.chunk_size import SHARE, ChunkBounds, chunk_tokens, next_chunk_tokens
from shared.runtime.logs import get_log

log = get_log(__name__)


class ChunkSize:
    """`tokens` of a step, prefill and decode together, and `why` so many; `use` is told of each change.

    With `auto` it begins with what `start` says.
    """

    def __init__(self, settings: WorkerSettings, start: StepRates, use: Callable[[int], None]) -> None:
        self._use = use
        self._bounds = ChunkBounds.of(settings.step_tokens, settings.max_seqs, settings.block_size)
        self._auto = settings.chunk_size == "auto"
        self.tokens = chunk_tokens(start.prefill, self._bounds) if self._auto else settings.step_tokens
        self.why = "auto: the first estimate of its steps" if self._auto else "as the settings say"
        use(self.tokens)

    def learned(self, steps: StepRates) -> None:
        """What its steps cost, as far as it knows by now."""
        if not self._auto:
            return
        form = steps.prefill
        tokens = next_chunk_tokens(self.tokens, form, self._bounds)
        if tokens == self.tokens:
            return
        self.why = (
            f"auto: {SHARE:.0%} of the best prefill throughput, by {form.steps} steps "
            f"({form.fixed_s * 1e3:.3g} ms + {form.token_s * 1e6:.3g} µs a token)"
        )
        log.info("another chunk size", before=self.tokens, tokens=tokens, why=self.why)
        self.tokens = tokens
        self._use(tokens)

    def describe(self) -> dict[str, int | str]:
        """Both as JSON."""
        return {"tokens": self.tokens, "why": self.why}
