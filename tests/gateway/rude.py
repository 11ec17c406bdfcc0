"""`python -m tests.gateway.rude NAME ADDRESS`: a worker in a process of its own, which can be killed and frozen."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from shared.wire.sockets import Sockets
from tests.gateway.worker import Worker
from tests.ports import free_address


class RudeWorker(Worker):
    """The process, in the place of a worker of this one."""

    process: asyncio.subprocess.Process

    async def start(self) -> None:
        """Returns when it listens."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.gateway.rude", self.name, self.address, stdout=asyncio.subprocess.PIPE
        )
        assert self.process.stdout is not None
        async with asyncio.timeout(30):
            assert await self.process.stdout.readline() == b"ready\n"

    async def stop(self) -> None:
        """However it is."""
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def rude_worker(name: str, sockets: Sockets) -> AsyncIterator[RudeWorker]:
    worker = RudeWorker(name, sockets, free_address())
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()


async def _work(name: str, address: str) -> None:
    worker = Worker(name, Sockets(), address)
    worker.before_token = lambda _: asyncio.sleep(0.05)
    await worker.start()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_work(*sys.argv[1:]))
