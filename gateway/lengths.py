"""Requests a prediction of the output length from a predictor: one of several replicas, beside placement and prefill or
before them; or the predictor beside the prefill instance once that instance is chosen.
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

log = get_log(__name__)
MAX_CALLS = 256  # open at once; a predictor batches the calls that wait
ASIDE_S = 1.0  # how long a replica that failed is avoided
_KNOWN_TO_SCHEDULERS = "observed"  # a source that rests on finished requests, which schedulers know themselves
Call = asyncio.Task[LengthPrediction | None]
OnAnswer = Callable[[LengthPrediction], None]


class PendingPrediction:
    """A prediction that may arrive, or may not."""

    def __init__(self, call: Call | None = None) -> None:
        self._call = call

    @property
    def requested(self) -> bool:
        return self._call is not None

    @property
    def prediction(self) -> LengthPrediction | None:
        """The answer, if it has arrived."""
        call = self._call
        if call is None or not call.done() or call.cancelled() or call.exception() is not None:
            return None
        return call.result()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the answer at most so long; whether it has arrived, or there is none to wait for."""
        if self._call is None or self._call.done():
            return True
        done, _ = await asyncio.wait((self._call,), timeout=timeout_s)
        return bool(done)

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()


class LengthClient:
    """The client of the predictors. Each request ends within `predict_timeout_s`.

    In `parallel` mode placement waits for an answer at most `predict_wait_s`, and only while waiting pays: while a
    classifier answers, and the last answer was that quick. In `sequential` mode it waits for the end of the request,
    but at most for half of the time that is left to the job's TTFT target (the two modes of TetriInfer, section 3.3.2).

    With predictors beside instances placement has no prediction: the predictor beside the prefill instance gets the
    request as the prompt is sent there, and in `sequential` mode before that. No other predictor answers in its place.
    """

    def __init__(self, clients: RpcClients, settings: GatewaySettings, outcomes: Counter) -> None:
        """outcomes: labelled "ok", "late", "skipped", or with the code of an error."""
        self._clients = clients
        self._clock = asyncio.get_running_loop().time
        addresses = () if settings.predict == "off" else settings.predictors
        self._replicas = self._replicas_at(addresses)
        beside = {} if settings.predict == "off" else settings.predictors_beside
        self._beside = {instance_id: self._replicas_at((address,)) for instance_id, address in beside.items()}
        for address in (*addresses, *beside.values()):
            clients.to(address)  # connect now, and not at the first request
        self._sequential = settings.predict == "sequential"
        self._wait_s = settings.predict_wait_s
        self._timeout_s = settings.predict_timeout_s
        self._pays = False
        self._calls: set[Call] = set()
        self._outcomes = outcomes

    @property
    def beside(self) -> bool:
        """Whether predictors stand beside instances."""
        return bool(self._beside)

    def request(
        self, prompt_token_ids: list[int], max_tokens: int, on_answer: OnAnswer, instance_id: str = ""
    ) -> PendingPrediction:
        """Send a request, where predictors stand beside instances to the one beside `instance_id`. There is no answer
        without a predictor, with too many open calls, or where the answer has one token.
        """
        replicas = self._beside.get(instance_id) if self._beside else self._replicas
        if not replicas or max_tokens <= 1:
            return PendingPrediction()
        if len(self._calls) >= MAX_CALLS:
            self._outcomes.labels("skipped").inc()
            return PendingPrediction()
        request = PredictRequest(ends_of(prompt_token_ids), len(prompt_token_ids), max_tokens)
        call = asyncio.get_running_loop().create_task(self._predict(request, replicas))
        self._calls.add(call)
        call.add_done_callback(self._ended)
        pending = PendingPrediction(call)
        call.add_done_callback(lambda _: on_answer(found) if (found := pending.prediction) is not None else None)
        return pending

    async def wait_before_placement(self, pending: PendingPrediction, ttft_left_s: float) -> None:
        if self._sequential:
            await pending.wait(min(self._timeout_s, max(0.0, ttft_left_s / 2)))
        elif self._pays and not await pending.wait(self._wait_s):
            self._pays = False

    async def wait_before_prefill(self, pending: PendingPrediction, ttft_left_s: float) -> None:
        """Wait for the predictor beside the prefill instance; in `parallel` mode not at all."""
        if self._sequential:
            await self.wait_before_placement(pending, ttft_left_s)

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _ended(self, call: Call) -> None:
        self._calls.discard(call)
        if not call.cancelled() and (error := call.exception()) is not None:
            log.error("the request for a length failed", exc_info=error)

    def _replicas_at(self, addresses: tuple[str, ...]) -> "Replicas":
        return Replicas(addresses, lambda address: self._clients.to(address).connected, self._clock)

    async def _predict(self, request: PredictRequest, replicas: "Replicas") -> LengthPrediction | None:
        started_mono, found = self._clock(), None
        try:
            found = await self._call(request, replicas, started_mono + self._timeout_s)
            outcome = "ok"
        except DeadlineExceeded:
            outcome = "late"
        except PolyphaseError as error:
            outcome = error.code
        quick = self._clock() - started_mono <= self._wait_s
        self._pays = found is not None and found.source != _KNOWN_TO_SCHEDULERS and quick
        self._outcomes.labels(outcome).inc()
        return found

    async def _call(self, request: PredictRequest, replicas: "Replicas", until_mono: float) -> LengthPrediction:
        """The answer of a replica, or of a second one where the first fails. Raises the last error."""
        replica = replicas.first()
        try:
            return await self._call_replica(request, replicas, replica, until_mono)
        except PolyphaseError as error:
            if not error.retriable or (other := replicas.other(replica)) is None:
                raise
        return await self._call_replica(request, replicas, other, until_mono)

    async def _call_replica(
        self, request: PredictRequest, replicas: "Replicas", replica: "Replica", until_mono: float
    ) -> LengthPrediction:
        with replicas.calling(replica):
            client = self._clients.to(replica.address)
            return await client.call(PREDICT, request, timeout_s=until_mono - self._clock())


@dataclass(slots=True, eq=False)
class Replica:
    """One of several equal servers, as this client knows it."""

    address: str
    calls: int = 0  # open
    latest: int = 0  # the number of the latest call to it
    aside_until_mono: float = float("-inf")

    @property
    def load(self) -> tuple[int, int]:
        """Among replicas with equally many open calls, the one that was called longest ago comes first."""
        return self.calls, self.latest


class Replicas:
    """Chooses the reachable replica with the fewest open calls. Times are those of `clock`, in seconds."""

    def __init__(self, addresses: Iterable[str], connected: Callable[[str], bool], clock: Callable[[], float]) -> None:
        self._all = [Replica(address) for address in addresses]
        self._connected = connected
        self._clock = clock
        self._calls = 0

    def __bool__(self) -> bool:
        return bool(self._all)

    def first(self) -> Replica:
        """The best replica; one that is unreachable or has just failed only where no other is better."""
        now_mono = self._clock()
        return min(
            self._all, key=lambda one: (not self._connected(one.address), now_mono < one.aside_until_mono, one.load)
        )

    def other(self, than: Replica) -> Replica | None:
        """Another replica that is reachable and has not just failed, if any."""
        now_mono = self._clock()
        good = (one for one in self._all if self._connected(one.address) and now_mono >= one.aside_until_mono)
        return min((one for one in good if one is not than), key=lambda one: one.load, default=None)

    @contextmanager
    def calling(self, replica: Replica) -> Iterator[None]:
        """Counts the block as a call to the replica; a PolyphaseError from it means that the replica failed."""
        self._calls += 1
        replica.latest = self._calls
        replica.calls += 1
        try:
            yield
        except PolyphaseError:
            replica.aside_until_mono = self._clock() + ASIDE_S
            raise
        finally:
            replica.calls -= 1
