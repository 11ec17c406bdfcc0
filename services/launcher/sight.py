"""What can be seen of a running suite: from its monitor, and where that is away from everybody else."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from services.launcher import state_file
from services.launcher.health import HttpHealth
from services.launcher.state_file import RunningProcess, SuiteState
from shared.domain.job import Phase
from shared.domain.verdict import Verdict
from shared.errors import DeadlineExceeded, NotFound, PolyphaseError, Unavailable
from shared.wire.clients.http import JsonClient
from shared.wire.clients.monitor import MonitorClient
from shared.wire.clients.scheduler import SchedulerAdmin

ASK_S = 2.0  # the longest that one process is waited for
_JOBS = 10_000  # of a scheduler's memory that are counted


@dataclass(frozen=True, slots=True)
class Seen:
    """A suite at one moment (unix seconds). `fault`: why the monitor says nothing; then it is from the others.

    instances: as the monitor lists them; where it is away, those of this host, as each says of itself. health: by
    process, what is wrong with it, empty if nothing. jobs: under way by phase, as the schedulers know; None where that
    was not asked for.
    """

    time_s: float
    state: SuiteState | None = None
    fault: str = ""
    verdict: Verdict | None = None
    instances: Sequence[Mapping[str, Any]] = ()
    slo: Sequence[Mapping[str, Any]] = ()
    rates: Mapping[str, float | None] = field(default_factory=dict)
    health: Mapping[str, str] = field(default_factory=dict)
    jobs: Mapping[str, int] | None = None

    def as_json(self) -> dict[str, Any]:
        """For programs. What nobody knows is null."""
        away = bool(self.fault)
        answer: dict[str, Any] = {
            "instances": None if away and not self.instances else list(self.instances),
            "slo": None if away else list(self.slo),
            "verdict": None if self.verdict is None else msgspec.to_builtins(self.verdict),
        }
        if away:
            answer |= {"monitor_fault": self.fault, "jobs": None if self.jobs is None else dict(self.jobs)}
        if self.state is None:
            return answer
        told = {"api_url": self.state.api_url, "dashboard_url": self.state.dashboard_url}
        return {**told, "processes": [self._process(each) for each in self.state.processes], **answer}

    def _process(self, process: RunningProcess) -> dict[str, Any]:
        told = {key: getattr(process, key) for key in ("name", "pid", "state", "restarts", "fault")}
        return told | ({"health": self.health[process.name] or "ok"} if process.name in self.health else {})


async def look(data_dir: Path, given: str = "", *, rates: bool = False) -> Seen:
    """All that can be seen now. Raises NotFound where no suite runs, the monitor's error where nobody else is known."""
    state = _state_of(data_dir, given)
    url = given or (state.monitor_url if state is not None else "")
    try:
        return await _by_monitor(url, state, rates)
    except (Unavailable, DeadlineExceeded) as error:
        if state is None:
            raise
        return await _without_monitor(state, error.message)


def _state_of(data_dir: Path, given: str) -> SuiteState | None:
    """The suite of the data folder, unless another one's monitor is given. Raises NotFound where there is neither."""
    try:
        state = state_file.read(data_dir)
    except NotFound:
        if given:
            return None
        raise
    return state if given in ("", state.monitor_url) else None


async def _by_monitor(url: str, state: SuiteState | None, rates: bool) -> Seen:
    async with MonitorClient(url) as monitor:
        asked = [monitor.call("GET", path) for path in ("/verdict", "/instances", "/slo")]
        verdict, instances, slo = await asyncio.gather(*asked)
        found = await _rates(monitor) if rates else {}
    return Seen(time.time(), state, "", msgspec.convert(verdict, Verdict), instances, slo, found)


async def _rates(monitor: JsonClient) -> dict[str, float | None]:
    """The newest of each series of the last minutes."""
    answer = await monitor.call("GET", "/history", params={"minutes": 5, "points": 60})
    series: Mapping[str, Sequence[float | None]] = answer["series"]
    return {
        name: next((each for each in reversed(values) if each is not None), None) for name, values in series.items()
    }


async def _without_monitor(state: SuiteState, fault: str) -> Seen:
    """What the launcher's state file says, and what its processes do when they are asked one by one."""
    async with httpx.AsyncClient() as http:
        known = [process for process in state.processes if process.url]
        instances = [process for process in known if process.name in state.instance_ids]
        health, selves, jobs = await asyncio.gather(
            asyncio.gather(*(_health(process.url) for process in known)),
            asyncio.gather(*(_self(http, process) for process in instances)),
            _jobs(state.scheduler_urls),
        )
    said = dict(zip((process.name for process in known), health, strict=True))
    return Seen(time.time(), state, fault, instances=selves, health=said, jobs=jobs)


async def _health(url: str) -> str:
    return await HttpHealth(url).ask(ASK_S)


async def _self(http: httpx.AsyncClient, process: RunningProcess) -> dict[str, Any]:
    """An instance as the monitor would list it, from its own words."""
    nothing = {"instance_id": process.name, "role": "", "state": "dead", "info": None, "load": None}
    try:
        response = await http.get(f"{process.url.removesuffix('/health')}/instance", timeout=ASK_S)
        said = response.raise_for_status().json()
    except httpx.TimeoutException:
        return nothing | {"state": "unresponsive"}
    except (httpx.HTTPError, ValueError):
        return nothing | {"state": "starting" if process.state == "starting" else "dead"}
    state = "draining" if said["draining"] else "ready"
    return nothing | {"role": said["role"], "state": state, "info": said["info"], "load": said["load"]}


async def _jobs(urls: Sequence[str]) -> dict[str, int] | None:
    """Jobs that have not ended, by phase, over all schedulers; None where none answers."""
    counts: Counter[str] = Counter()
    answered = False
    for rows in await asyncio.gather(*(_rows(url) for url in urls)):
        if rows is not None:
            answered = True
            counts += Counter(str(row["phase"]) for row in rows if not Phase(row["phase"]).final)
    return dict(counts) if answered else None


async def _rows(url: str) -> list[dict[str, Any]] | None:
    async with SchedulerAdmin(url) as scheduler:
        try:
            return await scheduler.requests(limit=_JOBS)
        except PolyphaseError:
            return None
