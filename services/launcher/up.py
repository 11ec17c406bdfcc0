"""Bringing a suite up: checks before anything starts, then everything, then a handle to it."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from services.launcher import display, state_file
from services.launcher.cluster_file import Cluster, load_cluster
from services.launcher.gateways import make_shared_table
from services.launcher.keeper import Status
from services.launcher.model_source import resolve_model
from services.launcher.plan import make_plan
from services.launcher.ports import check_free
from services.launcher.spec import Plan
from services.launcher.suite import Suite
from services.launcher.supervisor import Supervisor, supervising
from services.launcher.watch import Limits

Result = TypeVar("Result")
REGISTER_S = 60.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What the command line adds to a cluster file."""

    cluster: Path = Path("laptop")
    model: str = ""
    port: int | None = None
    dashboard_port: int | None = None
    dashboard: bool = True
    data_dir: Path = Path(".polyphase")
    host_name: str = ""
    auto: bool = False


@dataclass(frozen=True, slots=True)
class RunningSuite:
    """A suite that this process runs."""

    suite: Suite
    plan: Plan
    supervisor: Supervisor
    took_s: float


def cluster_of(options: UpOptions) -> Cluster:
    """The cluster file with the command line's changes. Raises InvalidRequest."""
    cluster = load_cluster(options.cluster)
    if options.model:
        model = resolve_model(options.model)
        cluster = cluster.model_copy(update={"model": model, "served_model_name": Path(options.model).name})
        cluster = _with(cluster, "predictor", checkpoint=None)  # it was trained for the model of the file
    if options.port is not None:
        cluster = _with(cluster, "gateway", port=options.port)
    if options.dashboard_port is not None:
        cluster = _with(cluster, "dashboard", port=options.dashboard_port)
    if not options.dashboard:
        cluster = _with(cluster, "dashboard", enabled=False)
    if options.auto:
        cluster = _with(cluster, "planner", auto=True)
    return cluster


@asynccontextmanager
async def running_suite(
    cluster: Cluster, data_dir: Path, console: Console, *, host_name: str = "", where: str = "cluster file"
) -> AsyncIterator[RunningSuite]:
    """The suite, ready to serve, for the block's length. Raises Conflict, InvalidRequest or StartFailed."""
    # What it asks (the database's parser, the policies) takes half a second to import: not for `status` and the like.
    from services.launcher.preflight import preflight

    data_dir = data_dir.resolve()
    plan = make_plan(cluster, data_dir, host_name, where)
    preflight(cluster, plan, where)
    with state_file.owning(data_dir):
        check_free(plan.port_uses)
        make_shared_table(plan)
        async with _running(cluster, plan, data_dir, console) as suite:
            yield suite


@asynccontextmanager
async def _running(cluster: Cluster, plan: Plan, data_dir: Path, console: Console) -> AsyncIterator[RunningSuite]:
    began = time.monotonic()
    listener = _Listener()
    patience = cluster.launcher
    limits = Limits(patience.start_s, hang_s=patience.hang_s, at_once=max(3, os.cpu_count() or 1))
    logs = data_dir / "logs"
    async with supervising(plan.processes, logs, listener.changed, limits, plan.fork_env, plan.preload) as supervisor:

        def save() -> None:
            state_file.write(data_dir, state_file.describe(plan, supervisor.statuses))

        listener.save = save
        save()
        try:
            suite = Suite(data_dir)
            with display.StartDisplay(console, f"Starting {cluster.name}") as progress:
                progress.expect(supervisor.statuses)
                listener.show = progress.update
                await supervisor.started()
                await supervisor.during(suite.wait_ready(plan.instance_ids, REGISTER_S))
            listener.show = lambda status: display.announce(console, status)
            yield RunningSuite(suite, plan, supervisor, time.monotonic() - began)
        finally:
            listener.save = None
            state_file.remove(data_dir)


async def up(options: UpOptions, console: Console) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. Raises what `running_suite` raises."""
    await until_stopped(_serve(options, console), console)


async def until_stopped(work: Coroutine[Any, Any, Result], console: Console) -> Result | None:
    """The result of `work`; None when SIGINT, SIGTERM or SIGHUP came first and `work` has cleaned up."""
    with stop_signals() as stop:
        stopping, working = asyncio.create_task(stop.wait()), asyncio.create_task(work)
        try:
            await asyncio.wait([stopping, working], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return await working
            console.print("Stopping…")
            working.cancel()
            await asyncio.wait([working])
            console.print("Every process has ended.")
            return None
        finally:
            stopping.cancel()


async def _serve(options: UpOptions, console: Console) -> None:
    cluster = cluster_of(options)
    where = f"{options.cluster} with --model" if options.model else str(options.cluster)
    async with running_suite(cluster, options.data_dir, console, host_name=options.host_name, where=where) as running:
        display.welcome(console, running.plan, running.took_s, running.suite.memory_bytes())
        await running.supervisor.during(asyncio.Event().wait())


class _Listener:
    """Passes a change on to the state file and to whatever shows it at the moment."""

    def __init__(self) -> None:
        self.save: Callable[[], None] | None = None
        self.show: Callable[[Status], None] | None = None

    def changed(self, status: Status) -> None:
        """Called by the supervisor."""
        if self.save is not None:
            self.save()
            if self.show is not None:
                self.show(status)


@contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """An event that SIGINT, SIGTERM and SIGHUP set."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    for number in _SIGNALS:
        loop.add_signal_handler(number, event.set)
    try:
        yield event
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def _with(cluster: Cluster, section: str, **changes: object) -> Cluster:
    return cluster.model_copy(update={section: getattr(cluster, section).model_copy(update=changes)})
