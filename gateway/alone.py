"""`python -m gateway.alone`: the API layer without a cluster, for measurements of what the cluster adds to it.

Tokens come from a timer in this process, one every STEP_S: nothing is placed, sent or received.
"""

import asyncio
import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from gateway.app import run
from gateway.job import Job
from gateway.settings import GatewaySettings
from shared.runtime.logs import configure_logs
from shared.wire.messages import TokenStep

STEP_S = 0.025
_FIRST, _TOKENS = 300, 997


class TimerTokens:
    """Gives all jobs tokens from one timer, as the steps of an engine would."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._jobs: dict[Job, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, job: Job) -> None:
        """Give the job its first token at once, and the others with the timer."""
        loop = asyncio.get_running_loop()
        ended = self._jobs[job] = loop.create_future()
        self._advance(job)
        if self._timer is None:
            self._timer = loop.call_later(self._step_s, self._tick)
        try:
            await ended
        finally:
            self._jobs.pop(job, None)

    def _tick(self) -> None:
        self._timer = None
        for job in list(self._jobs):
            self._advance(job)
        if self._jobs:
            self._timer = asyncio.get_running_loop().call_later(self._step_s, self._tick)

    def _advance(self, job: Job) -> None:
        ended = self._jobs[job]
        last = len(job.tokens) + 1 >= job.spec.max_tokens
        if not ended.done():
            job.accept(TokenStep([_FIRST + len(job.tokens) * 7919 % _TOKENS], "length" if last else ""))
            if last:
                ended.set_result(None)


def main() -> None:
    settings = GatewaySettings.load()
    configure_logs("gateway-alone", settings.log_level)
    run(settings, TimerTokens(STEP_S))


if __name__ == "__main__":
    main()
