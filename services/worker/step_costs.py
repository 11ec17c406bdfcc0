"""The predicted step cost of this instance and its chunk size.

The prediction starts from the catalogue or a calibration and is corrected by measured engine steps and KV transfers.
The chunk size is a setting, or the number of tokens that saturates the accelerator according to that prediction.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from services.worker.engines.base import StepLog
from services.worker.identity import precision_of
from services.worker.settings import WorkerSettings
from shared.cost.kinds import EngineKind, EngineModels, Stage, even_layers
from shared.cost.learning import LinkLearner, StepLearner
from shared.cost.library import Library
from shared.cost.step import Batch
from shared.domain.instance import InstanceInfo
from shared.domain.kv import KvHandle, TransferOutcome, TransferReport
from shared.domain.precision import stored_in
from shared.domain.rates import UNKNOWN_STEPS, Rates, StepRates
from shared.errors import PolyphaseError
from shared.policy.step_budget import SHARE, ChunkBounds, chunk_tokens, next_chunk_tokens
from shared.runtime.logs import get_log

log = get_log(__name__)
LEARN_S = 0.5  # between two calls of `learn`
REPEAT_S = 5.0  # unchanged rates are published again after this time, for schedulers that missed them
STEPS_PER_CALL = 64  # the newest steps count; of an engine with many short steps, older ones are skipped
PUBLISHED_CHANGE = 0.02  # a change by a smaller share is not published


class LiveRates:
    """The rates of this instance, corrected by its own steps and imports.

    `learn` is called from time to time; `to_publish` returns what the next heartbeat carries. use_chunk: called with
    each chunk size. host_token_s: of the rates, as measured by now; 0: not measured.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        info: InstanceInfo,
        steps: StepLog,
        use_chunk: Callable[[int], None] = lambda _: None,
        host_token_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.start = start = info.rates.step or catalogue_steps(settings)
        self.current = msgspec.structs.replace(info.rates, step=start)
        self.chunk = ChunkSize(settings, start, use_chunk)
        self._steps = steps
        self._host_token_s = host_token_s
        self._lanes = settings.pipeline_parallel  # batches in flight: each step has that share of the decodes
        self._next_step = self._decodes = self._accepted = 0
        self._learner = StepLearner(start, settings.step_tokens, settings.max_seqs)
        self._link = LinkLearner(info.rates.link)
        self._token_bytes = info.kv_bytes_per_token
        self._published: Rates | None = None
        self._published_s = 0.0

    @property
    def step(self) -> StepRates | None:
        return self.current.step

    def with_rates(self, info: InstanceInfo) -> InstanceInfo:
        """This instance with its present rates and chunk size."""
        return msgspec.structs.replace(info, rates=self.current, chunk_size=self.chunk.tokens)

    def transferred(self, handle: KvHandle, report: TransferReport) -> None:
        if report.outcome is TransferOutcome.PULLED and report.wire_bytes:
            kv_bytes, seconds = report.tokens * self._token_bytes, report.ended_s - report.started_s
            self._link.add(handle.instance_id, handle.codec, kv_bytes, report.wire_bytes, seconds)

    def learn(self) -> None:
        """Learn from the steps and imports since the last call."""
        page = self._steps.page("", 0, self._next_step, 1 << 20)
        self._next_step = page.next
        steps = page.steps[-STEPS_PER_CALL:]
        for step in steps:
            decodes, context = self._lanes * step.decode_count, self._lanes * step.decode_context_tokens
            self._learner.add(Batch(step.prefill, decodes, context), step.seconds, step.ended_s)
        decodes, accepted = self._steps.decodes, self._steps.accepted_tokens
        more, self._decodes = decodes - self._decodes, decodes
        gained, self._accepted = more + accepted - self._accepted, accepted
        if steps:
            self._learner.gained(more, gained, steps[-1].ended_s)
            learned = self._learner.rates(steps[-1].ended_s)
            self.chunk.follow(learned)
            self.current = msgspec.structs.replace(self.current, step=learned)
        if host_token_s := self._host_token_s():
            self.current = msgspec.structs.replace(self.current, host_token_s=host_token_s)
        if (link := self._link.rate) is not None:
            self.current = msgspec.structs.replace(self.current, link=link)

    def to_publish(self, now: float) -> Rates | None:
        """The present rates, if they differ from the published ones or these are older than REPEAT_S; otherwise None.
        now: Unix seconds.
        """
        if now - self._published_s < REPEAT_S and self._published is not None and _alike(self.current, self._published):
            return None
        self._published, self._published_s = self.current, now
        return self.current


class ChunkSize:
    """`tokens` of a step, prefill and decode together, and `why` that number; `use` is called with each change.

    With `auto` it begins with the number for the rates `start`.
    """

    def __init__(self, settings: WorkerSettings, start: StepRates, use: Callable[[int], None]) -> None:
        self._use = use
        self._bounds = ChunkBounds.for_seats(settings.step_tokens, settings.max_seqs, settings.block_size)
        self._auto = settings.chunk_size == "auto"
        self.tokens = chunk_tokens(start.prefill, self._bounds) if self._auto else settings.step_tokens
        self.why = "auto: the first estimate of its steps" if self._auto else "as the settings say"
        use(self.tokens)

    def follow(self, steps: StepRates) -> None:
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


@dataclass(slots=True)
class KnownRates:
    """The step cost for the engine, which starts before `rates` exist."""

    rates: LiveRates | None = None

    def step(self) -> StepRates | None:
        return self.rates.step if self.rates is not None else None


def catalogue_steps(settings: WorkerSettings) -> StepRates:
    """The step cost before the first step without a calibration: that of the catalogue's accelerator, or of a mid-range
    one where the catalogue lacks it.
    """
    try:
        library = Library.built_in()
        models = EngineModels(library, library.geometry(settings.model))
        return models.step_rates(kind_of(settings, models), settings.step_tokens, settings.max_seqs)
    except PolyphaseError as error:
        log.info("no step times of this accelerator and model; they are learned", reason=error.message)
        return UNKNOWN_STEPS


def kind_of(settings: WorkerSettings, models: EngineModels) -> EngineKind:
    """The engine that a worker's settings describe. Raises NotFound for an unknown accelerator."""
    stages = settings.pipeline_parallel
    names = settings.stage_accelerators or (settings.accelerator,) * stages
    layers = settings.pipeline_layers or even_layers(models.geometry.layers, stages)
    layout = tuple(Stage(models.device(name).name, count) for name, count in zip(names, layers, strict=True))
    hop = settings.emulated_hop.link if settings.emulated_hop is not None else None
    if weights := stored_in(precision_of(settings)):
        return EngineKind(layout, settings.tensor_parallel, weights, kv_dtype=settings.dtype, hop=hop)
    return EngineKind(layout, settings.tensor_parallel, settings.dtype, hop=hop)


def _alike(one: Rates, other: Rates) -> bool:
    """Whether a scheduler would predict about the same times."""
    if one.step is None or other.step is None or one.link != other.link:
        return one == other
    pairs = [*zip(_usual_steps_s(one.step), _usual_steps_s(other.step), strict=True)]
    pairs.append((one.host_token_s, other.host_token_s))
    return all(abs(a - b) <= PUBLISHED_CHANGE * max(abs(a), abs(b)) for a, b in pairs)


def _usual_steps_s(step: StepRates) -> tuple[float, ...]:
    """The times of usual steps of each kind."""
    return (
        step.prefill_s(256, 0),
        step.prefill_s(256, 1024),
        step.decode_s(1, 512),
        step.decode_s(16, 16 * 512),
        step.token_s(16, 16 * 512),
        step.mixed_s(256, 0, 1, 512),
        step.mixed_s(256, 0, 16, 16 * 512),
    )
