"""Bringing a suite up: checks before anything starts, then everything, then a handle to it."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from services.launcher import cluster_token, display, host_key, state_file, targets
from services.launcher.cluster_file import Cluster, load_cluster
from services.launcher.elsewhere import Elsewhere, Running, nowhere
from services.launcher.gateways import make_shared_table
from services.launcher.keeper import Status
from services.launcher.model_source import resolve_model
from services.launcher.plan import make_plan
from services.launcher.ports import check_free
from services.launcher.spec import Plan
from services.launcher.suite import Suite
from services.launcher.supervisor import Supervisor, supervising
from services.launcher.watch import Limits
from shared.errors import InvalidRequest

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
    ray: str | None = None  # the Ray cluster that runs the instances, see `on_ray.connection`; None: this host does


@dataclass(frozen=True, slots=True)
class RunningSuite:
    """A suite that this process runs."""

    suite: Suite
    plan: Plan
    supervisor: Supervisor
    elsewhere: Elsewhere
    took_s: float


def cluster_of(options: UpOptions) -> Cluster:
    """The cluster file with the command line's changes. Raises InvalidRequest."""
    cluster = load_cluster(options.cluster)
    if options.model:
        model = resolve_model(options.model)
        named = {"model": model, "served_model_name": Path(options.model).name}
        places = cluster.places(str(options.cluster)).overrule("model", "--model")
        cluster = cluster.model_copy(update=named).from_places(places)
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
    cluster: Cluster,
    data_dir: Path,
    console: Console,
    *,
    host_name: str = "",
    where: str = "cluster file",
    ray: str | None = None,
) -> AsyncIterator[RunningSuite]:
    """The suite, ready to serve, for the block's length. Raises Conflict, InvalidRequest, StartFailed, Unavailable."""
    # What it asks (the database's parser, the policies) takes half a second to import: not for `status` and the like.
    from services.launcher.preflight import preflight

    data_dir = data_dir.resolve()
    with ExitStack() as stack:
        if ray is not None:
            if find_spec("ray") is None:
                raise InvalidRequest("--on ray: Ray is not installed here: `pip install 'polyphase[ray]'`")
            from services.launcher.on_ray import stay_local

            ray = ray or os.environ.get("RAY_ADDRESS", "")
            if not ray:
                stay_local()
            from services.launcher.on_ray.suite import divide, on_ray

            cluster = stack.enter_context(on_ray(cluster, ray))
        plan = make_plan(cluster, data_dir, host_name, where)
        preflight(cluster, plan, where, places_instances=ray is None)
        stack.enter_context(state_file.owning(data_dir))
        start_s = plan.start_s
        plan, others = (plan, nowhere(plan.instance_ids)) if ray is None else divide(cluster, plan)
        check_free(plan.port_uses)
        cluster_token.keep(cluster, data_dir)
        host_key.keep(cluster, data_dir)
        make_shared_table(plan)
        async with _running(cluster, plan, data_dir, console, others, start_s) as suite:
            yield suite


@asynccontextmanager
async def _running(
    cluster: Cluster, plan: Plan, data_dir: Path, console: Console, others: Running, start_s: float
) -> AsyncIterator[RunningSuite]:
    began = time.monotonic()
    listener = _Listener()
    limits = Limits(hang_s=cluster.launcher.hang_s, at_once=max(3, os.cpu_count() or 1))
    logs = data_dir / "logs"
    async with (
        supervising(plan.processes, logs, listener.changed, limits, plan.fork_env, plan.preload) as supervisor,
        others(listener.changed) as elsewhere,
    ):

        def save() -> None:
            state_file.write(data_dir, state_file.describe(plan, (*supervisor.statuses, *elsewhere.statuses)))

        listener.save = save
        save()
        targets.write(data_dir, plan.processes)
        try:
            suite = Suite(data_dir)
            with display.StartDisplay(console, f"Starting {cluster.name}") as progress:
                progress.expect((*supervisor.statuses, *elsewhere.statuses))
                listener.show = progress.update
                await supervisor.started()
                names = await supervisor.during(elsewhere.started(start_s))
                in_time = [name for name in names if name not in supervisor.late]
                await supervisor.during(suite.wait_ready(in_time, REGISTER_S))
            listener.show = lambda status: display.announce(console, status)
            yield RunningSuite(suite, plan, supervisor, elsewhere, time.monotonic() - began)
        finally:
            listener.save = None
            state_file.remove(data_dir)
            targets.remove(data_dir)


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
    where, data_dir, host = str(options.cluster), options.data_dir, options.host_name
    async with running_suite(cluster, data_dir, console, host_name=host, where=where, ray=options.ray) as running:
        display.welcome(console, running.plan, running.took_s, running.suite.memory_bytes())
        display.late(console, running.supervisor.late)
        await running.supervisor.during(running.elsewhere.kept())


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
