"""Answers of an instance's HTTP API. Times are unix seconds, rates bytes a second."""

from msgspec import Struct

from shared.domain.instance import InstanceInfo, Role
from shared.domain.rates import CodecRate, LinkRate, StepRates
from shared.wire.api.monitor import InstanceRow, LoadByName


class ChunkSizeStatus(Struct, frozen=True):
    """The tokens of an engine step, and the reason for this number."""

    tokens: int
    why: str


class PolicyStatus(Struct, frozen=True):
    """The policies that the engine follows. trouble: why it does not follow newer ones."""

    prefill_order: str
    decode_admission: str
    step_budget: bool
    revision: int
    trouble: str


class InstanceStatus(Struct, frozen=True):
    """An instance and its present work. refused: why the monitor does not let it join; empty if it does."""

    info: InstanceInfo
    role: Role
    draining: bool
    load: LoadByName
    flips: int
    refused: str
    chunk_size: ChunkSizeStatus
    policies: PolicyStatus
    threads: int
    max_seqs: int


class Step(Struct, frozen=True):
    """A step of the engine. expected_s: by the cost model or the calibration; learned_s: by what the instance has
    learned since its start.
    """

    ended_s: float
    seconds: float
    prefill_tokens: int
    decodes: int
    context_tokens: int
    expected_s: float | None
    learned_s: float | None

    @property
    def kind(self) -> str:
        if not self.decodes:
            return "prefill"
        return "both" if self.prefill_tokens else "decode"


class Steps(Struct, frozen=True):
    """The newest steps, and the number of all steps since the start."""

    total: int
    newest: list[Step]


class StepCosts(Struct, frozen=True):
    """The step cost as it was at the start, and as the instance has learned it since."""

    at_start: StepRates | None
    learned: StepRates | None


class PrefixCache(Struct, frozen=True):
    """The prefix blocks that the instance holds, and how many of the requested prompt tokens it had cached."""

    blocks: int
    block_tokens: int
    asked_tokens: int
    hit_tokens: int


class InstanceDetails(Struct, frozen=True):
    """What an instance reports about itself beyond its status. drafted_tokens, accepted_tokens: of speculative
    decoding, since the start.
    """

    instance_id: str
    started_s: float
    uptime_s: float
    versions: dict[str, str]
    steps: Steps
    rates: StepCosts
    link: LinkRate | None
    codecs: dict[str, CodecRate]
    prefixes: PrefixCache
    preemptions: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class MonitoredDetails(InstanceDetails, frozen=True, kw_only=True):
    """The details of an instance with the monitor's knowledge of it. restarts: since the monitor's log begins."""

    known: InstanceRow
    restarts: int


class LogLines(Struct, frozen=True):
    """The last lines of an instance's log, oldest first."""

    lines: list[str]
