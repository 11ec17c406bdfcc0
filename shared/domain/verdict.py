"""How the cluster does, in words and figures: what is wrong, why, and where requests spend their time."""

from enum import StrEnum

import msgspec

from shared.domain.instance import InstanceState, Role


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


# MERGED situation.py
# All that a verdict rests on: the cluster at one moment, and what ended in the window before it.


class Standing(msgspec.Struct, frozen=True):
    """An instance as its monitor knows it. kv_used: share of its KV blocks in use, None while not known; queue_s:
    seconds until the prompts that wait there are computed.
    """

    instance_id: str
    role: Role
    state: InstanceState
    kv_used: float | None = None
    running: int = 0
    waiting: int = 0  # in the engine's queue, those whose KV is on its way included
    importing: int = 0  # of these, those whose KV is on its way
    queued_prefill: int = 0
    queue_s: float = 0.0
    inflight: int = 0
    trouble: str = ""  # why it does not follow the policies in force
    behind_s: float = 0.0  # for so long newer policies than those it follows are in force


class StageSeen(msgspec.Struct, frozen=True):
    """What requests that ended in the window spent in one stage."""

    requests: int = 0
    total_s: float = 0.0
    p50_s: float | None = None
    p99_s: float | None = None


class ClassSeen(msgspec.Struct, frozen=True):
    """Requests of one SLO class that completed in the window; shares in 0..1, None without any; targets in seconds.

    before_first: seconds before their first tokens, by kind of stretch (`shared.timeline.Span`); empty: not known.
    """

    slo: str
    requests: int = 0
    ttft_met: float | None = None
    tpot_met: float | None = None
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    stages: dict[Stage, StageSeen] = {}
    before_first: dict[str, float] = {}
    itl_met: float | None = None
    itl_target_s: float | None = None


class Peer(msgspec.Struct, frozen=True):
    """A gateway or a scheduler. silent_s: since it was heard of. trouble: why it does not follow the policies."""

    name: str
    silent_s: float
    trouble: str = ""
    behind_s: float = 0.0  # for so long newer policies than those it follows are in force


class Situation(msgspec.Struct, frozen=True):
    """Counts of what ended lie in the last `window_s`.

    failed, refused: by error code. spent_s: all the time of the requests that ended. placed: requests that got their
    first place in the window. predictions: by who made them, "classifier", "observed" or "none".
    """

    time_s: float
    window_s: float
    up_s: float  # since the monitor started
    instances: tuple[Standing, ...] = ()
    expected: dict[str, Role] = {}
    classes: tuple[ClassSeen, ...] = ()
    completed: int = 0
    cancelled: int = 0
    failed: dict[str, int] = {}
    refused: dict[str, int] = {}
    placed: int = 0
    stages: dict[Stage, StageSeen] = {}
    spent_s: float = 0.0
    transfers: int = 0
    transfers_failed: int = 0
    transfer_bytes: int = 0
    transfer_faults: dict[str, int] = {}  # those, by the code of their fault
    gateways: tuple[Peer, ...] = ()
    schedulers: tuple[Peer, ...] = ()
    predictions: dict[str, int] = {}


# MERGED words.py
# Figures as people say them.


def duration(seconds: float) -> str:
    """Two or three digits, in the unit that fits: `60 ms`, `0.48 s`, `1.24 s`, `12 min`."""
    if seconds < 0.1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 1.0:
        return f"{seconds:.2g} s"
    return f"{seconds:.3g} s" if seconds < 600.0 else f"{seconds / 60:.0f} min"


def count(number: float, what: str) -> str:
    """`1 token`, `512 tokens`, `1,024 tokens`."""
    return f"{number:,.0f} {what}{'' if round(number) == 1 else 's'}"


def size(size_bytes: float) -> str:
    """With a decimal prefix: `8.4 MB`."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= limit:
            return f"{size_bytes / limit:.3g} {unit}"
    return f"{size_bytes:.0f} B"
