"""`polyphase up`: checks before anything starts, the start of all processes, and a handle to the running suite."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from services.launcher import addresses, cluster_keys, state_file
from services.launcher.addresses import make_shared_table
from services.launcher.child_process import Limits
from services.launcher.cluster_file import Cluster, load_cluster
from services.launcher.display import StatusDisplay, welcome
from services.launcher.model_source import resolve_model
from services.launcher.plan import make_plan
from services.launcher.ports import check_free
from services.launcher.spec import Plan
from services.launcher.suite import Suite
from services.launcher.supervisor import Status, Supervisor, supervising
from shared.errors import InvalidRequest

if TYPE_CHECKING:
    from services.launcher.on_ray.suite import RayInstances, RunOnRay

Result = TypeVar("Result")
REGISTER_S = 60.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Options of the command line that change or complete a cluster file."""

    cluster: Path = Path("laptop")
    model: str = ""
    port: int | None = None
    dashboard_port: int | None = None
    dashboard: bool = True
    data_dir: Path = Path(".polyphase")
    host_name: str = ""
    auto: bool = False
    ray: str | None = None  # address of the Ray cluster that runs the instances; None: this host does


@dataclass(frozen=True, slots=True)
class RunningSuite:
    suite: Suite
    plan: Plan
    supervisor: Supervisor
    remote: "RayInstances | None"  # None: all instances are processes of this launcher
    took_s: float


def cluster_of(options: UpOptions) -> Cluster:
    """The cluster file with the changes of the command line. Raises InvalidRequest."""
    cluster = load_cluster(options.cluster)
    if options.model:
        model = resolve_model(options.model)
        named = {"model": model, "served_model_name": Path(options.model).name}
        places = cluster.places(str(options.cluster)).overrule("model", "--model")
        cluster = cluster.model_copy(update=named).from_places(places)
        cluster = _with(cluster, "predictor", checkpoint=None)  # the checkpoint was trained for the model of the file
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
    """Run a suite, ready to serve, within the block. Raises Conflict, InvalidRequest, StartFailed, Unavailable."""
    # Its imports (database, policies) take half a second, which commands such as `status` save.
    from services.launcher.preflight import preflight

    data_dir = data_dir.resolve()
    with ExitStack() as stack:
        if ray is not None:
            if find_spec("ray") is None:
                raise InvalidRequest("--on ray: Ray is not installed: `pip install 'polyphase[ray]'`")
            from services.launcher.on_ray import stay_local

            ray = ray or os.environ.get("RAY_ADDRESS", "")
            if not ray:
                stay_local()
            from services.launcher.on_ray.suite import divide, on_ray

            cluster = stack.enter_context(on_ray(cluster, ray))
        plan = make_plan(cluster, data_dir, host_name, where)
        preflight(cluster, plan, where, places_instances=ray is None)
        stack.enter_context(state_file.owning(data_dir))
        start_s, run_on_ray = plan.start_s, None
        if ray is not None:
            plan, run_on_ray = divide(cluster, plan)
        check_free(plan.port_uses)
        cluster_keys.keep_token(cluster, data_dir)
        cluster_keys.keep_curve_key(cluster, data_dir)
        make_shared_table(plan)
        async with _running(cluster, plan, data_dir, console, run_on_ray, start_s) as suite:
            yield suite


@asynccontextmanager
async def _running(
    cluster: Cluster, plan: Plan, data_dir: Path, console: Console, run_on_ray: "RunOnRay | None", start_s: float
) -> AsyncIterator[RunningSuite]:
    began, display = time.monotonic(), StatusDisplay(console, f"Starting {cluster.name}")
    observer = _Observer(plan, data_dir, display)
    limits = Limits(hang_s=cluster.launcher.hang_s, at_once=max(3, os.cpu_count() or 1))
    logs = data_dir / "logs"
    async with (
        supervising(plan.started, logs, observer.changed, limits, plan.fork_env, plan.preload) as supervisor,
        run_on_ray(observer.changed) if run_on_ray is not None else nullcontext() as remote,
    ):
        observer.statuses = lambda: (*supervisor.statuses, *(remote.statuses if remote is not None else ()))
        observer.write()
        addresses.write_targets(data_dir, plan.processes)
        try:
            suite = Suite(data_dir)
            with display.start(observer.statuses()):
                await supervisor.started()
                names = plan.instance_ids
                if remote is not None:
                    names = await supervisor.during(remote.started(start_s))
                in_time = [name for name in names if name not in supervisor.late]
                if in_time:
                    await supervisor.during(suite.wait_ready(in_time, REGISTER_S))
            yield RunningSuite(suite, plan, supervisor, remote, time.monotonic() - began)
        finally:
            observer.statuses = None
            state_file.remove(data_dir)
            addresses.remove_targets(data_dir)


class _Observer:
    """Passes changes of statuses on to the state file and the display while the suite runs."""

    def __init__(self, plan: Plan, data_dir: Path, display: StatusDisplay) -> None:
        self._plan = plan
        self._data_dir = data_dir
        self._display = display
        self.statuses: Callable[[], tuple[Status, ...]] | None = None  # of all processes; None: the suite does not run

    def changed(self, status: Status) -> None:
        if self.statuses is not None:
            self.write()
            self._display.update(status)

    def write(self) -> None:
        if self.statuses is not None:
            state_file.write(self._data_dir, state_file.describe(self._plan, self.statuses()))


async def up(options: UpOptions, console: Console) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. Raises what `running_suite` raises."""
    await until_stopped(_serve(options, console), console)


async def until_stopped(work: Coroutine[Any, Any, Result], console: Console) -> Result | None:
    """The result of `work`; None if SIGINT, SIGTERM or SIGHUP came first and `work` has cleaned up."""
    with stop_signals() as stop:
        stopping, working = asyncio.create_task(stop.wait()), asyncio.create_task(work)
        try:
            await asyncio.wait([stopping, working], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return await working
            console.print("Stopping…")
            working.cancel()
            await asyncio.wait([working])
            console.print("All processes have ended.")
            return None
        finally:
            stopping.cancel()


async def _serve(options: UpOptions, console: Console) -> None:
    cluster = cluster_of(options)
    where, data_dir, host = str(options.cluster), options.data_dir, options.host_name
    async with running_suite(cluster, data_dir, console, host_name=host, where=where, ray=options.ray) as running:
        memory_bytes, late = running.suite.memory_bytes(), running.supervisor.late
        welcome(console, running.plan, running.took_s, memory_bytes, late)
        kept = running.remote.kept() if running.remote is not None else asyncio.Event().wait()
        await running.supervisor.during(kept)


@contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """An event that is set by SIGINT, SIGTERM and SIGHUP."""
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
