"""Who runs the instances of a suite that its launcher does not run itself."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from services.launcher.keeper import Changed, Status
from shared.errors import NotFound


class Elsewhere(Protocol):
    """The instances, as the launcher shows them."""

    @property
    def statuses(self) -> tuple[Status, ...]:
        """Of each."""
        ...

    async def started(self, within_s: float) -> tuple[str, ...]:
        """Wait until they run; the names of those that the suite is to wait for. Raises Unavailable."""
        ...

    async def kept(self) -> None:
        """Never ends, but with the error that ended the care for them."""
        ...

    def node_of(self, name: str) -> str:
        """Where an instance is, in the words of who runs it. Raises NotFound."""
        ...


Running = Callable[[Changed], AbstractAsyncContextManager[Elsewhere]]


class Nowhere:
    """All of them are processes of this launcher."""

    statuses: tuple[Status, ...] = ()

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    async def started(self, within_s: float) -> tuple[str, ...]:
        """At once."""
        return self._names

    async def kept(self) -> None:
        """Never ends."""
        await asyncio.Event().wait()

    def node_of(self, name: str) -> str:
        """Raises NotFound."""
        raise NotFound(f"{name!r} does not run elsewhere")


def nowhere(names: tuple[str, ...]) -> Running:
    """For a suite whose instances are processes of this launcher."""

    @asynccontextmanager
    async def running(_: Changed) -> AsyncIterator[Elsewhere]:
        yield Nowhere(names)

    return running
