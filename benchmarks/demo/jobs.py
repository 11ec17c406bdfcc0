"""Records of requests in the cluster: rows of the status table and timelines, found by the client's request id."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from services.launcher.suite import Suite, until
from shared.domain.job import Phase
from shared.domain.kv import TransferOutcome
from shared.errors import DeadlineExceeded, NotFound
from shared.timeline import RequestTimeline

FINAL_S = 10.0  # the longest time until a job that has ended is recorded
_FINAL = [phase.value for phase in Phase if phase.final]


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job, as its scheduler knows it."""

    row: dict[str, Any]
    timeline: RequestTimeline

    @property
    def split(self) -> int:
        """Prompt tokens that the prefill instance computed."""
        return int(self.row["split"])

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


async def find_row(suite: Suite, request_id: str) -> dict[str, Any]:
    """The newest row of a request. Raises NotFound."""
    for scheduler in suite.schedulers():
        async with scheduler:
            for row in await scheduler.requests(limit=2_000):
                if request_id in row["job_id"]:
                    return row
    raise NotFound(f"no scheduler knows of {request_id}")


async def records(suite: Suite, request_ids: Sequence[str], timeout_s: float = FINAL_S) -> list[JobRecord]:
    """The ended jobs of these requests, in their order. Raises DeadlineExceeded when some do not show up."""
    found: dict[str, JobRecord] = {}

    async def all_there() -> bool:
        await _add_ended(suite, request_ids, found)
        return len(found) == len(request_ids)

    await until(all_there, timeout_s, f"the records of {len(request_ids)} jobs")
    return [found[request_id] for request_id in request_ids]


async def records_of(suite: Suite, request_ids: Sequence[str], count: int) -> list[JobRecord]:
    """The ended jobs of these requests once there are `count`: a client may leave before its job has begun.

    Returns those that there are after FINAL_S when they stay fewer.
    """
    found: dict[str, JobRecord] = {}

    async def enough() -> bool:
        await _add_ended(suite, request_ids, found)
        return len(found) >= count

    with suppress(DeadlineExceeded):
        await until(enough, FINAL_S, f"the records of {count} jobs")
    return list(found.values())


async def _add_ended(suite: Suite, request_ids: Sequence[str], found: dict[str, JobRecord]) -> None:
    missing = set(request_ids) - found.keys()
    for scheduler in suite.schedulers():
        async with scheduler:
            for row in await scheduler.requests(limit=5_000):
                name = next((one for one in missing - found.keys() if one in row["job_id"]), None)
                if name is not None and row["phase"] in _FINAL:
                    timeline = msgspec.convert(await scheduler.timeline(row["job_id"]), RequestTimeline)
                    found[name] = JobRecord(row, timeline)
