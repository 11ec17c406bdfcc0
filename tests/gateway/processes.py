"""Doubles in processes, which can be killed and frozen: an instance, a predictor, a user of the shared table.

They are forked from a process that has imported this module, so that each starts at once. `python -m
tests.gateway.processes` is a gateway whose output handler dies under a request.
"""

import asyncio
import multiprocessing
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gateway.admission import Admissions, RequestState
from gateway.auth import ApiKey, KeyRates
from gateway.settings import GatewaySettings
from gateway.table import SharedTable
from shared.errors import PolyphaseError
from shared.wire.messages import TokenStep
from shared.wire.sockets import Sockets
from tests.gateway.cluster import Predictor, Worker, forever
from tests.ports import free_address

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.gateway.processes"])


class Process:
    """`run(*arguments, connection)` in a process that has reported that it is ready."""

    def __init__(self, run: Callable[..., None], *arguments: Any) -> None:
        self.connection, other = _forks.Pipe()
        self.process = _forks.Process(target=run, args=(*arguments, other), daemon=True)
        self.process.start()
        other.close()
        self.ready = self.receive()

    def receive(self) -> Any:
        assert self.connection.poll(120)
        return self.connection.recv()

    def ask(self, *command: Any) -> Any:
        self.connection.send(command)
        return self.receive()

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process._popen is not None
        self.process._popen._send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextmanager
def processes(run: Callable[..., None], *arguments: tuple[Any, ...]) -> Iterator[list[Process]]:
    """A process for each tuple of arguments; killed at the end."""
    started: list[Process] = []
    try:
        for each in arguments:
            started.append(Process(run, *each))
        yield started
    finally:
        for process in started:
            process.kill()


class RemoteWorker(Worker):
    """Stands for the worker in a process."""

    process: Process


@asynccontextmanager
async def remote_worker(name: str, sockets: Sockets) -> AsyncIterator[RemoteWorker]:
    worker = RemoteWorker(name, sockets, free_address())
    with processes(run_worker, (name, worker.address)) as (worker.process,):
        yield worker


def run_worker(name: str, address: str, connection: Connection) -> None:
    async def serve() -> None:
        worker = Worker(name, Sockets(), address)
        worker.before_token = lambda _: asyncio.sleep(0.05)
        await worker.start()
        connection.send(True)
        await forever()

    asyncio.run(serve())


def run_predictor(address: str, source: str, connection: Connection) -> None:
    async def serve() -> None:
        async with Predictor(source, takes_s=0.02).serving(address):
            connection.send(True)
            await forever()

    asyncio.run(serve())


class TableUser:
    """Uses the shared table as a gateway does."""

    def __init__(self, connection: Connection, path: Path, number: int, max_jobs: int) -> None:
        settings = GatewaySettings(schedulers=("s",), model="m", max_queued_jobs=max_jobs, max_queued_tokens=1000)
        self.connection = connection
        self.table = SharedTable(path, number)
        self.admissions, self.rates = Admissions(settings, ("a", "b"), self.table), KeyRates(self.table)
        self.requests: list[RequestState] = []

    def counts(self) -> tuple[int, int]:
        return self.admissions.jobs, self.admissions.tokens

    def admit(self, caller: str) -> None:
        self.requests.append(self.admissions.for_class("default").admit(caller))

    def start_job(self, tokens: int) -> None:
        self.requests[-1].start_job(tokens)

    def use_rate(self) -> None:
        self.rates.check(ApiKey("a", "", requests_per_s=0.001, burst=40))

    def repeat(self, count: int, method: str, *arguments: Any) -> int:
        """How many of so many calls are not refused."""
        done = 0
        for _ in range(count):
            with suppress(PolyphaseError):
                getattr(self, method)(*arguments)
                done += 1
        return done

    def lock(self) -> None:
        with self.table.locked():
            self.connection.send("locked")
            self.connection.recv()


def use_table(path: Path, number: int, max_jobs: int, connection: Connection) -> None:
    """Call the methods whose names and arguments arrive. A reply is a result or the counts, or the error."""
    try:
        user = TableUser(connection, path, number, max_jobs)
        connection.send(True)
    except PolyphaseError as error:
        connection.send(error.message)
        return
    while True:
        method, *arguments = connection.recv()
        try:
            result = getattr(user, method)(*arguments)
            connection.send(user.counts() if result is None else result)
        except PolyphaseError as error:
            connection.send((error.message, error.retry_after_s))


async def die_under_a_request() -> None:
    import httpx

    from gateway.app import prepare_environment, running
    from gateway.auth import KeyRing
    from gateway.job import Job
    from tests.gateway.api import MODEL, listening

    class OneToken:
        async def run(self, job: Job) -> None:
            job.accept(TokenStep([300], "length"))

    prepare_environment()
    settings = GatewaySettings(schedulers=("tcp://127.0.0.1:1",), model=str(MODEL), served_model_name="demo")
    async with (
        running(settings, KeyRing(()), OneToken()) as edge,
        listening(edge) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
    ):

        async def die() -> None:
            raise RuntimeError("the fault of no request")

        edge.app.state.engine_client._core.get_output_async = die
        for _ in range(2):
            response = await client.post("/v1/completions", json={"model": "demo", "prompt": [1], "max_tokens": 1})
            print("answered", response.status_code, flush=True)
            await asyncio.sleep(0)


if __name__ == "__main__":
    asyncio.run(die_under_a_request())
