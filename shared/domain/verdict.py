"""The verdict on the cluster, in words and figures: its problems, their causes, and where requests spend their time.

`Situation` is the input: the cluster at one moment, and the requests that ended in the window before it. `Verdict` is
the result of `services.cluster_monitor.verdict.judge`. `duration`, `count` and `size` format figures for people.
"""

from enum import StrEnum

import msgspec

from shared.domain.instance import InstanceState, Role


class Level(StrEnum):
    """The state of the cluster, from good to down."""

    GOOD = "good"
    IDLE = "idle"  # no requests, and no problems
    DEGRADED = "degraded"
    DOWN = "down"


class Stage(StrEnum):
    """The stages that a request passes, named as its spans (`shared.timeline.Span`)."""

    QUEUE = "queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE_QUEUE = "decode_queue"
    DECODE = "decode"


class Thresholds(msgspec.Struct, frozen=True):
    """The limits from which on a figure is a problem. Shares are between 0 and 1."""

    attainment: float = 0.9  # of requests that meet a target
    least_requests: int = 5  # that ended; fewer are not judged
    errors: float = 0.01  # share of requests that failed
    refusals: float = 0.01  # share of requests that were refused
    kv_used: float = 0.95  # share of an instance's KV memory in use, with requests waiting
    queue_share: float = 0.5  # seconds of queued prompts at a prefill instance, over the TTFT target
    waiting_share: float = 0.25  # waiting decodes over running ones
    transfers_failing: float = 0.01  # share of transfers that failed
    transfers_share: float = 0.25  # median time of a transfer, over the TTFT target
    fallback_share: float = 0.5  # predictions without the classifier
    gone_s: float = 10.0  # silence of a gateway or a scheduler
    missing_s: float = 60.0  # from the monitor's start until an instance of the cluster file must have registered
    policies_s: float = 10.0  # until all processes must follow changed policies


class Problem(msgspec.Struct, frozen=True):
    """A problem. `what` is a stable code, `text` a phrase such as "TPOT met by 26 % (target 60 ms)".

    cause: a phrase; empty where none is known. instances: the affected ones. value, limit: the measured value, and the
    threshold or target that it exceeds.
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
    """A stage of the chain. requests, p50_s, p99_s, share: of the requests that ended in the window and passed the
    stage; `share` is the stage's part of their total time. now: jobs that are in the stage now.
    """

    stage: Stage
    requests: int = 0
    p50_s: float | None = None
    p99_s: float | None = None
    share: float | None = None
    now: int = 0
    level: Level = Level.GOOD


class Count(msgspec.Struct, frozen=True):
    """Instances of one role by state. expected: all that should exist."""

    ready: int = 0
    expected: int = 0
    dead: int = 0
    unresponsive: int = 0
    draining: int = 0
    starting: int = 0
    missing: int = 0  # in the cluster file, and never registered


class Verdict(msgspec.Struct, frozen=True):
    """The verdict at one moment (unix seconds). Problems are in order of severity; the headline names the first."""

    time_s: float
    level: Level
    headline: str
    problems: tuple[Problem, ...]
    chain: tuple[Link, ...]
    counts: dict[Role, Count]
    window_s: float
    requests: int  # that ended in the window, refused ones included
    thresholds: Thresholds = Thresholds()


class Standing(msgspec.Struct, frozen=True):
    """An instance as the monitor knows it. kv_used: share of its KV blocks in use, None while not known; queue_s:
    seconds until its queued prompts are computed.
    """

    instance_id: str
    role: Role
    state: InstanceState
    kv_used: float | None = None
    running: int = 0
    waiting: int = 0  # requests in the engine's queue, including those whose KV is on its way
    importing: int = 0  # of these, requests whose KV is on its way
    queued_prefill: int = 0
    queue_s: float = 0.0
    inflight: int = 0
    trouble: str = ""  # why it does not follow the policies in force
    behind_s: float = 0.0  # since policies are in force that it does not follow


class StageSeen(msgspec.Struct, frozen=True):
    """The time that requests which ended in the window spent in one stage."""

    requests: int = 0
    total_s: float = 0.0
    p50_s: float | None = None
    p99_s: float | None = None


class ClassSeen(msgspec.Struct, frozen=True):
    """Requests of one SLO class that completed in the window; shares in 0..1, None without requests; targets in
    seconds.

    before_first: seconds before their first tokens, by kind of span (`shared.timeline.Span`); empty: not known.
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
    """A gateway or a scheduler. silent_s: since its last report. trouble: why it does not follow the policies."""

    name: str
    silent_s: float
    trouble: str = ""
    behind_s: float = 0.0  # since policies are in force that it does not follow


class Situation(msgspec.Struct, frozen=True):
    """The input of a verdict. Requests that ended are those of the last `window_s`.

    failed, refused: by error code. spent_s: total time of the requests that ended. placed: requests that were placed
    for the first time in the window. predictions: by their source, "classifier", "observed" or "none".
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


def duration(seconds: float) -> str:
    """A duration with two or three digits in a suitable unit: `60 ms`, `0.48 s`, `1.24 s`, `12 min`."""
    if seconds < 0.1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 1.0:
        return f"{seconds:.2g} s"
    return f"{seconds:.3g} s" if seconds < 600.0 else f"{seconds / 60:.0f} min"


def count(number: float, what: str) -> str:
    """`1 token`, `512 tokens`, `1,024 tokens`."""
    return f"{number:,.0f} {what}{'' if round(number) == 1 else 's'}"


def size(size_bytes: float) -> str:
    """Bytes with a decimal prefix: `8.4 MB`."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= limit:
            return f"{size_bytes / limit:.3g} {unit}"
    return f"{size_bytes:.0f} B"
