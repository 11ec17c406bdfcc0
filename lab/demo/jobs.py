"""What the cluster recorded of requests: rows of the status table and timelines, found by the client's request id."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from services.launcher.suite import Suite, until
from shared.domain.job import Phase
from shared.domain.kv import TransferOutcome
from shared.errors import DeadlineExceeded, NotFound

FINAL_S = 10.0
_FINAL = [phase.value for phase in Phase if phase.final]


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job, as its scheduler knows it."""

    row: dict[str, Any]
    timeline: dict[str, Any]

    @property
    def split(self) -> int:
        """Prompt tokens that the prefill instance computed."""
        return int(self.row["split"])

    @property
    def outcomes(self) -> list[str]:
        """How each of its KV imports ended."""
        return [str(transfer["outcome"]) for transfer in self.timeline["transfers"]]

    @property
    def pulled(self) -> bool:
        """Whether it had one import only, which was pulled whole."""
        return self.outcomes == [TransferOutcome.PULLED.value]

    @property
    def attempts(self) -> int:
        """How often it was placed."""
        return max((int(span["attempt"]) for span in self.timeline["spans"]), default=0)


async def find_row(suite: Suite, request_id: str) -> dict[str, Any]:
    """The newest row of a request. Raises NotFound."""
    for scheduler in suite.schedulers():
        async with scheduler:
            for row in await scheduler.requests(limit=2_000):
                if request_id in row["job_id"]:
                    return row
    raise NotFound(f"no scheduler knows of {request_id}")


async def records(suite: Suite, request_ids: Sequence[str], timeout_s: float = FINAL_S) -> list[JobRecord]:
    """The finished jobs of these requests, in their order. Raises DeadlineExceeded when some do not show up."""
    found = await records_of_begun(suite, request_ids, timeout_s)
    if len(found) < len(request_ids):
        raise DeadlineExceeded(f"waited {timeout_s:g} s for the records of {len(request_ids)} jobs")
    return found


async def records_of_begun(suite: Suite, request_ids: Sequence[str], timeout_s: float = FINAL_S) -> list[JobRecord]:
    """The same of those that have one by then: a client may leave before the gateway has begun its job."""
    wanted = set(request_ids)
    found: dict[str, JobRecord] = {}

    async def all_there() -> bool:
        for scheduler in suite.schedulers():
            async with scheduler:
                for row in await scheduler.requests(limit=5_000):
                    name = next((one for one in wanted - found.keys() if one in row["job_id"]), None)
                    if name is not None and row["phase"] in _FINAL:
                        found[name] = JobRecord(row, await scheduler.timeline(row["job_id"]))
        return wanted <= found.keys()

    with suppress(DeadlineExceeded):
        await until(all_there, timeout_s, f"the records of {len(wanted)} jobs")
    return [found[name] for name in request_ids if name in found]
