"""Asks the predictor for the output length, beside the prefill, and never holds it up."""

import asyncio
from collections import Counter
from types import TracebackType
from typing import Self

import httpx
import msgspec

from shared.domain.job import LengthPrediction
from shared.runtime.logs import get_log

log = get_log(__name__)
_LAST_TOKENS = 256  # the predictor looks at no more of a prompt, and these are all that is coded and sent
_MAX_CALLS = 8  # under way at once: the predictor takes one after the other, and each costs this loop a millisecond


class Asked:
    """A prediction that may come, or may not."""

    def __init__(self, call: "asyncio.Task[LengthPrediction | None] | None" = None) -> None:
        self._call = call

    @property
    def prediction(self) -> LengthPrediction | None:
        """The answer, if it is here by now."""
        call = self._call
        if call is None or not call.done() or call.cancelled() or call.exception() is not None:
            return None
        return call.result()

    def cancel(self) -> None:
        """An answer that comes later is of no use."""
        if self._call is not None:
            self._call.cancel()


class LengthClient:
    """Each call ends within `timeout_s`, connecting included; use as an async context manager.

    Few calls are under way at once, whatever the number of jobs: the others go without a prediction.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._calls: set[asyncio.Task[LengthPrediction | None]] = set()
        self.outcomes: Counter[str] = Counter()  # "ok", "late", "failed", "skipped"

    async def __aenter__(self) -> Self:
        self._http = httpx.AsyncClient(base_url=self._url, timeout=self._timeout_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._http.aclose()

    def ask(self, prompt_token_ids: list[int], max_tokens: int) -> Asked:
        """Begin to ask; without a predictor, or with enough calls under way, there will be no answer."""
        if not self._url:
            return Asked()
        if len(self._calls) >= _MAX_CALLS:
            self.outcomes["skipped"] += 1
            return Asked()
        call = asyncio.get_running_loop().create_task(self._predict(prompt_token_ids, max_tokens))
        self._calls.add(call)
        call.add_done_callback(self._ended)
        return Asked(call)

    def _ended(self, call: "asyncio.Task[LengthPrediction | None]") -> None:
        self._calls.discard(call)
        if not call.cancelled() and (error := call.exception()) is not None:
            self.outcomes["failed"] += 1
            log.error("asking for a length failed", exc_info=error)

    async def _predict(self, prompt_token_ids: list[int], max_tokens: int) -> LengthPrediction | None:
        body = {
            "prompt_token_ids": prompt_token_ids[-_LAST_TOKENS:],
            "prompt_tokens": len(prompt_token_ids),
            "max_tokens": max_tokens,
            "timeout_ms": self._timeout_s * 1e3,
        }
        try:
            async with asyncio.timeout(self._timeout_s):  # httpx bounds each step alone
                response = await self._http.post("/v1/predict", json=body)
            response.raise_for_status()
            prediction = msgspec.convert(response.json(), LengthPrediction)
        except (TimeoutError, httpx.TimeoutException):
            self.outcomes["late"] += 1
            return None
        except (httpx.HTTPError, ValueError, msgspec.MsgspecError):
            self.outcomes["failed"] += 1
            return None
        self.outcomes["ok"] += 1
        return prediction
