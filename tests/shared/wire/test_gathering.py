"""State that may wait a moment for more of it: all of it comes, in order, and the process wakes less often."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.wire.broadcast import Publisher, Subscriber
from shared.wire.sockets import Sockets
from tests.ports import free_address
from tests.services.control_plane import until

GATHER_S = 0.05


class Heard:
    """What came, and in how many turns of the loop."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self.turns = 0
        self._in_turn = False

    def take(self, value: int) -> None:
        """One more."""
        self.values.append(value)
        if not self._in_turn:
            self._in_turn = True
            self.turns += 1
            asyncio.get_running_loop().call_soon(self._turned)

    def _turned(self) -> None:
        self._in_turn = False


@asynccontextmanager
async def pair(gather_s: float) -> AsyncIterator[tuple[Publisher, Heard]]:
    """A publisher whose first message has arrived."""
    sockets, address, heard = Sockets(), free_address(), Heard()
    subscriber = Subscriber(sockets, address, int, heard.take, gather_s)
    publisher = Publisher(sockets, address)
    try:
        while not heard.values:
            publisher.publish(-1)
            await asyncio.sleep(0.01)
        await asyncio.sleep(2 * gather_s)
        heard.values.clear()
        heard.turns = 0
        yield publisher, heard
    finally:
        publisher.close()
        subscriber.close()
        sockets.close()


async def test_all_come_in_order_and_share_wake_ups() -> None:
    async with pair(GATHER_S) as (publisher, heard):
        began = asyncio.get_running_loop().time()
        for number in range(400):  # more than one turn of the loop takes
            publisher.publish(number)
            if number % 4 == 0:
                await asyncio.sleep(0.002)
        await until(lambda: len(heard.values) == 400, "all are there")
        took = asyncio.get_running_loop().time() - began
    assert heard.values == list(range(400))
    assert heard.turns <= took / GATHER_S + 2 + 400 / 16  # where many come, a batch is enough


async def test_who_was_silent_is_heard_again_and_again() -> None:
    async with pair(GATHER_S) as (publisher, heard):
        for number in range(5):
            await asyncio.sleep(3 * GATHER_S)
            publisher.publish(number)
            await until(lambda number=number: heard.values[-1:] == [number], "it came")
    assert heard.values == list(range(5))


async def test_one_that_closes_while_it_waits() -> None:
    async with pair(GATHER_S) as (publisher, heard):
        publisher.publish(1)
        await until(lambda: heard.values == [1], "it came")
        publisher.publish(2)
    await asyncio.sleep(2 * GATHER_S)  # no timer touches the closed socket
    assert heard.values == [1]
