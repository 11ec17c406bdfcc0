"""The records that the schedulers of a suite keep of jobs, found by the client's request id."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from services.launcher.suite import Suite, until
from shared.domain.job import Phase
from shared.domain.kv import TransferOutcome
from shared.errors import DeadlineExceeded, NotFound
from shared.timeline import RequestTimeline
from shared.wire.api.scheduler import RequestRow

_RECORDED_S = 30.0  # the longest time until a job that has ended is recorded


@dataclass(frozen=True, slots=True)
class JobRecord:
    row: RequestRow
    timeline: RequestTimeline

    @property
    def split(self) -> int:
        """Prompt tokens that the prefill instance computed."""
        return self.row.split

    @property
    def outcomes(self) -> list[str]:
        """How each of its KV imports ended."""
        return [transfer.outcome.value for transfer in self.timeline.transfers]

    @property
    def pulled(self) -> bool:
        """Whether it had a single import, which was pulled whole."""
        return self.outcomes == [TransferOutcome.PULLED.value]

    @property
    def attempts(self) -> int:
        return max((span.attempt for span in self.timeline.spans), default=0)


async def find_row(suite: Suite, request_id: str, phase: str = "") -> RequestRow:
    """The newest row of a request, if it is in that phase. Raises NotFound."""
    for scheduler in suite.schedulers():
        async with scheduler:
            for row in await scheduler.requests(limit=2_000, phase=phase):
                if request_id in row.job_id:
                    return row
    raise NotFound(f"no scheduler knows of {request_id}")


async def find_prompt(suite: Suite, prefill_instance: str) -> RequestRow | None:
    """A request whose prompt this instance is to compute; None where there is none."""
    for scheduler in suite.schedulers():
        async with scheduler:
            for row in await scheduler.requests(limit=2_000, phase=Phase.PREFILL):
                if row.prefill_instance == prefill_instance:
                    return row
    return None


async def records(suite: Suite, request_ids: Sequence[str], at_least: int | None = None) -> list[JobRecord]:
    """The ended jobs of these requests, in their order. Raises DeadlineExceeded when some do not show up.

    at_least: return once so many are recorded; if they stay fewer, return these: a client may leave before its job has
    begun.
    """
    found: dict[str, JobRecord] = {}

    async def recorded() -> bool:
        for scheduler in suite.schedulers():
            async with scheduler:
                for row in await scheduler.requests(limit=5_000):
                    new = (name for name in request_ids if name not in found and name in row.job_id)
                    name = next(new, None)
                    if name is not None and row.phase.final:
                        found[name] = JobRecord(row, await scheduler.timeline(row.job_id))
        return len(found) >= (len(request_ids) if at_least is None else at_least)

    with suppress(*(() if at_least is None else (DeadlineExceeded,))):
        await until(recorded, _RECORDED_S, f"the records of {len(request_ids)} jobs")
    return [found[request_id] for request_id in request_ids if request_id in found]
