"""Sessions of this gateway process: their ids, the context that the last turn of each left, and hints to prefetch it.

A session is a chat or an agent's work over several requests. Its id comes with the requests, and is kept apart by API
key. The cluster sees a hash of both. Clients may announce the next turn of a session (`Warmer`): the KV of its context
is then brought where the next prompt would be computed now.
"""

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from http import HTTPStatus

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from prometheus_client import Counter

from gateway.admission import current_request
from gateway.job import Job
from gateway.settings import GatewaySettings
from shared.domain.job import Generation, JobView, Slo
from shared.domain.kv import TransferOutcome
from shared.domain.prompt import beginning, hashes_of, length, modalities, packed
from shared.domain.route import InstanceRef
from shared.errors import Busy, InvalidRequest, NotFound, PolyphaseError
from shared.runtime.http import error_body
from shared.runtime.logs import get_log
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.messages import EXPORT, PULL, RELEASE, ExportRequest, PullRequest, ReleaseRequest
from shared.wire.rpc_client import RpcClients

log = get_log(__name__)
ID_CHARS = 256
WARM_PATH = "/v1/sessions/{session_id:path}/warm"
WARMS_AT_ONCE = 16
PLACE_S, EXPORT_S, PULL_S = 2.0, 2.0, 30.0
_KEY_BYTES = 12


def session_key(caller: str, field: str, session_id: str) -> str:
    """The hash by which the cluster knows a caller's session. field: what named it. Raises InvalidRequest."""
    if len(session_id) > ID_CHARS:
        raise InvalidRequest(f"{field}: a session id has at most {ID_CHARS} characters, this one has {len(session_id)}")
    text = f"{caller}\0{session_id}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=_KEY_BYTES).hexdigest()


@dataclass(frozen=True, slots=True)
class LastTurn:
    """The last turn of a session. context: its prompt and its answer, packed."""

    context: bytes
    generation: Generation
    slo: Slo
    max_tokens: int
    one_precision: bool

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.context) + len(self.generation.sampling) + len(self.generation.media)


class SessionBook:
    """The last turns of the sessions that this process has served most recently, by key."""

    def __init__(self, most: int, max_bytes: int) -> None:
        self._most = most
        self._max_bytes = max_bytes
        self._turns: OrderedDict[str, LastTurn] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._turns)

    def get(self, key: str) -> LastTurn | None:
        return self._turns.get(key)

    def ended(self, job: Job) -> None:
        """An answer of a session is complete. One that is larger than all memory for turns is not remembered."""
        spec = job.spec
        context = spec.prompt + packed(job.tokens)
        turn = LastTurn(context, spec.generation, spec.slo, spec.max_tokens, spec.one_precision)
        former = self._turns.pop(spec.session, None)
        self._turns[spec.session] = turn
        self.bytes += turn.size - (former.size if former is not None else 0)
        while len(self._turns) > self._most or self.bytes > self._max_bytes:
            _, oldest = self._turns.popitem(last=False)
            self.bytes -= oldest.size


class Warmer:
    """Brings the KV of sessions where their next turns would be computed. warms: counts them by outcome."""

    def __init__(
        self,
        settings: GatewaySettings,
        book: SessionBook,
        clients: RpcClients,
        schedulers: SchedulerClient,
        warms: Counter,
    ) -> None:
        self._max_model_len = settings.max_model_len
        self._book = book
        self._clients = clients
        self._schedulers = schedulers
        self._warms = warms
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, caller: str, session_id: str) -> None:
        """Begin to bring the KV of a session. Raises NotFound for one that this process does not know, and Busy."""
        key = session_key(caller, "session id", session_id)
        turn = self._book.get(key)
        if turn is None:
            raise NotFound(
                f"session {session_id!r:.80}: this gateway process has answered no request of it with this API key, or "
                "has forgotten it"
            )
        if key in self._tasks:
            return
        if len(self._tasks) >= WARMS_AT_ONCE:
            raise Busy(f"{WARMS_AT_ONCE} sessions are being prefetched: the hint has no effect", retry_after_s=1.0)
        task = asyncio.get_running_loop().create_task(self._run(key, turn), name=f"warm {key}")
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, key: str, turn: LastTurn) -> None:
        outcome = "failed"
        try:
            outcome = await self._bring(key, turn)
        except PolyphaseError as error:
            log.info("a session was not prefetched", session=key, reason=error.message)
        finally:
            self._warms.labels(outcome).inc()

    async def _bring(self, key: str, turn: LastTurn) -> str:
        """The outcome: `pulled`, `placed` where nothing is to be pulled, or `gone` where no instance has the KV."""
        generation, tokens = turn.generation, length(turn.context)
        most = min(turn.max_tokens, self._max_model_len - tokens - 1)
        if most < 1:
            return "placed"  # the session has no room for another turn
        view = JobView(
            job_id=f"warm-{secrets.token_hex(8)}",
            prompt_tokens=tokens + 1,  # the next prompt is longer
            max_tokens=most,
            slo=turn.slo,
            prefix=hashes_of(turn.context, generation.cache_salt, generation.adapter, generation.items),
            adapter=generation.adapter,
            one_precision=turn.one_precision,
            media=modalities(generation.items),
            session=key,
            warms=True,
        )
        route = await self._schedulers.place(view, timeout_s=PLACE_S)
        pull, target = route.pull, route.prefill or route.decode
        if pull is None or target is None:
            return "placed"
        transfer_id = f"{view.job_id}/w"
        try:
            export = ExportRequest(transfer_id, prompt=beginning(turn.context, pull.tokens), generation=generation)
            reply = await self._clients.to(pull.holder.rpc).call(EXPORT, export, timeout_s=EXPORT_S)
            if reply.handle is None:
                return "gone"
            prompt = beginning(turn.context + packed([0]), reply.handle.tokens + 1)  # an engine computes the last one
            request = PullRequest(job=view, prompt=prompt, generation=generation, handle=reply.handle, if_room=True)
            pulled = await self._clients.to(target.rpc).call(PULL, request, timeout_s=PULL_S)
            return "failed" if pulled.transfer.outcome is TransferOutcome.RECOMPUTED else "pulled"
        finally:
            for instance in (pull.holder, target):
                self._release(instance, transfer_id)

    def _release(self, instance: InstanceRef, transfer_id: str) -> None:
        self._clients.to(instance.rpc).notify(RELEASE, ReleaseRequest([transfer_id]))


def routes(warmer: Warmer) -> APIRouter:
    """The route of the hint."""
    router = APIRouter()

    @router.post(WARM_PATH, status_code=HTTPStatus.ACCEPTED)
    async def warm_session(session_id: str) -> JSONResponse:
        """Announce the next turn of a session."""
        try:
            warmer.start(current_request.get().caller, session_id)
        except PolyphaseError as error:
            return JSONResponse(error_body(error), status_code=error.http_status)
        return JSONResponse({}, status_code=HTTPStatus.ACCEPTED)

    return router
