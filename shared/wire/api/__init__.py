"""The services' HTTP APIs as structs that the services, their clients, the CLI and the dashboard share.

This module has what several services write or read: operations, events, demand and outcomes. The answers of each
service are in a module of its name. Services encode these structs; clients decode them, strict on types, and ignore
fields that they do not know, so that releases can mix.
"""

from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.domain.demand import Demand, DemandSecond, Shift
from shared.domain.instance import Role

Count = Annotated[int, Meta(ge=0, lt=2**62)]
Seconds = Annotated[float, Meta(ge=0.0)]
Code = Annotated[str, Meta(max_length=128)]
Ending = Literal["completed", "failed", "cancelled", "refused"]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:@-]{1,128}$")]  # as `shared.runtime.settings.Name`


class OperationKind(StrEnum):
    """What can be done to an instance, or to a request on one."""

    FLIP = "flip"
    DRAIN = "drain"
    RESUME = "resume"
    MOVE = "move"


class Origin(StrEnum):
    """What decided that an operation is carried out."""

    OPERATOR = "operator"  # a person, or a program that acts for one
    POLICY = "policy"  # the policy `role_flip` in force
    PLAN = "plan"  # an accepted proposal of the planner


class OperationResult(StrEnum):
    """How an operation stands."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    REFUSED = "refused"  # the state of the instance did not allow it; nothing was done
    EXPIRED = "expired"  # it arrived after its deadline; nothing was done
    UNKNOWN = "unknown"  # the monitor, or its leadership, ended meanwhile


class Operation(Struct):
    """A flip, drain, resume or move: the monitor's `GET /flips` and `GET /operations/{id}`, and a row of the table
    `flips`.

    Durations are seconds, None for a step that was not reached; `started_s` is unix time. flip_s: from the end of the
    drain until the instance serves in its new role; None if it does not. why: the reasons of a policy
    or of the planner; None for an operator. code: of the error. job_id, to_instance: the request of a move, and where
    it is to go, empty for any instance; `instance_id` is then where it decoded, empty if that was not found.
    """

    operation_id: str
    kind: OperationKind
    instance_id: str
    generation: int
    from_role: Role
    to_role: Role
    who: str
    started_s: float
    why: str | None = None
    drain_s: float | None = None
    flip_s: float | None = None
    total_s: float | None = None
    result: OperationResult = OperationResult.RUNNING
    error: str = ""
    code: str | None = None
    origin: Origin = Origin.OPERATOR
    job_id: str = ""
    to_instance: str = ""

    @property
    def subject(self) -> str:
        """What is operated: a request or an instance."""
        return self.job_id or self.instance_id


class EventKind(StrEnum):
    """Kinds of entries in the cluster's log."""

    REGISTERED = "registered"
    RESTARTED = "restarted"  # a new process of a known instance
    RETURNED = "returned"  # the same process, after a broken connection or a restart of the monitor
    UNRESPONSIVE = "unresponsive"
    RECOVERED = "recovered"
    DEATH = "death"
    LEFT = "left"  # it stopped in good order
    FORGOTTEN = "forgotten"
    REGISTRATION_REFUSED = "registration_refused"
    OPERATION_REFUSED = "operation_refused"  # or it arrived after its deadline
    OPERATION_FAILED = "operation_failed"
    POLICY_FLIP = "policy_flip"
    POLICIES_CHANGED = "policies_changed"
    ADAPTERS_CHANGED = "adapters_changed"  # one was loaded or unloaded, or an instance could not load one
    DEMAND_SHIFT = "demand_shift"
    VERDICT = "verdict"  # its level has changed
    PREDICTOR_FALLBACK = "predictor_fallback"  # output lengths no longer come from the classifier
    PREDICTOR_RECOVERED = "predictor_recovered"
    GATEWAY_GONE = "gateway_gone"
    GATEWAY_RETURNED = "gateway_returned"
    SCHEDULER_GONE = "scheduler_gone"
    SCHEDULER_RETURNED = "scheduler_returned"
    REQUEST_REFUSED = "request_refused"  # it lost one instance after the other
    PLAN_PROPOSED = "plan_proposed"  # the planner reports these six
    PLAN_ACCEPTED = "plan_accepted"
    PLAN_REFUSED = "plan_refused"
    PLAN_WITHDRAWN = "plan_withdrawn"  # the situation changed before anybody decided
    PLAN_APPLIED = "plan_applied"
    PLAN_FAILED = "plan_failed"


class Event(Struct, frozen=True):
    """An entry of the cluster's log: the monitor's `GET /events`, and a row of the table `events`.

    The ids and `subject` (a plan, a gateway) name what the event concerns; empty where it concerns no such thing.
    origin: an `Origin`, of the operation that the event concerns.
    """

    event_id: str
    time_s: float
    kind: EventKind
    text: str
    instance_id: str = ""
    role: str = ""
    operation_id: str = ""
    job_id: str = ""
    subject: str = ""
    origin: str = ""


class NoticedShift(Shift, frozen=True, kw_only=True):
    """A shift of demand, and when the monitor noticed it (unix seconds)."""

    at_s: float


class DemandProfile(Struct, frozen=True):
    """The monitor's `GET /demand/profile`: demand, and what operators' flips forbid for a while.

    kept: instances that keep their roles. barred: roles that no instance may be given.
    """

    demand: Demand | None
    shift: NoticedShift | None
    kept: frozenset[str]
    barred: frozenset[Role]


class LostInstance(Struct, frozen=True):
    """An instance that a request lost, after `position` tokens of its answer."""

    position: Count
    instance_id: Code = ""


class Outcome(Struct, frozen=True, kw_only=True):
    """How a request ended, or `count` that were refused alike: see `services.cluster_monitor.request_stats.Ended`.

    job_id: the monitor counts each job once, however often its outcome is delivered. losses: of a request that was
    refused for them.
    """

    job_id: Annotated[str, Meta(max_length=256)] = ""
    slo: Code
    ended_s: Seconds
    phase: Ending = "completed"
    code: Code = ""
    count: Annotated[int, Meta(ge=1, lt=2**31)] = 1
    failed: bool = False
    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None
    ttft_target_s: Seconds = 0.0
    tpot_target_s: Seconds = 0.0
    itl_target_s: Seconds = 0.0
    longest_gap_s: Seconds | None = None
    gaps: Count = 0
    gaps_over: Count = 0
    prompt_tokens: Count = 0
    output_tokens: Count = 0
    predicted: Annotated[str, Meta(pattern="^(classifier|observed|none)?$")] = ""
    seconds: Annotated[dict[Name, Seconds], Meta(max_length=32)] = {}
    before_first: Annotated[dict[Name, Seconds], Meta(max_length=32)] = {}
    whole_s: Seconds = 0.0
    transfers: Count = 0
    transfers_failed: Count = 0
    transfer_bytes: Count = 0
    transfer_faults: Annotated[dict[Name, Count], Meta(max_length=32)] = {}
    losses: Annotated[list[LostInstance], Meta(max_length=32)] = []


class SchedulerNews(Struct, frozen=True):
    """The body of the monitor's `POST /schedulers/{id}/news`.

    revision: of the policies that the scheduler follows. trouble: why it does not follow newer ones. gateways: for how
    many seconds the scheduler has heard nothing of each. left: gateways that stopped in good order; leaving: the
    scheduler itself stops.
    """

    revision: Count
    trouble: Annotated[str, Meta(max_length=2048)] = ""
    demand: Annotated[list[DemandSecond], Meta(max_length=1_000)] = []
    outcomes: Annotated[list[Outcome], Meta(max_length=10_000)] = []
    gateways: Annotated[dict[Name, Seconds], Meta(max_length=1_000)] = {}
    left: Annotated[list[Name], Meta(max_length=1_000)] = []
    leaving: bool = False
