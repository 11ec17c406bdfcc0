"""`polyphase bench troubles`: injected faults, and the verdict that the cluster monitor gives for each.

A trouble is a fault and the problem that the verdict must name. Each is held on a running suite under a steady load
until three verdicts with the problem have been read, and until the suite is well again. The bench fails if a verdict
names the wrong cause or states a wrong figure (`troubles_verdict`).
"""

import asyncio
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random

import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.chaos.faults import disturbed, frozen, kept_dead
from benchmarks.chaos.proxy import Proxy
from benchmarks.chaos.testbeds import ALONE, EMULATED_ENGINE, REAL_ENGINE, SPLIT, Testbed
from benchmarks.chaos.under_test import SuiteUnderTest, started_suite_under_test
from benchmarks.results import Result
from benchmarks.suite import metric
from benchmarks.troubles_verdict import CLASSES, ClientRequest, Figure, GroundTruth, Sample, figures
from services.launcher.child_process import Child, Limits
from services.launcher.up import until_stopped
from shared.domain.instance import Role
from shared.domain.route import PolicySpec
from shared.domain.verdict import Count, Level, Problem, Stage, Verdict
from shared.errors import InvalidRequest, PolyphaseError, Unavailable
from shared.wire.clients.monitor import MonitorClient
from tools.client import COMPLETIONS, Ending, Json, Request, completion_body, send, users

_MIB = 1 << 20
WINDOW_S = 10.0  # of the verdict, in place of 60 s: it is over sooner after a trouble
BACK_S = 8.0  # a process that was killed stays away for so long: the launcher's first pause, in place of 0.2 s
# A process that stands still is left so: the launcher would kill it after 6 s, and a gateway is missed after 10 s only.
LIMITS = Limits(hang_s=60.0, backoff_s=BACK_S, backoff_max_s=BACK_S, stable_s=1.0)
JOB_S = 10.0  # the longest time of a request
QUEUED = 40  # jobs that do not decode yet, and that a gateway accepts
SLOW_S = 0.8  # of each KV transfer
LATE = "decode-late"
POLL_S, SAMPLE_S = 0.2, 0.25
LOOKS, BETWEEN_S = 3, 1.0  # verdicts that are judged, the first that names the problem among them
ALARM_S, CLEAR_S = 45.0, 60.0  # the longest waits
MISSING = "missing"
MISSING_DUE_S = (
    30.0  # after the start MISSING is next: a minute after the start the monitor reports the instance anyhow
)
_RETRY_S = 0.3
_BEAT_S = 0.01  # between two looks at how late this process is

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
    users=4,
    absent=frozenset({LATE}),
    proxied=frozenset({"broadcasts", "heartbeats"}),
)

REAL = Testbed(
    name="real",
    title="one gateway, one scheduler, 1 prefill and 1 decode instance; vLLM on the CPU, KV over TCP",
    cluster={
        **ALONE,
        "monitor": {"slo_windows_s": [WINDOW_S, 60.0]},
        "gateway": {"dtype": "float32", "slo": _SLO},
        "instance_defaults": REAL_ENGINE,
        "instances": [{"id": "prefill", "role": "prefill"}, {"id": "decode", "role": "decode"}],
    },
    users=2,
    gateways=1,
    proxied=frozenset({"kv"}),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A request's lengths in tokens. slo: its class, "" for the default."""

    prompt_tokens: int
    output_tokens: int
    slo: str = ""


_STEADY = Shape(90, 24), Shape(300, 24)


class Staging:
    """A running suite with its clients, and what is known of it. states: of each instance, as the bench made it."""

    def __init__(self, suite: SuiteUnderTest, monitor: MonitorClient) -> None:
        self.suite = suite
        self.monitor = monitor
        self.states = {name: "starting" if name in suite.bed.absent else "ready" for name in suite.roles}
        self.truth = GroundTruth(counts(self.states, suite.roles), slow_s=SLOW_S / 2)  # of `kv-slow`, each way
        self.late: Child | None = None  # the instance that was started late
        self._rng = Random(7)
        self._lateness: list[tuple[float, float]] = []  # when, and by how much

    def set_state(self, state: str, *names: str) -> None:
        self.states |= dict.fromkeys(names, state)
        self.truth.counts = counts(self.states, self.suite.roles)

    async def verdict(self) -> tuple[Verdict, GroundTruth]:
        """The monitor's verdict and the truth at that moment, whose lists grow on."""
        found = await self.monitor.verdict()
        return found, replace(self.truth, silent=dict(self.truth.silent))

    async def watch_lateness(self) -> None:
        """Note how late this process is, until cancelled: where cores are few, gaps grow by that on their way."""
        while True:
            due_s = time.time() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            if (late_s := time.time() - due_s) > _BEAT_S:
                self._lateness.append((time.time(), late_s))

    async def send(self, shape: Shape) -> bool:
        """Send a request and log its outcome; returns whether it was served."""
        logged = ClientRequest(shape.slo or "default", time.time())
        self.truth.requests.append(logged)
        name = f"trouble-{uuid.uuid4().hex[:12]}"
        prompt = [self._rng.randrange(300, 1200) for _ in range(shape.prompt_tokens)]
        more: Json = {"return_token_ids": True, "request_id": name, "cache_salt": name}
        request = Request(COMPLETIONS, completion_body(prompt, shape.output_tokens, **more), shape.slo, key=name)
        reply = await send(self.suite.gateway(len(self.truth.requests)), request)
        times = reply.token_times_s
        logged.status, logged.ttft_s = reply.status, reply.ttft_s
        if len(reply.tokens) > 1:
            logged.tpot_s = (times[-1] - times[0]) / (len(reply.tokens) - 1)
            logged.gaps_s = tuple(after - before for before, after in pairwise(times) if after > before)
        logged.cut = reply.ending not in (Ending.DONE, Ending.ERROR)
        logged.code = (reply.code or "error") if reply.ending is Ending.ERROR else ""
        logged.ended_s = time.time()
        logged.late_s = max((late_s for when_s, late_s in self._lateness if when_s >= logged.began_s), default=0.0)
        return logged.done

    def users(self, count: int, *shapes: Shape) -> AbstractAsyncContextManager[None]:
        """Users that send the given requests in turn, each as soon as the previous one is answered."""
        return users(count, lambda user, turn: self.send(shapes[(user + turn) % len(shapes)]), _RETRY_S)


def counts(states: dict[str, str], roles: dict[str, Role]) -> dict[Role, Count]:
    """How many instances of each role are in each state."""

    def count(role: Role) -> Count:
        mine = [state for name, state in states.items() if roles[name] is role]
        return Count(expected=len(mine), **{state: mine.count(state) for state in set(mine)})

    return {role: count(role) for role in Role}


Hold = Callable[[Staging], AbstractAsyncContextManager[object]]


@dataclass(frozen=True, slots=True)
class Trouble:
    """A fault and the verdict that it requires. `hold` has the fault for its block's length.

    what: the problem's code. stage, instances: those of the problem, where they are certain. state: that of these
    instances meanwhile; afterwards they are ready. since: the field of the ground truth that has the fault's beginning.
    """

    name: str
    does: str
    what: str
    hold: Hold
    level: Level = Level.DEGRADED
    stage: Stage | None = None
    instances: tuple[str, ...] | None = None
    state: str = ""
    since: str = ""
    bed: Testbed = EMULATED


@asynccontextmanager
async def _missing(on: Staging) -> AsyncIterator[None]:
    """The monitor expects an instance of the cluster file a minute after its own start."""
    yield
    await _start_late(on)


async def _start_late(on: Staging) -> None:
    spec = on.suite.spec(LATE)
    on.late = await on.suite.start_stranger(LATE, spec.argv, spec.env)
    on.set_state("ready", LATE)


@asynccontextmanager
async def _all_dead(on: Staging) -> AsyncIterator[None]:
    names = [name for name in on.suite.decode if name != LATE]
    on.set_state("dead", *names)
    async with kept_dead(on.suite, *names):
        if on.late is not None:
            on.set_state("dead", LATE)
            on.late.kill()
        yield
    on.set_state("ready", *names)
    if on.late is not None:
        await _start_late(on)


def _burst(count: int, shape: Shape) -> Hold:
    """So many requests at once, until the last answer."""

    @asynccontextmanager
    async def hold(on: Staging) -> AsyncIterator[None]:
        burst = asyncio.gather(*(on.send(shape) for _ in range(count)))
        try:
            yield
            await burst
        finally:
            burst.cancel()
            with suppress(asyncio.CancelledError):
                await burst

    return hold


def _users(count: int, shape: Shape) -> Hold:
    return lambda on: on.users(count, shape)


def _silent(name: str) -> Hold:
    """A gateway or a scheduler stands still. What its clients saw of requests meanwhile may be reported late."""

    @asynccontextmanager
    async def hold(on: Staging) -> AsyncIterator[None]:
        began_s = on.truth.silent[name] = time.time()
        try:
            async with frozen(on.suite, name):
                yield
        finally:
            for request in on.truth.requests:
                request.doubtful |= not request.ended_s or request.ended_s >= began_s - 1.0
        del on.truth.silent[name]

    return hold


@asynccontextmanager
async def _policies(on: Staging) -> AsyncIterator[None]:
    async with disturbed(on.suite.wires.between("decode-0", "monitor", "broadcasts"), Proxy.stall):
        on.truth.behind = frozenset({"decode-0"})
        await on.monitor.set_policies({"decode_admission": PolicySpec("reserve_dynamic")}, who="troubles")
        yield
    await on.monitor.set_policies({"decode_admission": None}, who="troubles")
    on.truth.behind = frozenset()


_DECODE, _PREFILL = ("decode-0",), ("prefill-0",)
TROUBLES = (
    Trouble(
        "dead",
        "SIGKILL of a decode instance, and of each that the launcher starts in its place",
        "instances_dead",
        lambda on: kept_dead(on.suite, *_DECODE),
        stage=Stage.DECODE,
        instances=_DECODE,
        state="dead",
    ),
    Trouble(
        MISSING,
        "an instance of the cluster file is never started",
        "instances_missing",
        _missing,
        stage=Stage.DECODE,
        instances=(LATE,),
        state="missing",
    ),
    Trouble(
        "unresponsive",
        "a proxy drops all heartbeats of a prefill instance",
        "instances_unresponsive",
        lambda on: disturbed(on.suite.wires.between("prefill-0", "monitor", "heartbeats"), Proxy.stall),
        stage=Stage.PREFILL,
        instances=_PREFILL,
        state="unresponsive",
    ),
    Trouble(
        "frozen",
        "SIGSTOP of a prefill instance, which is counted as dead when its connections are silent for 2 s",
        "instances_dead",
        lambda on: frozen(on.suite, *_PREFILL),
        stage=Stage.PREFILL,
        instances=_PREFILL,
        state="dead",
    ),
    Trouble(
        "burst",
        "160 requests at once, where each of two gateways takes 40 that do not decode yet",
        "refusals",
        _burst(160, Shape(30, 8)),
    ),
    Trouble(
        "too-long",
        "12 answers of 16 s, where a request may take 10 s",
        "errors",
        _burst(12, Shape(60, int(JOB_S * 40))),
    ),
    Trouble(
        "ttft",
        "3 clients of a class whose first token is to come within 30 ms, which no prompt of 300 tokens can",
        "ttft_missed",
        _users(3, Shape(300, 8, "instant")),
    ),
    Trouble(
        "tpot",
        "3 clients of a class that wants a token every 20 ms, of instances whose steps take 40 ms",
        "tpot_missed",
        _users(3, Shape(60, 24, "swift")),
        stage=Stage.DECODE,
    ),
    Trouble(
        "overload",
        "24 clients with prompts of 900 tokens, each asking again at once",
        "ttft_missed",
        _users(24, Shape(900, 4)),
        stage=Stage.QUEUE,
        instances=("prefill-0", "prefill-1"),
    ),
    Trouble(
        "kv-full",
        "44 clients whose answers need more KV than the decode instances have",
        "kv_full",
        _users(44, Shape(300, 120)),
        stage=Stage.DECODE_QUEUE,
    ),
    Trouble(
        "all-dead",
        "SIGKILL of all decode instances, and of each that the launcher starts in their place",
        "role_empty",
        _all_dead,
        level=Level.DOWN,
        stage=Stage.DECODE,
    ),
    Trouble("gateway", "SIGSTOP of a gateway", "gateway_gone", _silent("gateway-1")),
    Trouble("scheduler", "SIGSTOP of a scheduler", "scheduler_gone", _silent("scheduler-1")),
    Trouble(
        "policies",
        "a policy is changed while a proxy drops all broadcasts to an instance",
        "policies_not_followed",
        _policies,
        instances=_DECODE,
    ),
    Trouble(
        "predictor",
        "SIGKILL of the predictor, and of each that the launcher starts in its place",
        "predictor_fallback",
        lambda on: kept_dead(on.suite, "predictor"),
        since="mute_s",
    ),
    Trouble(
        "kv-cut",
        "a proxy resets every KV connection",
        "transfers_failing",
        lambda on: disturbed(on.suite.wires.all, lambda proxy: proxy.cut(refuse=True)),
        stage=Stage.TRANSFER,
        since="cut_s",
        bed=REAL,
    ),
    Trouble(
        "kv-slow",
        f"a proxy has every KV message take {SLOW_S / 2:g} s longer",
        "transfers_slow",
        lambda on: disturbed(on.suite.wires.all, lambda proxy: proxy.slow(latency_s=SLOW_S / 2)),
        stage=Stage.TRANSFER,
        bed=REAL,
    ),
)


@dataclass(slots=True)
class Outcome:
    """The outcome of a trouble. Times in seconds; None: not within the allowed time."""

    trouble: Trouble
    headline: str = ""
    cause: str = ""
    alarm_s: float | None = None
    clear_s: float | None = None
    figures: list[Figure] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def right(self) -> int:
        return sum(figure.ok for figure in self.figures)

    @property
    def ok(self) -> bool:
        return not self.faults and self.right == len(self.figures)


async def stage(on: Staging, trouble: Trouble) -> Outcome:
    """From a cluster that is well to one that is well again. Whatever goes wrong is in the outcome."""
    outcome, judged = Outcome(trouble), list[tuple[Verdict, GroundTruth]]()
    await _well(on, outcome)
    async with _sampled(on):
        began = time.monotonic()
        try:
            if trouble.state and trouble.instances:
                on.set_state(trouble.state, *trouble.instances)
            if trouble.since:
                setattr(on.truth, trouble.since, time.time())
            async with trouble.hold(on):
                outcome.alarm_s = await _alarm(on, outcome, judged, began)
            if trouble.state and trouble.instances:
                on.set_state("ready", *trouble.instances)
            if trouble.since:
                setattr(on.truth, trouble.since, float("inf"))
        except (PolyphaseError, TimeoutError) as error:
            outcome.faults.append(f"{type(error).__name__}: {error}")
        undone = time.monotonic()
        if well := await _well(on, outcome):
            outcome.clear_s = time.monotonic() - undone
            judged += [well] if not well[0].problems else []
        for found, truth in judged:
            outcome.figures += figures(found, truth)
    return outcome


def _named(trouble: Trouble, verdict: Verdict) -> Problem | None:
    return next((problem for problem in verdict.problems if problem.what == trouble.what), None)


async def _alarm(
    on: Staging, outcome: Outcome, judged: list[tuple[Verdict, GroundTruth]], began: float
) -> float | None:
    """Seconds until the verdict names the problem; further verdicts are judged after that."""
    trouble, found = outcome.trouble, await on.verdict()
    while _named(trouble, found[0]) is None:
        if time.monotonic() - began > ALARM_S:
            outcome.headline = found[0].headline
            outcome.faults.append(f"{trouble.what} was not named within {ALARM_S:.0f} s")
            return None
        await asyncio.sleep(POLL_S)
        found = await on.verdict()
    alarm_s = time.monotonic() - began
    for look in range(LOOKS):
        if look:
            await asyncio.sleep(BETWEEN_S)
            found = await on.verdict()
        judged.append(found)
        outcome.headline = found[0].headline
        if (now := _named(trouble, found[0])) is None:
            outcome.faults.append(f"not named any more: {found[0].headline}")
            continue
        outcome.cause = now.cause
        for name in ("level", "stage", "instances"):
            got, want = getattr(now, name), getattr(trouble, name)
            if want is not None and got != want:
                outcome.faults.append(f"{name} is {got!r}, not {want!r}")
    return alarm_s


async def _well(on: Staging, outcome: Outcome) -> tuple[Verdict, GroundTruth] | None:
    """Wait for a verdict without a problem but a missing instance, and return it."""
    give_up = time.monotonic() + CLEAR_S
    while True:
        found, truth = await on.verdict()
        problems = [problem for problem in found.problems if problem.what != "instances_missing"]
        settled = all(count.ready == truth.counts[role].ready for role, count in found.counts.items())
        if not problems and settled and found.requests:
            return found, truth
        if time.monotonic() > give_up:
            outcome.faults.append(f"not well within {CLEAR_S:.0f} s: {found.headline}")
            return None
        await asyncio.sleep(POLL_S)


@asynccontextmanager
async def _sampled(on: Staging) -> AsyncIterator[None]:
    """Poll the metrics of every instance."""
    async with httpx.AsyncClient(timeout=2.0, trust_env=False) as http:

        async def poll(name: str, url: str) -> None:
            while True:
                if on.states[name] == "ready":
                    with suppress(httpx.HTTPError, Unavailable):  # just killed, or not there yet
                        text = (await http.get(f"{url}/metrics")).text
                        on.truth.samples.append(sample_of(text, time.time(), name, on.suite.roles[name]))
                await asyncio.sleep(SAMPLE_S)

        tasks = [asyncio.create_task(poll(port.process, port.url)) for port in on.suite.ports_for("worker", "http")]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            on.truth.samples.clear()


def sample_of(text: str, time_s: float, name: str, role: Role) -> Sample:
    """From the text of `/metrics`. Raises Unavailable where a series is missing."""
    waiting, running = (int(metric(text, f"vllm:num_requests_{state}")) for state in ("waiting", "running"))
    return Sample(time_s, name, role, metric(text, "vllm:kv_cache_usage_perc"), waiting, running)


@dataclass(frozen=True, slots=True)
class TroublesOptions:
    """only: names of troubles; empty: all."""

    only: tuple[str, ...] = ()
    keep_logs: Path | None = None


def run_troubles_bench(options: TroublesOptions, console: Console) -> Result:
    """Figures and aims. Raises InvalidRequest when `only` has an unknown name."""
    chosen, outcomes = choose(options.only), list[Outcome]()
    began = time.monotonic()
    finished = asyncio.run(until_stopped(_run(chosen, options, console, outcomes), console)) is not None
    console.print(table(outcomes))
    return as_result(outcomes, time.monotonic() - began, finished)


def choose(only: Sequence[str]) -> tuple[Trouble, ...]:
    """Those of that name, in their order. Raises InvalidRequest that lists the names."""
    known = [one.name for one in TROUBLES]
    if unknown := sorted(set(only) - set(known)):
        raise InvalidRequest(f"no trouble {', '.join(unknown)}; known: {', '.join(known)}")
    return tuple(one for one in TROUBLES if not only or one.name in only)


async def _run(chosen: Sequence[Trouble], options: TroublesOptions, console: Console, outcomes: list[Outcome]) -> bool:
    """All troubles of one testbed after the other, each testbed's on one suite under a steady load."""
    with tempfile.TemporaryDirectory(prefix="polyphase-troubles-") as temporary:
        for bed in dict.fromkeys(one.bed.name for one in chosen):
            waiting = [one for one in chosen if one.bed.name == bed]
            folder = (options.keep_logs or Path(temporary)) / bed
            folder.mkdir(parents=True, exist_ok=True)
            async with AsyncExitStack() as stack:
                started = started_suite_under_test(bed_for(waiting), folder, console, 1, LIMITS)
                suite = await stack.enter_async_context(started)
                on = Staging(suite, await stack.enter_async_context(suite.monitor()))
                watch = asyncio.create_task(on.watch_lateness())
                stack.callback(watch.cancel)
                await stack.enter_async_context(on.users(suite.bed.users, *_STEADY))
                began = time.monotonic()
                while waiting:
                    due = time.monotonic() - began > MISSING_DUE_S
                    next_one = next((one for one in waiting if due and one.name == MISSING), waiting[0])
                    waiting.remove(next_one)
                    outcomes.append(await stage(on, next_one))
                    console.print(line(outcomes[-1]))
    return True


def bed_for(troubles: Sequence[Trouble]) -> Testbed:
    """The testbed, without the instance that is never started unless MISSING is among the troubles."""
    bed = troubles[0].bed
    if any(one.name == MISSING for one in troubles):
        return bed
    entries = [entry for entry in bed.cluster["instances"] if entry["id"] != LATE]
    return replace(bed, cluster={**bed.cluster, "instances": entries}, absent=frozenset())


def line(outcome: Outcome) -> str:
    mark = "[green]✔[/]" if outcome.ok else "[red]✘[/]"
    wrong = [f"{one.name}: reported {one.reported}, want {one.want}" for one in outcome.figures if not one.ok]
    text = (
        f"{mark} [bold]{outcome.trouble.name}[/] [dim]{escape(outcome.trouble.does)}[/]\n    {escape(outcome.headline)}"
    )
    return text + "".join(f"\n    [red]{escape(fault)}[/]" for fault in (*outcome.faults, *wrong))


def table(outcomes: Sequence[Outcome]) -> Table:
    grid = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("", "trouble", "headline", "cause"):
        grid.add_column(name, overflow="fold")
    for name in ("alarm", "clear", "figures"):
        grid.add_column(name, justify="right", no_wrap=True)
    for outcome in outcomes:
        mark = "[green]✔ ok[/]" if outcome.ok else "[red]✘ wrong[/]"
        times = ("never" if at is None else f"{at:.1f} s" for at in (outcome.alarm_s, outcome.clear_s))
        texts = (outcome.trouble.name, escape(outcome.headline), escape(outcome.cause))
        grid.add_row(mark, *texts, *times, f"{outcome.right} of {len(outcome.figures)}")
    return grid


def as_result(outcomes: Sequence[Outcome], took_s: float, finished: bool) -> Result:
    result: Result = {"took_s": round(took_s, 1)}
    aims = {"finished": {"want": "all troubles staged", "got": "yes" if finished else "interrupted", "met": finished}}
    for one in outcomes:
        name, total = one.trouble.name.replace("-", "_"), len(one.figures)
        for key, seconds in (("alarm", one.alarm_s), ("clear", one.clear_s)):
            result[f"{name}_{key}_s"] = None if seconds is None else round(seconds, 1)
        result |= {f"{name}_figures": total, f"{name}_wrong": total - one.right}
        got = "; ".join(one.faults) or f"{one.right} of {total} figures right"
        aims[one.trouble.name] = {"want": "named with its cause, all figures right", "got": got, "met": one.ok}
    return {"figures": result, "aims": aims}
