"""What this instance knows of its own speed: a start, corrected by its steps and its transfers while it serves."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from services.worker.engines.base import StepLog
from services.worker.settings import WorkerSettings
from shared.cost.kinds import EngineKind, Stage, Workshop, even_layers
from shared.cost.learning import LinkLearner, StepLearner
from shared.cost.library import Library
from shared.cost.linear import rates_of_steps
from shared.cost.step import Batch
from shared.cost.step_rates import step_rates_of
from shared.domain.instance import InstanceInfo
from shared.domain.kv import KvHandle, TransferOutcome, TransferReport
from shared.domain.rates import UNKNOWN_STEPS, Rates, StepRates
from shared.errors import PolyphaseError
from shared.policy.chunk_size import SHARE, ChunkBounds, chunk_tokens, next_chunk_tokens
from shared.runtime.logs import get_log

# MERGED chunk_size.py
# The tokens of this instance's steps: a setting, or as many as saturate it by what it has learned of its steps.


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


# MERGED engine_kind.py
# The engine that a worker's settings describe, as the cost model has it.


def kind_of(settings: WorkerSettings, shop: Workshop) -> EngineKind:
    """Its stages on their accelerators. Raises NotFound for one that nobody knows."""
    stages = settings.pipeline_parallel
    names = settings.stage_accelerators or (settings.accelerator,) * stages
    layers = settings.pipeline_layers or even_layers(shop.geometry.layers, stages)
    made = tuple(Stage(shop.device(name).name, count) for name, count in zip(names, layers, strict=True))
    hop = settings.emulated_hop.link if settings.emulated_hop is not None else None
    return EngineKind(made, settings.tensor_parallel, settings.dtype, hop=hop)


log = get_log(__name__)
LEARN_S = 0.5  # between two looks at the steps
REPEAT_S = 5.0  # so often rates are told again though they are the same: who was away hears them then
STEPS_A_LOOK = 64  # the newest are learned from; an engine of many short steps is not learned from more
TOLD_APART = 0.02  # a change by a smaller share is not told


class LiveRates:
    """Learns at each `learn`; `news` is what the next heartbeat is to carry. `use_chunk` is told of each chunk size."""

    def __init__(
        self,
        settings: WorkerSettings,
        info: InstanceInfo,
        steps: StepLog,
        use_chunk: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.start = start = info.rates.step or catalogue_steps(settings)
        self.current = msgspec.structs.replace(info.rates, step=start)
        self._steps = steps
        self._stages = settings.pipeline_parallel  # as many batches are in flight: a step has that share of the decodes
        self._next = 0
        self.chunk = ChunkSize(settings, start, use_chunk)
        self._learner = StepLearner(start, settings.step_tokens, settings.max_seqs)
        self._link = LinkLearner(info.rates.link)
        self._token_bytes = info.kv_bytes_per_token
        self._told: Rates | None = None
        self._told_s = 0.0

    @property
    def step(self) -> StepRates | None:
        """What a step costs, as far as it is known."""
        return self.current.step

    def of(self, info: InstanceInfo) -> InstanceInfo:
        """This instance with what is known of it by now."""
        return msgspec.structs.replace(info, rates=self.current, chunk_size=self.chunk.tokens)

    def transferred(self, handle: KvHandle, report: TransferReport) -> None:
        """An import has ended."""
        if report.outcome is TransferOutcome.PULLED and report.wire_bytes:
            kv_bytes = report.tokens * self._token_bytes
            took_s = report.ended_s - report.started_s
            self._link.add(handle.instance_id, handle.codec, kv_bytes, report.wire_bytes, took_s)

    def learn(self) -> None:
        """Take in what has happened since the last time."""
        page = self._steps.page("", 0, self._next, 1 << 20)
        self._next = page.next
        steps = page.steps[-STEPS_A_LOOK:]
        for one in steps:
            batch = Batch(one.prefill, self._stages * one.decode_count, self._stages * one.decode_context_tokens)
            self._learner.add(batch, one.seconds, one.ended_s)
        if steps:
            step = self._learner.rates(steps[-1].ended_s)
            self.chunk.learned(step)
            learned = rates_of_steps(step, self.chunk.tokens)
            self.current = msgspec.structs.replace(
                self.current, prefill=learned.prefill, chunked=learned.chunked, batch=learned.batch, step=step
            )
        if (link := self._link.rate) is not None:
            self.current = msgspec.structs.replace(self.current, link=link)

    def news(self, now: float) -> Rates | None:
        """The present rates, if they differ from those told last, or were not told for a while. Unix seconds."""
        if now - self._told_s < REPEAT_S and self._told is not None and _alike(self.current, self._told):
            return None
        self._told, self._told_s = self.current, now
        return self.current


@dataclass(slots=True)
class KnownRates:
    """What the instance's steps cost, for its engine, which starts before anything of it is known."""

    rates: LiveRates | None = None

    def step(self) -> StepRates | None:
        """As far as it is known by now."""
        return self.rates.step if self.rates is not None else None


def catalogue_steps(settings: WorkerSettings) -> StepRates:
    """Where to begin without a calibration: the catalogue's accelerator, or some mid-range one where it has none."""
    try:
        library = Library.built_in()
        shop = Workshop(library, library.geometry(settings.model))
        times = shop.spread(kind_of(settings, shop))
    except PolyphaseError as error:
        log.info("no step times of this accelerator and model; they are learned", reason=error.message)
        return UNKNOWN_STEPS
    return step_rates_of(times.step_time_s, settings.step_tokens, settings.max_seqs)


def _alike(one: Rates, other: Rates) -> bool:
    if one.step is None or other.step is None or one.link != other.link:
        return one == other
    pairs = zip(_forms(one.step), _forms(other.step), strict=True)
    return all(abs(a - b) <= TOLD_APART * max(abs(a), abs(b)) for a, b in pairs)


def _forms(step: StepRates) -> list[float]:
    """The times of a usual step of each kind: what a change of coefficients comes to."""
    usual = 256
    return [
        step.prefill_s(usual, 0),
        step.prefill_s(usual, 1024),
        step.decode_s(1, 512),
        step.decode_s(16, 16 * 512),
        step.mixed_s(usual, 0, 1, 512),
        step.mixed_s(usual, 0, 16, 16 * 512),
    ]
