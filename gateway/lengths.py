"""Requests the length of an answer from a predictor: a replica beside placement and prefill or before them, or the
predictor beside the request's prefill instance once that is chosen.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import Counter

from gateway.settings import GatewaySettings
from shared.domain.job import LengthPrediction, ends_of
from shared.errors import DeadlineExceeded, PolyphaseError
from shared.runtime.logs import get_log
from shared.wire.messages import PREDICT, PredictRequest
from shared.wire.rpc_client import RpcClients

# MERGED replicas.py
# Whom to ask next of several servers that are alike: one that is there and has the fewest calls under way.


ASIDE_S = 1.0  # how long one that failed is left aside


@dataclass(slots=True, eq=False)
class Replica:
    """One of them, as its caller sees it."""

    address: str
    calls: int = 0  # under way
    latest: int = 0  # the number of the latest call to it
    aside_until_s: float = float("-inf")


class Replicas:
    """Times are `clock`'s, in seconds; `connected` says of an address whether anybody is there."""

    def __init__(self, addresses: Iterable[str], connected: Callable[[str], bool], clock: Callable[[], float]) -> None:
        self._all = [Replica(address) for address in addresses]
        self._connected = connected
        self._clock = clock
        self._calls = 0

    def __bool__(self) -> bool:
        return bool(self._all)

    def first(self) -> Replica:
        """The one to ask: one that is not there, or has just failed, only where no other is better."""
        now_s = self._clock()
        return min(
            self._all, key=lambda one: (not self._connected(one.address), now_s < one.aside_until_s, *_load(one))
        )

    def other(self, than: Replica) -> Replica | None:
        """Another one that is there and has not just failed, if any."""
        now_s = self._clock()
        there = (one for one in self._all if self._connected(one.address) and now_s >= one.aside_until_s)
        return min((one for one in there if one is not than), key=_load, default=None)

    @contextmanager
    def calling(self, replica: Replica) -> Iterator[None]:
        """A call to it, for the block's length; an error of ours says that it failed."""
        self._calls += 1
        replica.latest = self._calls
        replica.calls += 1
        try:
            yield
        except PolyphaseError:
            replica.aside_until_s = self._clock() + ASIDE_S
            raise
        finally:
            replica.calls -= 1


def _load(replica: Replica) -> tuple[int, int]:
    """Among those with as many calls, whoever was asked longest ago."""
    return replica.calls, replica.latest


log = get_log(__name__)
MAX_CALLS = 256  # under way at once; a predictor takes those together that wait
_KNOWN_ANYWAY = "observed"  # its answers rest on finished requests, from which schedulers learn lengths themselves
Call = asyncio.Task[LengthPrediction | None]
Take = Callable[[LengthPrediction], None]


class Asked:
    """A prediction that may come, or may not."""

    def __init__(self, call: Call | None = None) -> None:
        self._call = call

    @property
    def begun(self) -> bool:
        """Whether anybody was asked."""
        return self._call is not None

    @property
    def prediction(self) -> LengthPrediction | None:
        """The answer, if it is here by now."""
        call = self._call
        if call is None or not call.done() or call.cancelled() or call.exception() is not None:
            return None
        return call.result()

    async def within(self, wait_s: float) -> bool:
        """Wait for the answer at most so long; whether it has come, or there is none to wait for."""
        if self._call is None or self._call.done():
            return True
        done, _ = await asyncio.wait((self._call,), timeout=wait_s)
        return bool(done)

    def then(self, take: Take) -> None:
        """Hand the answer to `take` when it comes."""
        if self._call is not None:
            self._call.add_done_callback(lambda _: _taken(self, take))

    @contextmanager
    def meanwhile(self, take: Take) -> Iterator[None]:
        """Hand an answer to `take` if it comes within the block."""
        inside = self.prediction is None

        def taken(found: LengthPrediction) -> None:
            if inside:
                take(found)

        if inside:
            self.then(taken)
        try:
            yield
        finally:
            inside = False

    def cancel(self) -> None:
        """An answer that comes later is of no use."""
        if self._call is not None:
            self._call.cancel()


class LengthClient:
    """Each question ends within `predict_timeout_s`, whoever is asked; without an address, or `off`, nobody is.

    `parallel`: placement waits for an answer at most `predict_wait_s`, and only where it pays: while a classifier
    answers, and the last answer was so quick. `sequential`: it waits until the question has ended, but never for more
    than half of what is left to the job's TTFT target (the two modes of TetriInfer, section 3.3.2).

    With predictors beside instances placement has no length: the one beside the prefill instance gets the request as
    the prompt is sent there, and in `sequential` before that (TetriInfer 3.3.2). No other one answers in its place.
    """

    def __init__(self, clients: RpcClients, settings: GatewaySettings, outcomes: Counter) -> None:
        self._clients = clients
        self._clock = asyncio.get_running_loop().time
        addresses = () if settings.predict == "off" else settings.predictors
        self._replicas = self._replicas_at(addresses)
        beside = {} if settings.predict == "off" else settings.predictors_beside
        self._beside = {instance_id: self._replicas_at((address,)) for instance_id, address in beside.items()}
        for address in (*addresses, *beside.values()):
            clients.to(address)  # connect now, not at the first question
        self._sequential = settings.predict == "sequential"
        self._wait_s = settings.predict_wait_s
        self._timeout_s = settings.predict_timeout_s
        self._pays = False
        self._calls: set[Call] = set()
        self._outcomes = outcomes  # by label: "ok", "late", "skipped", or the code of an error

    @property
    def beside(self) -> bool:
        """Whether predictors stand beside instances."""
        return bool(self._beside)

    def ask(self, prompt_token_ids: list[int], max_tokens: int, instance_id: str = "") -> Asked:
        """Send the request, to the predictor beside `instance_id` where predictors stand beside instances. There is no
        answer without a predictor, with enough calls under way, or where one token is all.
        """
        replicas = self._beside.get(instance_id) if self._beside else self._replicas
        if not replicas or max_tokens <= 1:
            return Asked()
        if len(self._calls) >= MAX_CALLS:
            self._outcomes.labels("skipped").inc()
            return Asked()
        request = PredictRequest(ends_of(prompt_token_ids), len(prompt_token_ids), max_tokens)
        call = asyncio.get_running_loop().create_task(self._predict(request, replicas))
        self._calls.add(call)
        call.add_done_callback(self._ended)
        return Asked(call)

    async def soon(self, asked: Asked, ttft_left_s: float) -> None:
        """Wait for the answer: as long as it may take, or only a moment and if it is likely to come."""
        if self._sequential:
            await asked.within(min(self._timeout_s, max(0.0, ttft_left_s / 2)))
        elif self._pays and not await asked.within(self._wait_s):
            self._pays = False

    async def before_prefill(self, asked: Asked, ttft_left_s: float) -> None:
        """Wait for the answer of the predictor beside the prefill instance; in `parallel` not at all."""
        if self._sequential:
            await self.soon(asked, ttft_left_s)

    async def close(self) -> None:
        """Give up what is under way."""
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _ended(self, call: Call) -> None:
        self._calls.discard(call)
        if not call.cancelled() and (error := call.exception()) is not None:
            log.error("asking for a length failed", exc_info=error)

    def _replicas_at(self, addresses: tuple[str, ...]) -> Replicas:
        return Replicas(addresses, lambda address: self._clients.to(address).connected, self._clock)

    async def _predict(self, request: PredictRequest, replicas: Replicas) -> LengthPrediction | None:
        started_s, found = self._clock(), None
        try:
            found = await self._by_one_or_another(request, replicas, started_s + self._timeout_s)
            outcome = "ok"
        except DeadlineExceeded:
            outcome = "late"
        except PolyphaseError as error:
            outcome = error.code
        quick = self._clock() - started_s <= self._wait_s
        self._pays = found is not None and found.source != _KNOWN_ANYWAY and quick
        self._outcomes.labels(outcome).inc()
        return found

    async def _by_one_or_another(self, request: PredictRequest, replicas: Replicas, until_s: float) -> LengthPrediction:
        """One replica's answer; where that cannot answer, another's. Raises what the last one said."""
        first = replicas.first()
        try:
            return await self._by(replicas, first, request, until_s)
        except PolyphaseError as error:
            if not error.retriable or (other := replicas.other(first)) is None:
                raise
        return await self._by(replicas, other, request, until_s)

    async def _by(
        self, replicas: Replicas, replica: Replica, request: PredictRequest, until_s: float
    ) -> LengthPrediction:
        with replicas.calling(replica):
            client = self._clients.to(replica.address)
            return await client.call(PREDICT, request, timeout_s=until_s - self._clock())


def _taken(asked: Asked, take: Take) -> None:
    if (found := asked.prediction) is not None:
        take(found)
