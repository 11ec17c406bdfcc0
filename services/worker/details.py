"""What an instance tells of itself: its steps beside its models, what it has learned, the end of its log."""

import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request

from services.worker.engines.base import Engine
from services.worker.live_rates import LiveRates
from services.worker.prefixes.feed import PrefixFeed
from services.worker.telemetry import Telemetry
from shared.domain.prompt import BLOCK_TOKENS
from shared.domain.rates import StepRates
from shared.runtime.logs import LogTail
from shared.wire.messages import StepRecord

STEPS = 200
PACKAGES = ("polyphase", "vllm", "torch", "transformers", "pyzmq", "nixl")


class Details:
    """Put together when somebody asks; nothing here is on the way of a request."""

    def __init__(self, telemetry: Telemetry, rates: LiveRates, engine: Engine, prefixes: PrefixFeed) -> None:
        self._telemetry = telemetry
        self._rates = rates
        self._engine = engine
        self._prefixes = prefixes
        self._versions = {name: found for name in PACKAGES if (found := _version(name))}

    def describe(self) -> dict[str, Any]:
        """As JSON: seconds, tokens, bytes a second."""
        info, stats, rates = self._telemetry.info, self._engine.stats(), self._rates.current
        page = self._engine.steps.page(info.instance_id, info.generation, -1, STEPS)
        return {
            "instance_id": info.instance_id,
            "started_s": info.generation / 1e9,
            "uptime_s": max(0.0, time.time() - info.generation / 1e9),
            "versions": {"python": platform.python_version(), **self._versions},
            "steps": {"total": page.next, "newest": [self._step(one) for one in page.steps]},
            "rates": {"at_start": msgspec.to_builtins(self._rates.start), "learned": msgspec.to_builtins(rates.step)},
            "link": msgspec.to_builtins(rates.link),
            "codecs": msgspec.to_builtins(rates.codecs),
            "prefixes": {
                "blocks": len(self._prefixes.held.reachable.blocks),
                "block_tokens": BLOCK_TOKENS,
                "asked_tokens": stats.prompt_tokens,
                "hit_tokens": stats.hit_tokens,
            },
            "preemptions": stats.preemptions,
        }

    def _step(self, one: StepRecord) -> dict[str, Any]:
        tokens = sum(computed for computed, _ in one.prefill)
        return {
            "ended_s": one.ended_s,
            "seconds": one.seconds,
            "prefill_tokens": tokens,
            "decodes": one.decode_count,
            "context_tokens": one.decode_context_tokens,
            "expected_s": expected_s(self._rates.start, one),  # by the cost model, or the calibration
            "learned_s": expected_s(self._rates.step, one),
        }


def expected_s(rates: StepRates | None, step: StepRecord) -> float | None:
    """What a step should have taken; None where nothing is known."""
    if rates is None:
        return None
    form = rates.prefill if step.decode_count <= 0 else rates.mixed
    if not step.prefill:
        return rates.decode_s(step.decode_count, step.decode_context_tokens)
    chunks_s = sum(now * (form.token_s + form.position_s * (before + now / 2.0)) for now, before in step.prefill)
    decodes_s = form.sequence_s * step.decode_count + form.context_s * step.decode_context_tokens
    return form.fixed_s + chunks_s + (decodes_s if step.decode_count > 0 else 0.0)


def routes(details: Callable[[Request], Details], tail: LogTail) -> APIRouter:
    """`/details`, and `/log` with what `tail` has kept."""
    router = APIRouter()

    @router.get("/details")
    async def get_details(request: Request) -> dict[str, Any]:
        """What this instance knows of itself."""
        return details(request).describe()

    @router.get("/log")
    async def get_log_tail(lines: Annotated[int, Query(ge=1, le=2_000)] = 200) -> dict[str, list[str]]:
        """The last lines of its log, oldest first."""
        return {"lines": tail.newest(lines)}

    return router


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
