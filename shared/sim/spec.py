"""What is simulated: instances, how they are run, under which policies, and what happens to them on the way."""

from dataclasses import dataclass, field, replace
from enum import StrEnum

import msgspec

from shared.cost.kinds import EngineKind, EngineModels
from shared.cost.network import Link, Network
from shared.cost.step import StepTimes
from shared.domain.instance import Role
from shared.domain.job import Slo
from shared.domain.kv import Codec
from shared.domain.policies import KINDS, ROUTING, PolicySet
from shared.domain.rates import Rates
from shared.domain.route import PolicySpec
from shared.errors import InvalidRequest
from shared.policy import registry
from shared.policy.decode_admission import DecodeAdmission, Greedy
from shared.policy.dispatch import PowerOfTwo
from shared.policy.placement import LeastLoad, Policies
from shared.policy.prefill_order import Fcfs, PrefillOrder
from shared.policy.registry import from_words, known
from shared.policy.role_flip import NoFlip, RoleFlip
from shared.policy.split import FullSplit
from shared.sim.prediction import Prediction


@dataclass(frozen=True, slots=True)
class HostTier:
    """Host memory of an engine for KV of so many tokens that left its cache. Each token that is copied there, or back,
    makes a step longer by `token_s`. double_tokens: of its `SlotIndex`.
    """

    tokens: int
    token_s: float
    double_tokens: int

    @classmethod
    def of_kind(cls, models: EngineModels, kind: EngineKind, tokens: int, slowdown: float = 1.0) -> "HostTier":
        """As live engines of that kind have it, with the catalogue's rate of the link to host memory."""
        # A token's attention, of 2 FLOPs for each layer, channel, position, and of K and V, costs as much as the rest
        # of its forward pass, of some 24 for each layer and pair of channels, where as many positions are before it.
        return cls(tokens, slowdown * models.host_token_s(kind), 6 * models.geometry.hidden)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """An engine's limits and its order of work.

    batched_tokens: tokens of a step, prefill and decode together (chunk size). sequences: requests that run at once.
    prefill_first: prefill in steps of its own, before any decode (vLLM before chunked prefill). reserves_output: a
    request starts only when its whole output has room, so that none is preempted. prefix_cache: blocks of finished
    prompts are kept while there is room, for workloads that name their prefixes. step_budget: prompts are limited for
    the gap targets of requests that decode in the same steps (`shared.policy.step_budget`). host: of each batch in
    flight; None: none. session_keep_s, session_share: for so long, and in at most that share of its blocks, the prefix
    cache keeps KV of a session after a request.
    """

    batched_tokens: int = 2048
    sequences: int = 256
    block_tokens: int = 16
    max_model_len: int = 1 << 20
    prefill_first: bool = False
    reserves_output: bool = False
    prefix_cache: bool = False
    step_budget: bool = False
    host: HostTier | None = None
    session_keep_s: float = 0.0
    session_share: float = 0.0

    def __post_init__(self) -> None:
        if self.sequences < 1 or self.block_tokens < 1 or self.batched_tokens < 1:
            raise InvalidRequest(f"engine limits must be at least 1: {self}")
        if self.sequences > self.batched_tokens:
            raise InvalidRequest(
                f"batched_tokens {self.batched_tokens} must be at least sequences {self.sequences}: each running "
                "request needs a token of every step"
            )


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One instance. Equal instances should share one `model`, which caches what it has computed.

    kv_tokens: KV capacity. kv_bytes_per_token: of its KV, as stored. link: its network port for KV, unless it stands on
    a `node` of the run's network, whose paths then count. lanes: batches in flight at once, each with its share of
    requests and memory (pipeline stages). staging_tokens: the most tokens of prompts that are being computed for other
    instances or whose KV is not sent yet. max_prefills: prompts that it accepts before it has computed them (Cronus:
    two in the low-end instance); further prompts wait at the gateway. price_per_hour: USD for the whole instance.
    rates: what policies know about its speed. precision: of its weights, where that is not the model's.
    """

    instance_id: str
    model: StepTimes
    role: Role
    kv_tokens: int
    kv_bytes_per_token: float
    limits: EngineLimits = field(default_factory=EngineLimits)
    link: Link = field(default_factory=lambda: Link(12.5e9))
    node: str = ""
    accelerator: str = ""
    accelerators: int = 1
    price_per_hour: float = 0.0
    lanes: int = 1
    staging_tokens: int | None = None
    max_prefills: int | None = None
    rates: Rates = field(default_factory=Rates)
    precision: str = ""

    def __post_init__(self) -> None:
        if self.kv_tokens < self.limits.block_tokens * self.lanes:
            raise InvalidRequest(f"{self.instance_id}: KV for {self.kv_tokens} tokens is less than one block")

    def renamed(self, instance_id: str, role: Role | None = None) -> "InstanceSpec":
        return replace(self, instance_id=instance_id, role=role or self.role)


class FirstToken(StrEnum):
    PREFILL = "prefill"  # the prefill instance, before the KV transfer
    DECODE = "decode"  # the decode instance, after it (the papers' baselines count the transfer into TTFT)


@dataclass(frozen=True, slots=True)
class Loss:
    """An instance dies at `at_s` and comes back, empty, at `back_s` (never, if None)."""

    instance_id: str
    at_s: float
    back_s: float | None = None


@dataclass(frozen=True, slots=True)
class Flip:
    """An order to drain an instance and change its role, at `at_s`."""

    instance_id: str
    at_s: float


def plain_policies() -> Policies:
    """Plain disaggregation: the least loaded prefill instance, all of the prompt, TetriInfer's dispatch."""
    return Policies(placement=LeastLoad(), split=FullSplit(), dispatch=PowerOfTwo())


@dataclass(frozen=True, slots=True)
class RunSpec:
    """How a cluster is run. Repeatable: the same spec and workload give the same result.

    step_budget: each engine has one, whatever its limits say. role_flip: the policy decides every `role_flip_every_s`,
    and does not undo what `flips` orders for `role_flip_respects_s`. streaming: KV leaves chunk by chunk while the
    prompt is still being computed. network: between instances that stand on nodes. broadcast_s: policies decide on a
    copy of the instances' loads; a decision that finds the copy this old or older copies the loads anew.
    sessions: those of requests have an effect.
    fresh_prefixes: placements see prefix caches as they are, not as old as the loads, to show what perfect knowledge
    would bring. gateway_s: from arrival to placement; hop_s: from a decision to the instance; token_s: from an engine's
    token to the client. flip_s: a role flip, without its drain (TetriInfer: 5–7 ms). patience_s: how long a request
    waits in all, since its last token, for an instance that can take it, before it is refused. job_timeout_s: from
    arrival to the last token; requests that take longer are stopped. max_queued_jobs, max_queued_tokens: requests that
    do not decode yet, and their prompt tokens, beyond which new requests are refused at once; requests of classes that
    are delayed do not count, and wait for at most `delay_s`. returns: how often a client sends a refused request again,
    at the time that it was given. moves: how often at most a stream goes on elsewhere when its KV blocks were taken
    back. migration: decodes go on elsewhere with their KV where their instance wants that. drain_timeout_s: a flip
    whose drain takes longer is given up, and the instance keeps its role. max_tokens: the output limit that clients set
    at least, which is all that policies know of a length without a prediction; None: the true length. concurrency: a
    closed loop of so many clients, which ignores the workload's arrivals and sends a request when one has ended.
    sample_s: spacing of the load timeline, 0 for none. stepwise: one event for each engine step, to check macro-steps.
    """

    label: str = "default"
    policies: Policies = field(default_factory=plain_policies)
    prefill_order: PrefillOrder = field(default_factory=Fcfs)
    decode_admission: DecodeAdmission = field(default_factory=Greedy)
    step_budget: bool = False
    role_flip: RoleFlip | None = None
    role_flip_every_s: float = 1.0
    role_flip_respects_s: float = 600.0
    prediction: Prediction | None = None
    codec: Codec = Codec.RAW
    first_token: FirstToken = FirstToken.PREFILL
    streaming: bool = True
    slo: Slo = field(default_factory=Slo)
    losses: tuple[Loss, ...] = ()
    flips: tuple[Flip, ...] = ()
    network: Network = field(default_factory=Network)
    sessions: bool = True
    broadcast_s: float = 0.1
    fresh_prefixes: bool = False
    gateway_s: float = 0.0
    hop_s: float = 0.0
    token_s: float = 0.0
    flip_s: float = 0.006
    patience_s: float = float("inf")
    job_timeout_s: float = float("inf")
    max_queued_jobs: int | None = None
    max_queued_tokens: int | None = None
    delay_s: float = float("inf")
    returns: int = 0
    moves: int = 2
    migration: bool = True
    drain_timeout_s: float = float("inf")
    max_tokens: int | None = None
    concurrency: int = 0
    sample_s: float = 0.0
    seed: int = 0
    stepwise: bool = False


class _Switch(StrEnum):
    ON = "on"
    OFF = "off"


_SETTINGS: dict[str, type[StrEnum]] = {"codec": Codec, "first_token": FirstToken, "migration": _Switch}


def with_policies(run: RunSpec, policies: PolicySet) -> RunSpec:
    """`run` under these policies. Raises InvalidRequest."""
    for kind in KINDS:
        run = _under(run, kind, policies.spec(kind))
    return run


def with_words(run: RunSpec, words: str) -> RunSpec:
    """`run` with the policies that `words` name, and the words as its label.

    words: parts joined by `+`, in any order, such as `least_load+cronus+power_of_two`; what they leave out stays as it
    is in `run`. A part is a policy as `shared.policy.registry.from_words` reads it; `codec=int8`,
    `first_token=decode` and `migration=off` are parts, too. Raises InvalidRequest that names the part and the choices.
    """
    given: set[str] = set()
    for part in map(str.strip, words.split("+")):
        if not part:
            raise InvalidRequest(f"policy: an empty part; known: {known()}")
        kind, _, value = (piece.strip() for piece in part.partition("="))
        found = {kind: _setting(kind, value)} if kind in _SETTINGS else from_words(part)
        for kind, chosen in found.items():
            if kind in given:
                raise InvalidRequest(f"policy {words!r}: two parts are of kind {kind}")
            given.add(kind)
            if isinstance(chosen, _Switch):
                run = replace(run, **{kind: chosen is _Switch.ON})  # type: ignore[arg-type]
            elif isinstance(chosen, StrEnum):
                run = replace(run, **{kind: chosen})  # type: ignore[arg-type]
            else:
                run = _under(run, kind, chosen)
    return replace(run, label=words)


def _under(run: RunSpec, kind: str, spec: PolicySpec) -> RunSpec:
    made = registry.make(kind, spec)
    if kind in ROUTING:
        return replace(run, policies=msgspec.structs.replace(run.policies, **{kind: made}))
    if kind == "step_budget":
        return replace(run, step_budget=made.limits)
    if isinstance(made, NoFlip):
        return replace(run, role_flip=None)
    return replace(run, **{kind: made})


def _setting(kind: str, name: str) -> StrEnum:
    if ":" in name:
        raise InvalidRequest(f"{kind} takes no parameters, not {name!r}")
    try:
        return _SETTINGS[kind](name)
    except ValueError as error:
        raise InvalidRequest(f"{kind} must be one of {', '.join(_SETTINGS[kind])}, not {name!r}") from error
