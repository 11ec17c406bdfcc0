"""Bodies of the monitor's HTTP API, validated once and turned into the structs of the domain."""

from collections.abc import Iterator
from typing import Annotated

from fastapi import Body
from msgspec.structs import astuple
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from services.cluster_monitor.operations import OperationRequest
from services.cluster_monitor.request_stats import Ended, How
from shared.domain.demand import SUMS
from shared.domain.instance import Compatibility, InstanceInfo, Role
from shared.domain.numbers import infinite_in
from shared.domain.rates import Rates
from shared.model.adapters import AdapterName
from shared.runtime.settings import Name
from shared.wire.api import EventKind, OperationKind, Origin, Outcome, SchedulerNews
from shared.wire.bodies import body_of

Text = Annotated[str, Field(min_length=1, max_length=512)]


def _port(address: str) -> str:
    port = int(address.rpartition(":")[2])
    if not 0 < port < 65_536:
        raise ValueError(f"{port} is not a port")
    return address


Tcp = Annotated[str, Field(pattern=r"^tcp://[^\s]{1,255}:\d{1,5}$"), AfterValidator(_port)]
Kv = Annotated[str, Field(pattern=r"^(kv|tcp|nixl)://[^\s]{1,255}:\d{1,5}$"), AfterValidator(_port)]
Http = Annotated[str, Field(pattern=r"^https?://[^\s]{1,255}$")]
Count = Annotated[int, Field(ge=0, lt=2**62)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]
RoleName = Annotated[Role, Field(strict=False)]  # JSON has text


class _Strict(BaseModel):
    """A body from people and their tools: unknown fields are refused."""

    model_config = ConfigDict(allow_inf_nan=False, extra="forbid", frozen=True, strict=True)


class _FromService(_Strict):
    """A body from another service. Its wire version was checked before: unknown fields are optional ones of a later
    release.
    """

    model_config = ConfigDict(extra="ignore")


def _faults_of_compatibility(fits: Compatibility) -> Iterator[str]:
    for name in ("wire_version", "min_wire_version"):
        if not 0 <= (version := getattr(fits, name)) <= 255:
            yield f"{name} must be between 0 and 255, got {version}"
    for name in ("fingerprint", "engine", "engine_version"):
        if not 1 <= len(getattr(fits, name)) <= 512:
            yield f"{name} must have between 1 and 512 characters"
    components = fits.geometry.components
    for name in ("layers", "kv_heads", "head_dim"):
        least = 0 if components and name != "layers" else 1  # vLLM counts no heads where all layers keep a state
        if not least <= (value := getattr(fits.geometry, name)) < 2**31:
            yield f"geometry.{name} must be at least {least} and below 2^31, got {value}"
    if len(components) > 256 or any(not 1 <= len(each.layers) <= 4096 for each in components):
        yield "geometry.components: more than 256, or one without layers or with more than 4096"
    for each in components:
        if min(each.sides, each.heads, each.head_dim) < 1 or min(each.window, *each.layers) < 0:
            yield "geometry.components: sides, heads and head_dim must be at least 1, and window and layers at least 0"
        if max(each.sides, each.heads, each.head_dim, each.window, *each.layers) >= 2**31:
            yield "geometry.components: numbers must be below 2^31"
        if max(len(each.part), len(each.dtype)) > 64:
            yield "geometry.components: part and dtype must have at most 64 characters"


def _faults_of_rates(rates: Rates) -> Iterator[str]:
    forms = () if rates.step is None else (rates.step.prefill, rates.step.decode, rates.step.mixed)
    at_least_0 = [rates.price_per_hour, rates.host_token_s, *(figure for form in forms for figure in astuple(form))]
    positive = [rates.weight] if rates.step is None else [rates.weight, rates.step.gain]
    if rates.link is not None:
        at_least_0.append(rates.link.latency_s)
        positive += [rates.link.bytes_s, *rates.link.slow.values(), *rates.link.coded.values()]
        if len(rates.link.slow) > 64 or len(rates.link.coded) > 256:
            yield "rates of a link: more than 64 instances, or more than 256 codings"
    for codec in rates.codecs.values():
        positive += [codec.encode_bytes_s, codec.decode_bytes_s]
    if len(rates.codecs) > 16:
        yield f"rates of {len(rates.codecs)} codecs; at most 16"
    if min(at_least_0) < 0 or min(positive) <= 0:
        yield "a rate, a price or a weight is negative or 0"


class Registration(_FromService):
    """InstanceInfo, and the role at the moment."""

    role: RoleName
    instance_id: Name
    generation: Count
    model: Text
    compatibility: Annotated[Compatibility, body_of(Compatibility, _faults_of_compatibility)]
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
    rates: Annotated[Rates, body_of(Rates, _faults_of_rates)] = Rates()
    pipeline_parallel: Positive = 1
    kv_dtype: Annotated[str, Field(max_length=64)] = ""
    adapters: Annotated[dict[Text, Text], Field(max_length=4096)] = {}
    precision: Annotated[str, Field(max_length=64, pattern=r"^[\w.-]*$")] = ""
    loads_adapters: bool = False
    media: Annotated[list[Text], Field(max_length=16)] = []
    rank_of: Annotated[str, Field(max_length=512)] = ""

    def to_info(self) -> InstanceInfo:
        fields = {name: getattr(self, name) for name in InstanceInfo.__struct_fields__}
        return InstanceInfo(**{**fields, "kv_endpoints": tuple(self.kv_endpoints), "media": tuple(self.media)})


class LeaveIn(_FromService):
    """Which process of the instance stops."""

    generation: Count


class OperationIn(_Strict):
    """Body of any operation. A repeated `operation_id` means the same operation. `deadline_s`: unix seconds. `why`: the
    reasons of the planner; operators need none. `origin`: by default an operator.
    """

    operation_id: Name | None = None
    deadline_s: Annotated[float, Field(allow_inf_nan=False)] | None = None
    why: Annotated[str, Field(max_length=2048)] | None = None
    origin: Annotated[Origin, Field(strict=False)] | None = None

    def to_request(self, kind: OperationKind, instance_id: str, who: str) -> OperationRequest:
        # Planners of earlier releases state no origin, and they alone give reasons.
        origin = self.origin or (Origin.PLAN if self.why else Origin.OPERATOR)
        fields = self.model_dump(exclude_none=True) | {"origin": origin}
        return OperationRequest(kind, instance_id, who, **fields)


class DrainIn(OperationIn):
    """Body of a drain; without a time the setting holds. `force` allows the last ready instance of a role."""

    force: bool = False
    drain_timeout_s: Annotated[float, Field(gt=0, le=86_400)] | None = Field(None, alias="timeout_s")


class FlipIn(OperationIn):
    """Body of a flip. `force` allows the last ready instance of a role. An instance that has `to_role` is refused."""

    force: bool = False
    to_role: RoleName | None = None
    drain_timeout_s: Annotated[float, Field(gt=0, le=86_400)] | None = None


class MoveIn(_Strict):
    """Body of a move. A repeated `operation_id` means the same operation. `deadline_s`: unix seconds. `to`: an instance
    that is ready to decode; without it, any.
    """

    operation_id: Name | None = None
    deadline_s: Annotated[float, Field(allow_inf_nan=False)] | None = None
    to: Name | None = None

    def to_request(self, job_id: str, who: str) -> OperationRequest:
        fields = self.model_dump(exclude_none=True, exclude={"to"})
        return OperationRequest(OperationKind.MOVE, "", who, job_id=job_id, to_instance=self.to or "", **fields)


class PolicyIn(BaseModel):
    """PolicySpec."""

    model_config = ConfigDict(allow_inf_nan=False, extra="forbid", frozen=True)

    name: str
    parameters: dict[str, object] = {}

    @field_validator("parameters")
    @classmethod
    def _finite(cls, parameters: dict[str, object]) -> dict[str, object]:
        if where := infinite_in(parameters):
            raise ValueError(f"{where} must be a finite number")
        return parameters


class LoadIn(_Strict):
    """LoadRequest, without who requests it."""

    name: AdapterName
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    in_place: bool = False


class UnloadIn(_Strict):
    """UnloadRequest, without who requests it."""

    name: Annotated[str, Field(max_length=512)]


class FollowIn(_FromService):
    """AdaptersRequest."""

    gateway_id: Name
    revision: Count = 0
    in_use: Annotated[list[Text], Field(max_length=4096)] = []
    wait_s: Annotated[float, Field(ge=0, le=60)] = 0.0


def _faults_of_news(news: SchedulerNews) -> Iterator[str]:
    for at, second in enumerate(news.demand):
        if not second.source or min(second.second, *(getattr(second, name) for name in SUMS)) < 0:
            yield f"demand[{at}]: a sum is negative, or the source is empty"


# A scheduler repeats news whose answer was lost: outcomes by job, seconds of demand by scheduler and second.
NewsIn = Annotated[SchedulerNews, Body(), body_of(SchedulerNews, _faults_of_news)]


def ended_of(outcome: Outcome) -> Ended:
    """An outcome as the monitor counts it."""
    fields = {name: getattr(outcome, name) for name in Ended.__struct_fields__ if name != "how"}
    failed = outcome.failed and outcome.phase == "completed"
    return Ended(**fields, how=How.FAILED if failed else How(outcome.phase))


def _of_plans(kind: EventKind) -> EventKind:
    if not kind.value.startswith("plan_"):
        raise ValueError(f"only the monitor itself reports {kind.value}")
    return kind


class EventIn(_FromService):
    """An event that the planner reports: what became of the plan `subject`."""

    event_id: Name
    kind: Annotated[EventKind, Field(strict=False), AfterValidator(_of_plans)]
    text: Annotated[str, Field(min_length=1, max_length=2048)]
    subject: Annotated[str, Field(max_length=128)] = ""
