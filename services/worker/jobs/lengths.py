"""Asks the predictor for the output length, beside the prefill, and never holds it up."""

from collections import Counter
from types import TracebackType
from typing import Self

import httpx
import msgspec

from shared.domain.job import LengthPrediction

_LAST_TOKENS = 256  # the predictor cuts its input anyway


class LengthClient:
    """`predict` answers within `timeout_s` or not at all. Use as an async context manager."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self.outcomes: Counter[str] = Counter()  # "ok", "late", "failed"

    async def __aenter__(self) -> Self:
        self._http = httpx.AsyncClient(base_url=self._url, timeout=self._timeout_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def predict(self, prompt_token_ids: list[int], max_tokens: int) -> LengthPrediction | None:
        """The length bucket, or None when the predictor is absent, slow or broken."""
        if not self._url:
            return None
        body = {
            "prompt_token_ids": prompt_token_ids[-_LAST_TOKENS:],
            "prompt_tokens": len(prompt_token_ids),
            "max_tokens": max_tokens,
            "timeout_ms": self._timeout_s * 1e3,
        }
        try:
            response = await self._http.post("/v1/predict", json=body)
            response.raise_for_status()
            prediction = msgspec.convert(response.json(), LengthPrediction)
        except httpx.TimeoutException:
            self.outcomes["late"] += 1
            return None
        except (httpx.HTTPError, ValueError, msgspec.MsgspecError):
            self.outcomes["failed"] += 1
            return None
        self.outcomes["ok"] += 1
        return prediction
