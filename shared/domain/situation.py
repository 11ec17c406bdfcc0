"""All that a verdict rests on: the cluster at one moment, and what ended in the window before it."""

import msgspec

from shared.domain.instance import InstanceState, Role
from shared.domain.verdict import Stage


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
