"""Client of the running suite that is measured.

`Target` has the addresses of its services and descriptions of its instances. `Traffic` sends requests of given lengths
at given times through the gateway, and measures the times that a client sees.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from services.launcher import cluster_keys
from services.launcher.suite import Suite, change_policies, until
from shared.domain.instance import InstanceState, Role
from shared.domain.job import Phase, Slo, itl_met
from shared.domain.route import PolicySpec
from shared.errors import InvalidRequest, NotFound, Unavailable
from shared.sim.measured import LiveInstance
from shared.timeline import RequestTimeline
from shared.wire.api.monitor import InstanceRow, PolicyChoice
from shared.wire.clients.http import WorkerAdmin
from shared.wire.clients.monitor import MonitorClient
from shared.wire.clients.scheduler import SchedulerAdmin
from tools.client import StreamFailed, completion_body, stream_completion

WHO = "polyphase calibrate"
_RECORDS_S = 15.0
_ROWS = 10_000
_FINAL = {phase.value for phase in Phase if phase.final}


@dataclass(frozen=True, slots=True)
class Target:
    """Addresses of a suite. launcher_pid: 0 for a suite elsewhere. token: the cluster token."""

    api_url: str
    monitor_url: str
    schedulers: tuple[str, ...]
    model: str
    api_key: str = ""
    launcher_pid: int = 0
    token: str = ""

    @classmethod
    def local(cls, suite: Suite, api_key: str = "") -> "Target":
        """A suite of this machine."""
        state, token = suite.state, cluster_keys.kept_token(suite.data_dir)
        where = state.api_url, state.monitor_url, state.scheduler_urls
        return cls(*where, state.model, api_key, state.launcher_pid, token)

    @property
    def api_address(self) -> tuple[str, int]:
        parts = urlsplit(self.api_url)
        return parts.hostname or "127.0.0.1", parts.port or 80

    async def instances(self) -> tuple[LiveInstance, ...]:
        """The ready instances. Raises NotFound when a role has none."""
        async with MonitorClient(self.monitor_url) as monitor:
            entries = await monitor.instances()
        ready = [entry for entry in entries if entry.state is InstanceState.READY]
        found = await asyncio.gather(*map(_describe, ready))
        for role in Role:
            if not any(one.role is role for one in found):
                raise NotFound(f"no {role.value} instance is ready")
        return tuple(found)

    async def timelines(self, request_ids: set[str]) -> dict[str, RequestTimeline]:
        """Timelines of these requests, by request id, once all are recorded. Raises DeadlineExceeded."""
        found: dict[str, RequestTimeline] = {}

        async def all_there() -> bool:
            for url in self.schedulers:
                async with SchedulerAdmin(url) as scheduler:
                    for row in await scheduler.requests(limit=_ROWS):
                        name = request_id_of(row.job_id)
                        if name in request_ids and name not in found and row.phase in _FINAL:
                            found[name] = await scheduler.timeline(row.job_id)
            return request_ids <= found.keys()

        await until(all_there, _RECORDS_S, f"the timelines of {len(request_ids)} requests", 0.3)
        return found

    @asynccontextmanager
    async def policies(self, **names: str) -> AsyncIterator[None]:
        """Use other policies, such as split="none", for the block's length."""
        wanted = {kind: PolicySpec(name) for kind, name in names.items()}
        async with MonitorClient(self.monitor_url, token=self.token) as monitor:
            before = (await monitor.policies()).policies
            await change_policies(monitor, wanted, WHO, len(self.schedulers))
            try:
                yield
            finally:
                former = {kind: _chosen(before[kind]) for kind in wanted}
                await change_policies(monitor, former, WHO, len(self.schedulers))


def find_target(data_dir: Path, api_url: str, monitor_url: str, schedulers: tuple[str, ...], api_key: str) -> Target:
    """The suite at these addresses, or, without any, that of `data_dir`. Raises NotFound or InvalidRequest."""
    if not (api_url or monitor_url or schedulers):
        return Target.local(Suite(data_dir), api_key)
    if not (api_url and monitor_url and schedulers):
        raise InvalidRequest("give --api, --monitor and --scheduler together, or none for the suite of --data-dir")
    return Target(api_url, monitor_url, schedulers, "", api_key, token=cluster_keys.token_of_environment())


def request_id_of(job_id: str) -> str:
    """The client's request id, which has no hyphens: vLLM makes `cmpl-ID-0-…` of ID."""
    return job_id.split("-")[1] if job_id.count("-") > 1 else ""


def _chosen(choice: PolicyChoice) -> PolicySpec | None:
    """The monitor's description of a policy as a change; None for a policy of the cluster file."""
    return choice.spec if choice.changed else None


async def _describe(entry: InstanceRow) -> LiveInstance:
    async with WorkerAdmin(entry.info.http) as worker:
        status = await worker.instance()
    host = urlsplit(entry.info.rpc).hostname or ""
    return LiveInstance(entry.info, entry.role, host, status.threads, status.max_seqs)


Result = TypeVar("Result")
_TEXT = "The river ran past stone houses, quiet gardens and a harbour full of copper engines; people came. "


@dataclass(frozen=True, slots=True)
class Shot:
    """A request to send. at_s: seconds after the first. slo: its class, "" for the default."""

    prompt_tokens: int
    output_tokens: int
    at_s: float = 0.0
    slo: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """A request that was served. sent_s: Unix time; jct_s: until the last token; gaps_s: between events with tokens."""

    request_id: str
    shot: Shot
    sent_s: float
    ttft_s: float
    jct_s: float
    gaps_s: tuple[float, ...] = ()

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None with fewer than two tokens."""
        gaps = self.shot.output_tokens - 1
        return (self.jct_s - self.ttft_s) / gaps if gaps else None

    @property
    def longest_gap_s(self) -> float | None:
        """None with fewer than two events."""
        return max(self.gaps_s, default=None)

    def met(self, slo: Slo) -> bool:
        """Whether TTFT, TPOT and the gaps were within these targets."""
        over = sum(gap_s > slo.itl_s for gap_s in self.gaps_s)
        return self.ttft_s <= slo.ttft_s and (self.tpot_s or 0.0) <= slo.tpot_s and itl_met(len(self.gaps_s), over)


class Traffic:
    """Sends greedy completions of exact lengths, each with a cache salt of its own."""

    def __init__(self, target: Target, model: str, tokens: Sequence[int], max_model_len: int, seed: int) -> None:
        self.max_model_len = max_model_len
        self._target = target
        self._model = model
        self._tokens = tokens
        self._rng = Random(seed)
        self._run = secrets.token_hex(3)
        self._sent = 0

    @classmethod
    async def to(cls, target: Target, seed: int = 0) -> "Traffic":
        """Traffic for the model behind the API. Raises Unavailable."""
        headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        async with httpx.AsyncClient(base_url=target.api_url, headers=headers, timeout=10, trust_env=False) as http:
            try:
                answer = await http.get("/v1/models")
                served = answer.raise_for_status().json()["data"][0]
                answer = await http.post("/tokenize", json={"model": served["id"], "prompt": _TEXT})
                tokens = answer.raise_for_status().json()["tokens"]
            except httpx.HTTPError as error:
                raise Unavailable(f"{target.api_url}: {error}") from error
        return cls(target, served["id"], tokens, int(served["max_model_len"]), seed)

    async def closed(self, shots: Sequence[Shot], concurrency: int) -> list[Sample]:
        """Send all, `concurrency` at a time. Raises Unavailable when one fails."""
        pending = list(shots)[::-1]
        samples: list[Sample] = []

        async def worker() -> None:
            while pending:
                samples.append(await self._send(pending.pop()))

        await _all([worker() for _ in range(concurrency)])
        return samples

    async def timed(self, shots: Sequence[Shot]) -> list[Sample]:
        """Send each at its time; samples in the order of the shots. Raises Unavailable when one fails."""
        return await _in_time(shots, self._send)

    async def tried(self, shots: Sequence[Shot]) -> list[Sample | str]:
        """Send each at its time; in their order, the sample, or the error of a request that failed."""

        async def one(shot: Shot) -> Sample | str:
            try:
                return await self._send(shot)
            except (StreamFailed, OSError) as error:
                return str(error) or type(error).__name__

        return await _in_time(shots, one)

    async def _send(self, shot: Shot) -> Sample:
        self._sent += 1
        name = f"m{self._run}n{self._sent}"
        prompt = self._rng.choices(self._tokens, k=shot.prompt_tokens)
        body = completion_body(prompt, shot.output_tokens, self._model, request_id=name, cache_salt=name)
        sent_s = time.time()
        host, port = self._target.api_address
        seen = await stream_completion(host, port, body, self._target.api_key, shot.slo)
        return Sample(name, shot, sent_s, seen.ttft_s, seen.last_s, seen.gaps_s)


async def _in_time(shots: Sequence[Shot], send: Callable[[Shot], Awaitable[Result]]) -> list[Result]:
    loop = asyncio.get_running_loop()
    began = loop.time()
    found: dict[int, Result] = {}

    async def later(number: int, shot: Shot) -> None:
        await asyncio.sleep(began + shot.at_s - loop.time())
        found[number] = await send(shot)

    await _all([later(number, shot) for number, shot in enumerate(shots)])
    return [found[number] for number in range(len(shots))]


async def _all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except* (StreamFailed, OSError) as failures:
        first: BaseException = failures
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise Unavailable(f"a request failed: {first}") from None
