"""How the cluster does, in words and figures: what is wrong, why, and where requests spend their time."""

from enum import StrEnum

import msgspec

from shared.domain.instance import Role


class Level(StrEnum):
    """From all well to nothing works."""

    GOOD = "good"
    IDLE = "idle"  # nothing is asked for, and nothing is wrong
    DEGRADED = "degraded"
    DOWN = "down"


class Stage(StrEnum):
    """The chain that a request passes; named as its spans are (`shared.timeline.Span`)."""

    QUEUE = "queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE_QUEUE = "decode_queue"
    DECODE = "decode"


class Thresholds(msgspec.Struct, frozen=True):
    """From where on something is called a problem. Shares lie in 0..1."""

    attainment: float = 0.9  # of requests that meet a target
    least_requests: int = 5  # of fewer that ended nothing is said
    errors: float = 0.01  # share of requests that failed
    refusals: float = 0.01  # share of requests that were refused
    kv_used: float = 0.95  # of a role's KV memory, with somebody waiting for it
    queue_share: float = 0.5  # of the TTFT target, as seconds of prompts that wait at an instance of the role
    waiting_share: float = 0.25  # decodes that wait, to those that run
    transfers_failing: float = 0.01  # share of transfers that failed
    transfers_share: float = 0.25  # of the TTFT target, as the median time of a transfer
    fallback_share: float = 0.5  # predictions that are no classifier's
    gone_s: float = 10.0  # silence of a gateway or a scheduler
    missing_s: float = 60.0  # for an instance of the cluster file to come, from the monitor's start
    policies_s: float = 10.0  # for everybody to follow changed policies


class Problem(msgspec.Struct, frozen=True):
    """One thing that is wrong. `what` is a stable code; `text` a phrase such as "TPOT met by 26 % (target 60 ms)".

    cause: a phrase, empty where none is known. instances: whom it concerns. value, limit: what was measured, and the
    threshold or target that it passes.
    """

    what: str
    level: Level
    text: str
    cause: str = ""
    stage: Stage | None = None
    instances: tuple[str, ...] = ()
    value: float | None = None
    limit: float | None = None


class Link(msgspec.Struct, frozen=True):
    """One stage of the chain. requests, p50_s, p99_s, share: of the requests that ended in the window and passed it;
    `share` is its part of all their time. now: jobs that are there at the moment.
    """

    stage: Stage
    requests: int = 0
    p50_s: float | None = None
    p99_s: float | None = None
    share: float | None = None
    now: int = 0
    level: Level = Level.GOOD


class Count(msgspec.Struct, frozen=True):
    """Instances of one role. expected: all that should be there, whatever their state."""

    ready: int = 0
    expected: int = 0
    dead: int = 0
    unresponsive: int = 0
    draining: int = 0
    starting: int = 0
    missing: int = 0  # in the cluster file, and never registered


class Verdict(msgspec.Struct, frozen=True):
    """The whole of it at one moment (unix seconds). Problems are in order of weight; the headline names the first."""

    time_s: float
    level: Level
    headline: str
    problems: tuple[Problem, ...]
    chain: tuple[Link, ...]
    counts: dict[Role, Count]
    window_s: float
    requests: int  # that ended in the window, refused ones included
    thresholds: Thresholds = Thresholds()
