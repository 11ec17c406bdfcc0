"""What comes in over HTTP, validated once and turned into the domain's types."""

from dataclasses import replace
from typing import Annotated

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from services.cluster_monitor.audit import Asked
from services.cluster_monitor.events import EventKind
from shared.domain.demand import DemandSecond
from shared.domain.instance import InstanceInfo, Role
from shared.policy.served import Ended, How
from shared.runtime.settings import Name

Text = Annotated[str, Field(min_length=1, max_length=512)]


def _port(address: str) -> str:
    port = int(address.rpartition(":")[2])
    if not 0 < port < 65_536:
        raise ValueError(f"{port} is no port")
    return address


Tcp = Annotated[str, Field(pattern=r"^tcp://[^\s]{1,255}:\d{1,5}$"), AfterValidator(_port)]
Kv = Annotated[str, Field(pattern=r"^(kv|tcp|nixl)://[^\s]{1,255}:\d{1,5}$"), AfterValidator(_port)]
Http = Annotated[str, Field(pattern=r"^https?://[^\s]{1,255}$")]
Count = Annotated[int, Field(ge=0, lt=2**62)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


# As JSON has them: text.
RoleName = Annotated[Role, Field(strict=False)]
HowName = Annotated[How, Field(strict=False)]
KindName = Annotated[EventKind, Field(strict=False)]


class _Edge(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False, extra="forbid", frozen=True, strict=True)


class _OfService(_Edge):
    """A body that another service of the cluster sends. Its wire version was checked before; fields that are not known
    here are optional ones of a later release.
    """

    model_config = ConfigDict(extra="ignore")


class GeometryIn(_OfService):
    """KvGeometry."""

    layers: Positive
    kv_heads: Positive
    head_dim: Positive


class CompatibilityIn(_OfService):
    """Compatibility."""

    fingerprint: Text
    engine: Text
    engine_version: Text
    wire_version: Annotated[int, Field(ge=0, le=255)]
    geometry: GeometryIn
    min_wire_version: Annotated[int, Field(ge=0, le=255)] = 0


class PartialPrefillIn(_OfService):
    """PartialPrefillCost."""

    k_p: Seconds
    b_p: Finite


class ChunkedIn(_OfService):
    """ChunkedCost."""

    k_ctxp: Finite
    k_ctxd: Finite
    b_c: Finite


class HuaweiIn(_OfService):
    """HuaweiCost."""

    p1: Finite
    p2: Finite
    p3: Finite
    p4: Finite
    p5: Finite
    p6: Finite
    p7: Finite
    p8: Finite


class StepFormIn(_OfService):
    """StepForm."""

    fixed_s: Finite
    token_s: Finite = 0.0
    position_s: Finite = 0.0
    sequence_s: Finite = 0.0
    context_s: Finite = 0.0
    error: Seconds = 0.0
    steps: Count = 0


class StepRatesIn(_OfService):
    """StepRates."""

    prefill: StepFormIn
    decode: StepFormIn
    mixed: StepFormIn


Pace = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class LinkRateIn(_OfService):
    """LinkRate."""

    bytes_s: Pace
    latency_s: Seconds = 0.0
    slow: Annotated[dict[Name, Pace], Field(max_length=64)] = {}
    coded: Annotated[dict[Text, Pace], Field(max_length=256)] = {}


class CodecRateIn(_OfService):
    """CodecRate."""

    encode_bytes_s: Pace
    decode_bytes_s: Pace


class RatesIn(_OfService):
    """Rates."""

    prefill: PartialPrefillIn | None = None
    chunked: ChunkedIn | None = None
    batch: HuaweiIn | None = None
    step: StepRatesIn | None = None
    link: LinkRateIn | None = None
    codecs: Annotated[dict[Name, CodecRateIn], Field(max_length=16)] = {}
    price_per_hour: Seconds = 0.0
    weight: Pace = 1.0


class Registration(_OfService):
    """InstanceInfo and the role at the moment."""

    role: RoleName
    instance_id: Name
    generation: Count
    model: Text
    compatibility: CompatibilityIn
    accelerator: Text
    dtype: Text
    tensor_parallel: Positive
    block_size: Positive
    total_blocks: Positive
    max_model_len: Positive
    chunk_size: Positive
    rpc: Tcp
    http: Http
    kv_endpoints: Annotated[list[Kv], Field(max_length=1024)]
    max_seqs: Count = 0
    rates: RatesIn = RatesIn()
    pipeline_parallel: Positive = 1

    def to_info(self) -> InstanceInfo:
        """As the domain has it."""
        return msgspec.convert(self.model_dump(exclude={"role"}), InstanceInfo)


class LeaveIn(_OfService):
    """Body of a leave: which process of the instance stops."""

    generation: Count


class OperationIn(_Edge):
    """Body of any operation. The same `operation_id` again is the same operation. `deadline_s`: unix seconds. `why`:
    the reasons of a program that asks; people need none.
    """

    operation_id: Name | None = None
    deadline_s: Finite | None = None
    why: Annotated[str, Field(max_length=2048)] | None = None

    def to_asked(self, who: str) -> Asked:
        """As the operations have it."""
        asked = Asked(who, deadline_s=self.deadline_s, why=self.why)
        return replace(asked, operation_id=self.operation_id) if self.operation_id else asked


class DrainIn(OperationIn):
    """Body of a drain; without a time the setting holds. `force` allows the last ready instance of a role."""

    force: bool = False
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] | None = None


class FlipIn(OperationIn):
    """Body of a flip. `force` allows the last ready instance of a role. `to_role`: it is refused to one that has it."""

    force: bool = False
    to_role: RoleName | None = None
    drain_timeout_s: Annotated[float, Field(gt=0, le=86_400)] | None = None


class LossIn(_OfService):
    """An instance that a request lost, after so many tokens of its answer."""

    position: Count
    instance_id: Annotated[str, Field(max_length=128)] = ""


class OutcomeIn(_OfService):
    """Ended. `job_id` tells whether it was counted already: deliveries are repeated when their answer is lost."""

    job_id: Annotated[str, Field(max_length=256)] = ""
    slo: Annotated[str, Field(max_length=128)]
    ended_s: Seconds
    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None
    ttft_target_s: Seconds = 0.0
    tpot_target_s: Seconds = 0.0
    itl_target_s: Seconds = 0.0
    longest_gap_s: Seconds | None = None
    gaps: Count = 0
    gaps_over: Count = 0
    phase: HowName = How.COMPLETED
    code: Annotated[str, Field(max_length=128)] = ""
    count: Annotated[int, Field(ge=1, lt=2**31)] = 1
    failed: bool = False
    prompt_tokens: Count = 0
    output_tokens: Count = 0
    predicted: Annotated[str, Field(pattern="^(classifier|observed|none)?$")] = ""
    seconds: Annotated[dict[Name, Seconds], Field(max_length=32)] = {}
    before_first: Annotated[dict[Name, Seconds], Field(max_length=32)] = {}
    whole_s: Seconds = 0.0
    transfers: Count = 0
    transfers_failed: Count = 0
    transfer_bytes: Count = 0
    transfer_faults: Annotated[dict[Name, Count], Field(max_length=32)] = {}
    losses: Annotated[list[LossIn], Field(max_length=32)] = []  # of a request that was refused for them

    def to_ended(self) -> Ended:
        """As the policy has it."""
        how = How.FAILED if self.failed and self.phase is How.COMPLETED else self.phase
        return Ended(**{**self.model_dump(exclude={"job_id", "phase", "failed", "losses"}), "how": how})


class DemandSecondIn(_OfService):
    """DemandSecond."""

    source: Name
    second: Count
    requests: Count
    prompt_tokens: Amount
    fresh_tokens: Amount
    fresh_squares: Amount
    prompt_logs: Amount
    prompt_log_squares: Amount
    output_tokens: Amount
    per_ttft: Amount
    per_tpot: Amount
    split_least: Amount
    split_most: Amount
    ended: Count
    ended_tokens: Amount
    ended_expected: Amount
    ended_logs: Amount
    ended_log_squares: Amount

    def to_second(self) -> DemandSecond:
        """As the domain has it."""
        return DemandSecond(**self.model_dump())


class NewsIn(_OfService):
    """What a scheduler says. revision: of the policies that it goes by; trouble: why not by a newer one that it heard
    of. gateways: for how many seconds each was silent there; left: those that stopped in good order, as the scheduler
    itself does where it is `leaving`.
    """

    revision: Count
    trouble: Annotated[str, Field(max_length=2048)] = ""
    demand: Annotated[list[DemandSecondIn], Field(max_length=1_000)] = []
    outcomes: Annotated[list[OutcomeIn], Field(max_length=10_000)] = []
    gateways: Annotated[dict[Name, Seconds], Field(max_length=1_000)] = {}
    left: Annotated[list[Name], Field(max_length=1_000)] = []
    leaving: bool = False


def _of_plans(kind: EventKind) -> EventKind:
    if not kind.value.startswith("plan_"):
        raise ValueError(f"{kind.value} is nobody's to tell but the monitor's")
    return kind


class HappenedIn(_OfService):
    """An event that another service tells of: what became of a plan. subject: which one it is."""

    event_id: Name
    kind: Annotated[KindName, AfterValidator(_of_plans)]
    text: Annotated[str, Field(min_length=1, max_length=2048)]
    subject: Annotated[str, Field(max_length=128)] = ""
