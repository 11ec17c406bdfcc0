"""`polyphase bench troubles`: injected faults, and the verdict that the cluster monitor gives for each.

The list gives the faults in their order; each fault is injected on a running suite and undone at the end of its block
(`troubles_stage`). The bench fails if a verdict names the wrong cause or states a wrong figure.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.chaos.arena import Arena, started_arena
from benchmarks.chaos.clusters import Testbed
from benchmarks.chaos.proxy import Proxy, Wire
from benchmarks.troubles_stage import Stage, Staged, Trouble, counted, stage
from benchmarks.troubles_suite import JOB_S, LATE, LIMITS, REAL, Clients, Known, Users, Wish
from services.launcher.suite import until
from services.launcher.supervisor import State
from services.launcher.up import until_stopped
from shared.domain.route import PolicySpec
from shared.domain.verdict import Level
from shared.domain.verdict import Stage as Part
from shared.errors import InvalidRequest

SLOW_S = 0.8  # of each KV transfer
_KILL_AGAIN_S = 0.1


# Each fault is made on entry of a block and undone at its end.


@asynccontextmanager
async def _killed(on: Stage, *names: str) -> AsyncIterator[None]:
    """SIGKILL, again after every restart by the launcher; at the end, until the processes are back."""
    old = on.arena.processes.kill(*names)

    async def hold() -> None:
        while True:
            await asyncio.sleep(_KILL_AGAIN_S)
            on.arena.processes.kill(*names)

    def back(name: str) -> bool:
        status = on.arena.processes.statuses[name]
        return status.state is State.READY and bool(status.pid)

    task = asyncio.create_task(hold())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: all(map(back, names)), 60.0, f"{', '.join(old)} to be back")


@asynccontextmanager
async def _state(on: Stage, state: str, *names: str) -> AsyncIterator[None]:
    """The instances are in that state, and ready after the block."""
    on.be(state, *names)
    yield
    on.be("ready", *names)


@asynccontextmanager
async def dead(on: Stage) -> AsyncIterator[None]:
    async with _state(on, "dead", "decode-0"), _killed(on, "decode-0"):
        yield


@asynccontextmanager
async def all_dead(on: Stage) -> AsyncIterator[None]:
    names = [name for name in on.arena.decode if name != LATE]
    async with _state(on, "dead", *names), _killed(on, *names):
        if on.late is not None:
            on.be("dead", LATE)
            on.late.kill()
        yield
    if on.late is not None:
        await _start_late(on)


@asynccontextmanager
async def missing(on: Stage) -> AsyncIterator[None]:
    """An instance of the cluster file is not started; the monitor expects it a minute after its own start."""
    on.be("missing", LATE)
    yield
    await _start_late(on)


async def _start_late(on: Stage) -> None:
    spec = on.arena.spec(LATE)
    on.late = await on.arena.strangers.start(LATE, spec.argv, spec.env)
    on.be("ready", LATE)


@asynccontextmanager
async def _wires(wires: Sequence[Wire], fault: Callable[[Proxy], object]) -> AsyncIterator[None]:
    """A fault of these links."""
    for wire in wires:
        fault(wire.proxy)
    try:
        yield
    finally:
        for wire in wires:
            wire.proxy.heal()


@asynccontextmanager
async def _frozen(on: Stage, name: str) -> AsyncIterator[None]:
    on.arena.processes.freeze(name)
    try:
        yield
    finally:
        on.arena.processes.thaw(name)


@asynccontextmanager
async def unresponsive(on: Stage) -> AsyncIterator[None]:
    """The heartbeats of a prefill instance are dropped; it works."""
    wires = on.arena.wires.between("prefill-0", "monitor", "heartbeats")
    async with _state(on, "unresponsive", "prefill-0"), _wires(wires, lambda proxy: proxy.stall()):
        yield


@asynccontextmanager
async def frozen(on: Stage) -> AsyncIterator[None]:
    async with _state(on, "dead", "prefill-0"), _frozen(on, "prefill-0"):
        yield


@asynccontextmanager
async def silent(name: str, on: Stage) -> AsyncIterator[None]:
    """A gateway or a scheduler stands still."""
    with on.doubted():
        on.known.silent[name] = time.time()
        async with _frozen(on, name):
            yield
    del on.known.silent[name]


@asynccontextmanager
async def no_predictor(on: Stage) -> AsyncIterator[None]:
    on.known.mute_s = time.time()
    async with _killed(on, "predictor"):
        yield
    on.known.mute_s = None


@asynccontextmanager
async def deaf(on: Stage) -> AsyncIterator[None]:
    """A policy changes while an instance gets no broadcasts."""
    async with _wires(on.arena.wires.between("decode-0", "monitor", "broadcasts"), lambda proxy: proxy.stall()):
        on.known.behind = frozenset({"decode-0"})
        await on.monitor.set_policies({"decode_admission": PolicySpec("reserve_dynamic")}, who="troubles")
        yield
    await on.monitor.set_policies({"decode_admission": None}, who="troubles")
    on.known.behind = frozenset()


@asynccontextmanager
async def at_once(number: int, wish: Wish, on: Stage) -> AsyncIterator[None]:
    """So many requests, until the last answer."""
    task = asyncio.create_task(on.clients.burst(number, wish))
    try:
        yield
        await task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def kv_cut(on: Stage) -> AsyncIterator[None]:
    on.known.cut_s = time.time()
    async with _wires(on.arena.wires.between(purpose="kv"), lambda proxy: proxy.cut(refuse=True)):
        yield


@asynccontextmanager
async def kv_slow(on: Stage) -> AsyncIterator[None]:
    on.known.slow_s = SLOW_S / 2  # its way there takes half of it, and its way back the other half
    async with _wires(on.arena.wires.between(purpose="kv"), lambda proxy: proxy.slow(latency_s=SLOW_S / 2)):
        yield


def users(number: int, wish: Wish) -> Callable[[Stage], Users]:
    """So many clients that each request again as soon as they are answered."""
    return lambda on: on.clients.users(number, wish)


MISSING = Trouble(
    "missing",
    "nobody starts an instance of the cluster file",
    "instances_missing",
    missing,
    stage=Part.DECODE,
    culprits=(LATE,),
)
TROUBLES: tuple[Trouble, ...] = (
    Trouble(
        "dead",
        "SIGKILL of a decode instance, and of each that the launcher starts in its place",
        "instances_dead",
        dead,
        stage=Part.DECODE,
        culprits=("decode-0",),
    ),
    MISSING,
    Trouble(
        "unresponsive",
        "a proxy drops all heartbeats of a prefill instance",
        "instances_unresponsive",
        unresponsive,
        stage=Part.PREFILL,
        culprits=("prefill-0",),
    ),
    Trouble(
        "frozen",
        "SIGSTOP of a prefill instance, which is counted as dead when its connections are silent for 2 s",
        "instances_dead",
        frozen,
        stage=Part.PREFILL,
        culprits=("prefill-0",),
    ),
    Trouble(
        "burst",
        "160 requests at once, where each of two gateways takes 40 that do not decode yet",
        "refusals",
        partial(at_once, 160, Wish(30, 8)),
    ),
    Trouble(
        "too-long",
        "12 answers of 16 s, where a request may take 10 s",
        "errors",
        partial(at_once, 12, Wish(60, int(JOB_S * 40))),
    ),
    Trouble(
        "ttft",
        "3 clients of a class whose first token is to come within 30 ms, which no prompt of 300 tokens can",
        "ttft_missed",
        users(3, Wish(300, 8, "instant")),
    ),
    Trouble(
        "tpot",
        "3 clients of a class that wants a token every 20 ms, of instances whose steps take 40 ms",
        "tpot_missed",
        users(3, Wish(60, 24, "swift")),
        stage=Part.DECODE,
    ),
    Trouble(
        "overload",
        "24 clients with prompts of 900 tokens, each asking again at once",
        "ttft_missed",
        users(24, Wish(900, 4)),
        stage=Part.QUEUE,
        culprits=("prefill-0", "prefill-1"),
    ),
    Trouble(
        "kv-full",
        "44 clients whose answers need more KV than the decode instances have",
        "kv_full",
        users(44, Wish(300, 120)),
        stage=Part.DECODE_QUEUE,
    ),
    Trouble(
        "all-dead",
        "SIGKILL of all decode instances, and of each that the launcher starts in their place",
        "role_empty",
        all_dead,
        level=Level.DOWN,
        stage=Part.DECODE,
    ),
    Trouble("gateway", "SIGSTOP of a gateway", "gateway_gone", partial(silent, "gateway-1")),
    Trouble("scheduler", "SIGSTOP of a scheduler", "scheduler_gone", partial(silent, "scheduler-1")),
    Trouble(
        "policies",
        "a policy is changed while a proxy drops all broadcasts to an instance",
        "policies_not_followed",
        deaf,
        culprits=("decode-0",),
    ),
    Trouble(
        "predictor",
        "SIGKILL of the predictor, and of each that the launcher starts in its place",
        "predictor_fallback",
        no_predictor,
    ),
    Trouble("kv-cut", "a proxy resets every KV connection", "transfers_failing", kv_cut, stage=Part.TRANSFER, bed=REAL),
    Trouble(
        "kv-slow",
        f"a proxy has every KV message take {SLOW_S / 2:g} s longer",
        "transfers_slow",
        kv_slow,
        stage=Part.TRANSFER,
        bed=REAL,
    ),
)

_STEADY = Wish(90, 24), Wish(300, 24)
_DUE_S = 30.0  # after the start MISSING is next: a minute after the start the monitor reports the instance anyhow


@dataclass(frozen=True, slots=True)
class TroublesOptions:
    """only: names of faults; empty: all."""

    only: tuple[str, ...] = ()
    keep_logs: Path | None = None


def run_troubles_bench(options: TroublesOptions, console: Console) -> dict[str, Any]:
    """Figures and aims. Raises InvalidRequest when `only` names one that there is not."""
    chosen, done = choose(options.only), list[Staged]()
    began = time.monotonic()
    finished = asyncio.run(_until_stopped(_run(chosen, options, console, done), console))
    console.print(table(done))
    return as_result(done, time.monotonic() - began, finished)


def choose(only: Sequence[str]) -> tuple[Trouble, ...]:
    """Those of that name, in their order. Raises InvalidRequest that lists the names."""
    known = [one.name for one in TROUBLES]
    if unknown := sorted(set(only) - set(known)):
        raise InvalidRequest(f"no trouble {', '.join(unknown)}; known: {', '.join(known)}")
    return tuple(one for one in TROUBLES if not only or one.name in only)


async def _until_stopped(work: Any, console: Console) -> bool:
    return await until_stopped(work, console) is not None


async def _run(chosen: Sequence[Trouble], options: TroublesOptions, console: Console, done: list[Staged]) -> bool:
    with tempfile.TemporaryDirectory(prefix="polyphase-troubles-") as folder:
        for name in dict.fromkeys(one.bed.name for one in chosen):
            mine = [one for one in chosen if one.bed.name == name]
            bed = mine[0].bed if MISSING in mine else with_all(mine[0].bed)
            await on_bed(bed, mine, (options.keep_logs or Path(folder)) / name, console, done)
    return True


def with_all(bed: Testbed) -> Testbed:
    """The testbed without the instance that is never started."""
    entries = [entry for entry in bed.cluster["instances"] if entry["id"] != LATE]
    return replace(bed, cluster={**bed.cluster, "instances": entries}, absent=frozenset())


async def on_bed(bed: Testbed, troubles: Sequence[Trouble], folder: Path, console: Console, done: list[Staged]) -> None:
    """All faults of one testbed, on one suite under a steady load."""
    folder.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        arena = await stack.enter_async_context(started_arena(bed, folder, console, 1, LIMITS))
        monitor = await stack.enter_async_context(arena.suite.monitor())
        on = _stage(arena, monitor)
        await stack.enter_async_context(on.clients.users(2 if bed.name == REAL.name else 4, *_STEADY))
        waiting, began = list(troubles), time.monotonic()
        while waiting:
            due = MISSING in waiting and time.monotonic() - began > _DUE_S
            trouble = MISSING if due else waiting[0]
            waiting.remove(trouble)
            done.append(await stage(on, trouble))
            console.print(line(done[-1]))


def _stage(arena: Arena, monitor: Any) -> Stage:
    states = {name: "starting" if name in arena.bed.absent else "ready" for name in arena.roles.first}
    clients = Clients(arena.gateways)
    counts = counted(states, arena.roles.first)
    schedulers = len(arena.named("scheduler"))
    known = Known(counts, clients.shots, gateways=len(arena.gateways), schedulers=schedulers)
    return Stage(arena, clients, monitor, states, known)


def line(staged: Staged) -> str:
    mark = "[green]✔[/]" if staged.ok else "[red]✘[/]"
    text = f"{mark} [bold]{staged.trouble.name}[/] [dim]{escape(staged.trouble.does)}[/]\n    {escape(staged.headline)}"
    for fault in staged.faults:
        text += f"\n    [red]{escape(fault)}[/]"
    for figure in staged.figures:
        if not figure.ok:
            text += f"\n    [red]{escape(f'{figure.name}: reported {figure.reported}, want {figure.want}')}[/]"
    return text


def table(done: Sequence[Staged]) -> Table:
    made = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("", "trouble", "headline", "cause"):
        made.add_column(name, overflow="fold")
    for name in ("alarm", "clear", "figures"):
        made.add_column(name, justify="right", no_wrap=True)
    for staged in done:
        mark = "[green]✔ ok[/]" if staged.ok else "[red]✘ wrong[/]"
        right = sum(figure.ok for figure in staged.figures)
        figures = f"{right} of {len(staged.figures)}"
        times = _seconds(staged.alarm_s), _seconds(staged.clear_s)
        made.add_row(mark, staged.trouble.name, escape(staged.headline), escape(staged.cause), *times, figures)
    return made


def _seconds(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"


def as_result(done: Sequence[Staged], took_s: float, finished: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {"took_s": round(took_s, 1)}
    aims = {"finished": {"want": "all troubles staged", "got": "yes" if finished else "interrupted", "met": finished}}
    for staged in done:
        name, right = staged.trouble.name.replace("-", "_"), sum(figure.ok for figure in staged.figures)
        figures |= {f"{name}_alarm_s": _rounded(staged.alarm_s), f"{name}_clear_s": _rounded(staged.clear_s)}
        figures |= {f"{name}_figures": len(staged.figures), f"{name}_wrong": len(staged.figures) - right}
        got = "; ".join(staged.faults) or f"{right} of {len(staged.figures)} figures right"
        aims[staged.trouble.name] = {"want": "named with its cause, all figures right", "got": got, "met": staged.ok}
    return {"figures": figures, "aims": aims}


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
