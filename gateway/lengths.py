"""Asks the predictor for the length of an answer, beside placement and prefill, and hardly ever waits for it."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import Counter

from gateway.settings import GatewaySettings
from shared.domain.job import LengthPrediction, ends_of
from shared.errors import DeadlineExceeded, PolyphaseError
from shared.runtime.logs import get_log
from shared.wire.messages import PredictRequest
from shared.wire.methods import PREDICT
from shared.wire.rpc_clients import RpcClients

log = get_log(__name__)
MAX_CALLS = 64  # under way at once: the predictor takes one after the other
_KNOWN_ANYWAY = "observed"  # its answers rest on finished requests, from which schedulers learn lengths themselves
Call = asyncio.Task[LengthPrediction | None]
Take = Callable[[LengthPrediction], None]


class Asked:
    """A prediction that may come, or may not."""

    def __init__(self, call: Call | None = None) -> None:
        self._call = call

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
    """Each call ends within `predict_timeout_s`; without a predictor's address nobody is asked.

    Placement waits for an answer at most `predict_wait_s`, and only where it pays: while a classifier answers, and the
    last answer was so quick.
    """

    def __init__(self, clients: RpcClients, settings: GatewaySettings, outcomes: Counter) -> None:
        self._clients = clients
        self._address = settings.predictor
        self._wait_s = settings.predict_wait_s
        self._timeout_s = settings.predict_timeout_s
        self._pays = False
        self._calls: set[Call] = set()
        self._outcomes = outcomes  # by label: "ok", "late", "skipped", or the code of an error

    def ask(self, prompt_token_ids: list[int], max_tokens: int) -> Asked:
        """Begin to ask; nobody answers without a predictor, with enough calls under way, or where one token is all."""
        if not self._address or max_tokens <= 1:
            return Asked()
        if len(self._calls) >= MAX_CALLS:
            self._outcomes.labels("skipped").inc()
            return Asked()
        request = PredictRequest(ends_of(prompt_token_ids), len(prompt_token_ids), max_tokens)
        call = asyncio.get_running_loop().create_task(self._predict(request))
        self._calls.add(call)
        call.add_done_callback(self._ended)
        return Asked(call)

    async def soon(self, asked: Asked) -> None:
        """Wait a moment for the answer, if it is likely to come."""
        if self._pays and not await asked.within(self._wait_s):
            self._pays = False

    async def close(self) -> None:
        """Give up what is under way."""
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _ended(self, call: Call) -> None:
        self._calls.discard(call)
        if not call.cancelled() and (error := call.exception()) is not None:
            log.error("asking for a length failed", exc_info=error)

    async def _predict(self, request: PredictRequest) -> LengthPrediction | None:
        clock = asyncio.get_running_loop().time
        started_s, found = clock(), None
        try:
            found = await self._clients.to(self._address).call(PREDICT, request, timeout_s=self._timeout_s)
            outcome = "ok"
        except DeadlineExceeded:
            outcome = "late"
        except PolyphaseError as error:
            outcome = error.code
        quick = clock() - started_s <= self._wait_s
        self._pays = found is not None and found.source != _KNOWN_ANYWAY and quick
        self._outcomes.labels(outcome).inc()
        return found


def _taken(asked: Asked, take: Take) -> None:
    if (found := asked.prediction) is not None:
        take(found)
