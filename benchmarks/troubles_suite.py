"""Suites, clients and ground truth of `polyphase bench troubles`: clusters with their SLO classes, a load that logs the
outcome of each request, and bounds for every count that a verdict may state.

A count lies between the requests that the monitor must have received and those that it may have received: the end of a
request takes up to 1.1 s to reach the monitor, and refusals are reported every 3 s.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from benchmarks.chaos.clusters import EMULATED_ENGINE, REAL_ENGINE, SPLIT, Testbed
from services.launcher.child_process import Limits
from shared.domain.instance import Role
from shared.domain.job import Slo, itl_met
from shared.domain.verdict import Count, Verdict
from tools.client import COMPLETIONS, Address, Ending, Request, completion_body, send

_MIB = 1 << 20
WINDOW_S = 10.0  # of the verdict, in place of 60 s: it is over sooner after a trouble
BACK_S = 8.0  # a process that was killed stays away for so long: the launcher's first pause, in place of 0.2 s
# What stands still is left so: the launcher would put it down after 6 s, and a gateway is missed after 10 s only.
LIMITS = Limits(hang_s=60.0, backoff_s=BACK_S, backoff_max_s=BACK_S, stable_s=1.0)
JOB_S = 10.0  # what a request may take
QUEUED = 40  # jobs that a gateway takes which do not decode yet
LATE = "decode-late"

CLASSES = {
    one.name: one
    for one in (Slo("default", 1.5, 0.2), Slo("instant", 0.03, 0.2), Slo("swift", 1.5, 0.02), Slo("batch", 600.0, 1.0))
}
_SLO = {name: {"ttft_s": one.ttft_s, "tpot_s": one.tpot_s} for name, one in CLASSES.items() if name != "batch"}
_SMALL_KV = 512 * _MIB  # 4,096 tokens of an emulated Llama-3-8B

EMULATED = Testbed(
    name="emulated",
    title="two gateways, two schedulers, 2 prefill and 3 decode instances; EMULATED engines",
    cluster={
        "monitor": {"slo_windows_s": [WINDOW_S, 60.0]},
        "scheduler": {"count": 2},
        "planner": {"enabled": False},
        "policies": SPLIT,
        "gateway": {"slo": _SLO, "job_timeout_s": JOB_S, "max_queued_jobs": QUEUED, "patience_s": 3.0},
        "instance_defaults": EMULATED_ENGINE,
        "instances": [
            {"id": "prefill", "count": 2, "role": "prefill"},
            {"id": "decode", "count": 3, "role": "decode", "kv_cache_bytes": _SMALL_KV},
            {"id": LATE, "role": "decode", "kv_cache_bytes": _SMALL_KV},
        ],
    },
    prompts=(),
    answer_tokens=24,
    users=0,
    absent=frozenset({LATE}),
    proxied=frozenset({"broadcasts", "heartbeats"}),
)

REAL = Testbed(
    name="real",
    title="one gateway, one scheduler, 1 prefill and 1 decode instance; vLLM on the CPU, KV over TCP",
    cluster={
        "monitor": {"slo_windows_s": [WINDOW_S, 60.0]},
        "gateway": {"dtype": "float32", "slo": _SLO},
        "policies": SPLIT,
        "predictor": {"enabled": False},
        "planner": {"enabled": False},
        "instance_defaults": REAL_ENGINE,
        "instances": [{"id": "prefill", "role": "prefill"}, {"id": "decode", "role": "decode"}],
    },
    prompts=(),
    answer_tokens=24,
    users=0,
    gateways=1,
    proxied=frozenset({"kv"}),
)

# Clients.

_POLITE_S = 0.3  # between an error and the next try
_LOOK_S = 0.01  # between two looks at how late the clients themselves are


@dataclass(frozen=True, slots=True)
class Wish:
    """A request of a client; lengths in tokens. slo: its class, "" for the default."""

    prompt_tokens: int
    output_tokens: int
    slo: str = ""


@dataclass(slots=True)
class Shot:
    """One request as its client saw it. Unix seconds; ended_s: 0 while it is open.

    code: of its error. cut: its connection ended without an error. doubt: its gateway or its scheduler may have stood
    still meanwhile, so that their reports of it may be late or missing.
    """

    slo: str
    began_s: float
    ended_s: float = 0.0
    status: int = 0
    code: str = ""
    cut: bool = False
    doubt: bool = False
    ttft_s: float | None = None
    tpot_s: float | None = None
    gaps_s: tuple[float, ...] = ()  # between two messages with tokens
    late_s: float = 0.0  # by which this process came late to what it had to do meanwhile, at worst

    @property
    def done(self) -> bool:
        return self.ended_s > 0.0 and not self.code and not self.cut

    @property
    def jct_s(self) -> float:
        return self.ended_s - self.began_s


@dataclass(slots=True)
class Clients:
    """All clients of a suite; every request that any of them sent is in `shots`."""

    addresses: Sequence[Address]
    shots: list[Shot] = field(default_factory=list)
    _rng: Random = field(default_factory=lambda: Random(7))
    _late: list[tuple[float, float]] = field(default_factory=list)  # when, and by how much

    async def watch(self) -> None:
        """Note how late this process is, until cancelled: where cores are few, gaps grow by that on their way."""
        while True:
            due_s = time.time() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            if (late_s := time.time() - due_s) > _LOOK_S:
                self._late.append((time.time(), late_s))

    async def one(self, wish: Wish, address: Address | None = None) -> Shot:
        address = address or self.addresses[len(self.shots) % len(self.addresses)]
        shot = Shot(wish.slo or "default", time.time())
        self.shots.append(shot)
        reply = await send(address, self._request(wish))
        times = reply.token_times_s
        shot.status = reply.status
        shot.ttft_s = reply.ttft_s
        if len(reply.tokens) > 1:
            shot.tpot_s = (times[-1] - times[0]) / (len(reply.tokens) - 1)
            shot.gaps_s = tuple(after - before for before, after in pairwise(times) if after > before)
        shot.cut = reply.ending not in (Ending.DONE, Ending.ERROR)
        shot.code = (reply.code or "error") if reply.ending is Ending.ERROR else ""
        shot.ended_s = time.time()
        shot.late_s = max((late_s for when_s, late_s in self._late if when_s >= shot.began_s), default=0.0)
        return shot

    def users(self, number: int, *wishes: Wish) -> "Users":
        """Clients that send the next request as soon as one is answered, with the given requests in turn."""
        return Users(self, number, wishes)

    async def burst(self, number: int, wish: Wish) -> None:
        """So many at once; ends with the last answer."""
        await asyncio.gather(*(self.one(wish) for _ in range(number)))

    def _request(self, wish: Wish) -> Request:
        name = f"trouble-{uuid.uuid4().hex[:12]}"
        prompt = [self._rng.randrange(300, 1200) for _ in range(wish.prompt_tokens)]
        more: dict[str, Any] = {"return_token_ids": True, "request_id": name, "cache_salt": name}
        return Request(COMPLETIONS, completion_body(prompt, wish.output_tokens, **more), wish.slo, key=name)


class Users:
    """An async context manager: they begin, and at its end each is waited for until its last answer is there."""

    def __init__(self, clients: Clients, number: int, wishes: Sequence[Wish]) -> None:
        self._clients = clients
        self._number = number
        self._wishes = wishes
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Users":
        self._tasks = [asyncio.create_task(self._user(number)) for number in range(self._number)]
        self._watch = asyncio.create_task(self._clients.watch())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._watch.cancel()
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=kind is not None)

    async def _user(self, turn: int) -> None:
        while not self._stop.is_set():
            turn += 1
            shot = await self._clients.one(self._wishes[turn % len(self._wishes)])
            if not shot.done:
                await asyncio.sleep(_POLITE_S)


# The truth, and bounds for the figures of a verdict over the same window. The end of a request reaches the monitor
# from the gateway within 0.1 s and from the scheduler within 1 s more; refusals are reported every 3 s. A count
# therefore lies between the requests that the monitor must have received and those that it may have received.

EARLY_S = 0.3  # a client may see the end of its answer so much later than the gateway
LATE_S = 2.5  # by then a end has reached the monitor
STAMP_S = 1.0  # the scheduler's time of an end, later than the client's
REFUSED_LATE_S, REFUSED_STAMP_S = 6.0, 4.5
DOUBT_S = 30.0  # what stands still holds reports back
BLUR_S = 0.08  # TTFT as a client measures it is so much longer than the gateway's, at most
GAP_BLUR_S = (
    0.08  # a gap as a client measures it differs by so much from the gateway's, either way, and by its lateness
)
TPOT_BLUR = 0.1  # tokens that share a message: so much of TPOT, either way

HISTOGRAM = 1.06  # percentiles of the verdict are of buckets within 5 %
OWN_S = 0.05  # beside a client's time
Bounds = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Sample:
    """`GET /metrics` of an instance at a moment."""

    time_s: float
    instance: str
    role: Role
    kv_used: float
    waiting: int
    running: int
    queued_prefill: int


@dataclass(slots=True)
class Known:
    """All that is known at one moment. Unix seconds.

    silent: since when gateways and schedulers stand still. behind: instances without broadcasts. mute_s: since when
    no predictor answers. cut_s: since when KV does not come. slow_s: what each KV transfer takes at least.
    """

    counts: dict[Role, Count]
    shots: list[Shot] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    gateways: int = 1
    schedulers: int = 1
    silent: dict[str, float] = field(default_factory=dict)
    behind: frozenset[str] = frozenset()
    mute_s: float | None = None
    cut_s: float | None = None
    slow_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Window:
    """The window of a verdict, in unix seconds."""

    start_s: float
    end_s: float

    def count(self, shots: Iterable[Shot], surely: Callable[[Shot], bool], maybe: Callable[[Shot], bool]) -> Bounds:
        """How many of those the verdict counts: at least, those for whom `surely`, and at most, for whom `maybe`."""
        least = most = 0
        for shot in shots:
            refused = is_refused(shot)
            late_s, stamp_s = (REFUSED_LATE_S, REFUSED_STAMP_S) if refused else (LATE_S, STAMP_S)
            if not shot.ended_s:
                continue
            if shot.doubt:
                most += shot.began_s <= self.end_s and self.start_s <= shot.ended_s + DOUBT_S
                continue
            inside = self.start_s <= shot.ended_s - EARLY_S and shot.ended_s + late_s <= self.end_s
            near = self.start_s <= shot.ended_s + stamp_s and shot.ended_s - EARLY_S <= self.end_s
            least += inside and not shot.cut and surely(shot)
            most += near and (shot.cut or maybe(shot))
        return least, most

    def of(self, shots: Iterable[Shot], which: Callable[[Shot], bool]) -> Bounds:
        """Bounds for a property that is certain for each request."""
        return self.count(shots, which, which)


def is_refused(shot: Shot) -> bool:
    return shot.status == 429 or shot.code in ("busy", "overloaded", "delayed")


def is_failed(shot: Shot) -> bool:
    return bool(shot.code) and not is_refused(shot)


def share(part: Bounds, rest: Bounds) -> Bounds:
    """What share the part may be of both together; 0..1 where there may be none of either."""
    least = part[0] / (part[0] + rest[1]) if part[0] + rest[1] else 0.0
    most = part[1] / (part[1] + rest[0]) if part[1] + rest[0] else 1.0
    return least, most


def ttft_met(window: Window, shots: Iterable[Shot]) -> Bounds:
    """The share of completed requests whose TTFT was within its class's target."""

    def late(shot: Shot) -> float:
        return (shot.ttft_s if shot.ttft_s is not None else float("inf")) - CLASSES[shot.slo].ttft_s

    return _met(
        window, shots, lambda shot: shot.done and late(shot) <= 0.0, lambda shot: shot.done and late(shot) <= BLUR_S
    )


def tpot_met(window: Window, shots: Iterable[Shot]) -> Bounds:
    """The share of completed requests whose TPOT was within its class's target."""

    def ratio(shot: Shot) -> float:
        return (shot.tpot_s or 0.0) / CLASSES[shot.slo].tpot_s

    return _met(
        window,
        shots,
        lambda shot: shot.done and ratio(shot) <= 1.0 - TPOT_BLUR,
        lambda shot: shot.done and ratio(shot) <= 1.0 + TPOT_BLUR,
    )


def gaps_met(window: Window, shots: Iterable[Shot]) -> Bounds:
    """The share of completed requests whose gaps between tokens were within their class's target."""

    def within(shot: Shot, way: int) -> bool:
        limit_s = CLASSES[shot.slo].itl_s + way * (GAP_BLUR_S + shot.late_s)
        return shot.done and itl_met(len(shot.gaps_s), sum(gap_s > limit_s for gap_s in shot.gaps_s))

    return _met(window, shots, lambda shot: within(shot, -1), lambda shot: within(shot, 1))


def _met(
    window: Window, shots: Iterable[Shot], surely: Callable[[Shot], bool], maybe: Callable[[Shot], bool]
) -> Bounds:
    judged = [shot for shot in shots if shot.done or shot.cut]
    return share(
        window.count(judged, surely, maybe),
        window.count(judged, lambda shot: not maybe(shot), lambda shot: not surely(shot)),
    )


def about_median(values: Iterable[float]) -> float:
    """A bound for the median of a part of them, of those whose ends lie about the window's edges the one or the other.

    The 60th percentile, by nearest rank; infinite without any.
    """
    some = sorted(values)
    return some[min(len(some) - 1, int(0.6 * len(some)))] if some else float("inf")


@dataclass(frozen=True, slots=True)
class Figure:
    """A number or a name of a verdict, and its true value."""

    name: str
    reported: str
    want: str
    ok: bool


def within(name: str, reported: float, bounds: Bounds, slack: float = 0.0) -> Figure:
    least, most = bounds
    want = f"{least:.4g}" if least == most else f"{least:.4g}..{most:.4g}"
    return Figure(name, f"{reported:.4g}", want, least - slack <= reported <= most + slack)


def same(name: str, reported: object, want: object) -> Figure:
    return Figure(name, str(reported), str(want), reported == want)


def window_of(verdict: Verdict) -> Window:
    return Window(verdict.time_s - verdict.window_s, verdict.time_s)
