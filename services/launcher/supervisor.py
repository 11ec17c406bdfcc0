"""Keeps processes running: starts them a few at a time, restarts what died or hung, stops them all."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from services.launcher import child
from services.launcher.fork_client import ForkServer
from services.launcher.health import HttpHealth
from services.launcher.keeper import Changed, Keeper, Starter, StartFailed, Status
from services.launcher.process import stop_all
from services.launcher.spec import ProcessSpec
from services.launcher.watch import Limits
from shared.errors import NotFound, Unavailable

Result = TypeVar("Result")


class Supervisor:
    """All processes of this host. Made by `supervising`."""

    def __init__(
        self, specs: Sequence[ProcessSpec], logs: Path, changed: Changed, limits: Limits, forks: ForkServer | None
    ) -> None:
        self._forks = forks
        self._stop_s = limits.stop_s
        starter = Starter(asyncio.Semaphore(limits.at_once), forks)
        self._keepers: dict[str, Keeper] = {}
        for spec in specs:
            health = HttpHealth(spec.health_url) if spec.health_url else None
            self._keepers[spec.name] = Keeper(spec, logs, changed, limits, starter, health)
        if forks is not None:
            keeper = Keeper(forks.spec, logs, changed, limits, starter, forks, vital=False)
            self._keepers[forks.spec.name] = keeper
        self._keeping = asyncio.create_task(self._keep_all())

    @property
    def statuses(self) -> tuple[Status, ...]:
        """Every process, in the order of the plan; then the fork server."""
        return tuple(keeper.status for keeper in self._keepers.values())

    @property
    def late(self) -> tuple[str, ...]:
        """Those that the suite serves without: they took too long, and have not been ready yet."""
        return tuple(each.status.name for each in self._keepers.values() if _is_late(each))

    async def started(self) -> None:
        """Wait until every process has become healthy once, or is late where others serve. Raises StartFailed."""
        await self.during(self._all_ready())

    async def during(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do `work` while the processes are kept running; should that fail, `work` ends, the cause is raised."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, self._keeping], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                _raise_first(self._keeping)
            return await task
        finally:
            task.cancel()

    async def restart(self, name: str, env: dict[str, str] | None = None) -> None:
        """Kill one and start it at once, with these further variables. Raises NotFound."""
        keeper = self._keepers.get(name)
        if keeper is None:
            raise NotFound(f"no process {name!r}; known: {', '.join(self._keepers)}")
        await keeper.restart(env or {})

    async def close(self) -> None:
        """Stop every process. Raises Unavailable that names those that not even SIGKILL ended."""
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        left = await stop_all([k.child for k in self._keepers.values() if k.child is not None], self._stop_s)
        for keeper in self._keepers.values():
            keeper.stopped()
        if left:
            raise Unavailable(f"processes {', '.join(map(str, left))} hang in the kernel: SIGKILL does not end them")

    async def _all_ready(self) -> None:
        for keeper in self._keepers.values():
            if keeper.vital:
                await keeper.settled.wait()
        replaceable = [keeper for keeper in self._keepers.values() if keeper.may_be_late]
        late = [keeper for keeper in replaceable if _is_late(keeper)]
        if late and len(late) == len(replaceable):  # nobody serves
            raise StartFailed(late[0].failure(late[0].status.fault))

    async def _keep_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for keeper in self._keepers.values():
                group.create_task(keeper.keep(), name=f"keep {keeper.status.name}")


@asynccontextmanager
async def supervising(
    specs: Sequence[ProcessSpec],
    logs: Path,
    changed: Changed,
    limits: Limits | None = None,
    fork_env: dict[str, str] | None = None,
    preload: Sequence[str] = (),
) -> AsyncIterator[Supervisor]:
    """Run the processes for the length of the block, and stop every one at its end, however it ends.

    With `fork_env`, those that have a module are forked from a process that has imported `preload`.
    """
    child.adopt_orphans()  # what a dead child leaves behind is ours, and ends with it
    forks = ForkServer(fork_env, preload) if fork_env is not None else None
    supervisor = Supervisor(specs, logs, changed, limits or Limits(), forks)
    try:
        yield supervisor
    finally:
        await supervisor.close()


def _is_late(keeper: Keeper) -> bool:
    return keeper.may_be_late and keeper.settled.is_set() and not keeper.was_ready.is_set()


def _raise_first(task: asyncio.Task[None]) -> NoReturn:
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    raise error or RuntimeError("the supervisor ended by itself")
