"""`polyphase up`: checks before anything starts, the start of all processes, a handle to the running suite, and the
progress that the terminal shows meanwhile.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from services.launcher import addresses, cluster_keys, state_file
from services.launcher.addresses import make_shared_table
from services.launcher.child_process import Limits
from services.launcher.cluster_file import Cluster, load_cluster
from services.launcher.model_source import resolve_model
from services.launcher.plan import make_plan
from services.launcher.ports import check_free
from services.launcher.spec import Plan
from services.launcher.suite import Suite
from services.launcher.supervisor import Changed, State, Status, Supervisor, supervising
from shared.errors import InvalidRequest, NotFound

Result = TypeVar("Result")
REGISTER_S = 60.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MARKS = {
    State.WAITING: ("·", "dim"),
    State.STARTING: ("◐", "yellow"),
    State.READY: ("✔", "green"),
    State.RESTARTING: ("↻", "magenta"),
    State.FAILED: ("✘", "red"),
    State.STOPPED: ("■", "dim"),
}


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


class Instances(Protocol):
    """The instances of a suite, whatever runs them: this launcher (`LocalInstances`) or Ray (`on_ray.suite`)."""

    @property
    def statuses(self) -> tuple[Status, ...]:
        """Those that the supervisor of this host does not run."""
        ...

    async def started(self, within_s: float) -> tuple[str, ...]:
        """Wait until they run; the names of the instances that the suite waits for. Raises Unavailable."""
        ...

    async def kept(self) -> None:
        """Run until an error ends the supervision of the instances."""
        ...

    def node_of(self, name: str) -> str:
        """The node of an instance, as the system that runs it names it. Raises NotFound."""
        ...


RunInstances = Callable[[Changed], AbstractAsyncContextManager[Instances]]


class LocalInstances:
    """For a suite whose instances are all processes of this launcher: the supervisor starts and keeps them."""

    statuses: tuple[Status, ...] = ()

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    async def started(self, within_s: float) -> tuple[str, ...]:
        return self._names

    async def kept(self) -> None:
        await asyncio.Event().wait()

    def node_of(self, name: str) -> str:
        raise NotFound(f"{name!r} runs on this host")


def _local_instances(names: tuple[str, ...]) -> RunInstances:
    return lambda _: nullcontext(LocalInstances(names))


@dataclass(frozen=True, slots=True)
class RunningSuite:
    """A suite that this process runs."""

    suite: Suite
    plan: Plan
    supervisor: Supervisor
    remote: Instances
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
        start_s = plan.start_s
        run_instances: RunInstances
        if ray is None:
            run_instances = _local_instances(plan.instance_ids)
        else:
            plan, run_instances = divide(cluster, plan)
        check_free(plan.port_uses)
        cluster_keys.keep_token(cluster, data_dir)
        cluster_keys.keep_curve_key(cluster, data_dir)
        make_shared_table(plan)
        async with _running(cluster, plan, data_dir, console, run_instances, start_s) as suite:
            yield suite


@asynccontextmanager
async def _running(
    cluster: Cluster, plan: Plan, data_dir: Path, console: Console, run_instances: RunInstances, start_s: float
) -> AsyncIterator[RunningSuite]:
    began = time.monotonic()
    listener = _Listener()
    limits = Limits(hang_s=cluster.launcher.hang_s, at_once=max(3, os.cpu_count() or 1))
    logs = data_dir / "logs"
    async with (
        supervising(plan.processes, logs, listener.changed, limits, plan.fork_env, plan.preload) as supervisor,
        run_instances(listener.changed) as remote,
    ):

        def save() -> None:
            state_file.write(data_dir, state_file.describe(plan, (*supervisor.statuses, *remote.statuses)))

        listener.save = save
        save()
        addresses.write_targets(data_dir, plan.processes)
        try:
            suite = Suite(data_dir)
            with StartDisplay(console, f"Starting {cluster.name}") as progress:
                progress.expect((*supervisor.statuses, *remote.statuses))
                listener.show = progress.update
                await supervisor.started()
                names = await supervisor.during(remote.started(start_s))
                in_time = [name for name in names if name not in supervisor.late]
                if in_time:
                    await supervisor.during(suite.wait_ready(in_time, REGISTER_S))
            listener.show = lambda status: announce(console, status)
            yield RunningSuite(suite, plan, supervisor, remote, time.monotonic() - began)
        finally:
            listener.save = None
            state_file.remove(data_dir)
            addresses.remove_targets(data_dir)


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
        welcome(console, running.plan, running.took_s, running.suite.memory_bytes())
        late(console, running.supervisor.late)
        await running.supervisor.during(running.remote.kept())


class _Listener:
    """Passes changes of statuses on to the state file and to the present display."""

    def __init__(self) -> None:
        self.save: Callable[[], None] | None = None
        self.show: Callable[[Status], None] | None = None

    def changed(self, status: Status) -> None:
        if self.save is not None:
            self.save()
            if self.show is not None:
                self.show(status)


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


class StartDisplay:
    """A live table on a terminal; elsewhere one line for each process that becomes ready, restarts or fails."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._statuses: dict[str, Status] = {}
        self._began = time.monotonic()
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=5, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        else:
            self._console.print(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
            self._console.print(self._table())

    def expect(self, statuses: tuple[Status, ...]) -> None:
        """Show these processes in this order."""
        for status in statuses:
            self._statuses.setdefault(status.name, status)

    def update(self, status: Status) -> None:
        self._statuses[status.name] = status
        if not self._console.is_terminal and status.state in (State.READY, State.RESTARTING, State.FAILED):
            self._console.print(_line(status))

    def _table(self) -> Table:
        elapsed = time.monotonic() - self._began
        title = f"{self._title}  {elapsed:4.0f} s"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
        for column in ("process", "state", "seconds", "pid"):
            table.add_column(column, justify="right" if column in ("seconds", "pid") else "left")
        for status in self._statuses.values():
            mark, style = _MARKS[status.state]
            table.add_row(
                f"[{style}]{mark}[/] {status.name}",
                Text(f"{status.state.value} {status.note}", style),
                _seconds(status),
                str(status.pid or ""),
            )
        return table


def announce(console: Console, status: Status) -> None:
    """One line about a process of a running suite that became ready, restarts or failed."""
    if status.state in (State.RESTARTING, State.READY, State.FAILED):
        console.print(_line(status))


def welcome(console: Console, plan: Plan, took_s: float, memory_bytes: int) -> None:
    """The addresses of a suite that is ready, and a first request to try."""
    lines = [f"API        [bold]{plan.api_url}/v1[/]"] if plan.runs_control else []
    if plan.dashboard_url:
        lines.append(f"Dashboard  [bold]{plan.dashboard_url}[/]")
    lines.append(f"Instances  {', '.join(plan.instance_ids) or 'on other hosts'}")
    lines.append(f"Memory     {memory_bytes / 2**30:.2f} GiB, all processes")
    if plan.runs_control:
        lines += ["", "Try it     " + _example(plan).replace("\n", "\n             ")]
    title = f"Polyphase serves {plan.model}: ready after {took_s:.1f} s"
    text = "\n".join(lines)
    console.print(Panel(text, title=title, title_align="left", border_style="green", expand=False))
    console.print("Ctrl-C stops everything. In another shell: polyphase status, top, logs NAME, --help")


def late(console: Console, names: Sequence[str]) -> None:
    """A warning about instances whose start exceeds the time limit while others serve."""
    if names:
        are = "is" if len(names) == 1 else "are"
        console.print(
            f"[yellow]{', '.join(names)} {are} not ready yet[/] and {are} being restarted; the others serve. "
            "`launcher: {start_s: …}` in the cluster file raises the time limit."
        )


def _example(plan: Plan) -> str:
    body = f'{{"model": "{plan.model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    key = " -H 'Authorization: Bearer <your API key>'" if plan.api_keys else ""
    return f"curl {plan.api_url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\\n-d '{body}'"


def _line(status: Status) -> str:
    mark, style = _MARKS[status.state]
    words = {
        State.READY: f"ready after {status.took_s:.1f} s (process {status.pid})",
        State.RESTARTING: status.note,
        State.FAILED: f"failed: {status.note}",
    }.get(status.state, status.state.value)
    return f"[{style}]{mark}[/] {status.name}: {words}"


def _seconds(status: Status) -> str:
    if status.state is State.STARTING:
        return f"{time.monotonic() - status.since_s:.0f}"
    return f"{status.took_s:.1f}" if status.took_s else ""
