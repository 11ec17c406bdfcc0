"""The one file that knows the order of the steps: place, prefill, transfer, decode; and what follows a failure.

The pipeline owns the job: its deadline, the cancellation of every leg, and the tokens that the client already has.
"""

import asyncio
import time

from gateway.job import Job
from gateway.reports import Reporter
from gateway.settings import GatewaySettings
from shared.domain.job import Phase
from shared.domain.kv import KvHandle, TransferOutcome
from shared.domain.route import InstanceRef, Reason, Route
from shared.errors import Busy, DeadlineExceeded, PolyphaseError, Unavailable, WrongRole
from shared.runtime.logs import get_log
from shared.timeline import Span
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.messages import (
    DecodeRequest,
    PrefetchRequest,
    PrefillReply,
    PrefillRequest,
    PrefillStarted,
    ReleaseRequest,
    TokenStep,
)
from shared.wire.methods import DECODE, PREFETCH, PREFILL, RELEASE
from shared.wire.rpc_client import RpcClients

log = get_log(__name__)
PLACE_S = 2.0
RETRY_S = 0.1


class Pipeline:
    """Runs jobs to their end. `run` returns when the client has everything, or raises why it cannot."""

    def __init__(
        self, settings: GatewaySettings, clients: RpcClients, schedulers: SchedulerClient, reporter: Reporter
    ) -> None:
        self._settings = settings
        self._clients = clients
        self._schedulers = schedulers
        self._reporter = reporter

    async def run(self, job: Job) -> None:
        """Serve the job, again after each failure that another attempt can mend.

        Raises the last error once attempts, patience or the deadline are used up. Cancelling stops both legs.
        """
        outcome = "cancelled"
        job.phase = Phase.QUEUED
        try:
            async with asyncio.timeout(self._settings.job_timeout_s):
                await self._attempts(job)
            job.phase, outcome = Phase.COMPLETED, "completed"
        except TimeoutError:
            job.phase, outcome = Phase.FAILED, DeadlineExceeded.code
            raise DeadlineExceeded(f"the job took longer than {self._settings.job_timeout_s:.0f} s") from None
        except asyncio.CancelledError:
            job.phase = Phase.CANCELLED
            raise
        except PolyphaseError as error:
            job.phase, outcome = Phase.FAILED, error.code
            raise
        except Exception:  # a bug of ours: the status table must not show the job as under way for ever
            job.phase, outcome = Phase.FAILED, PolyphaseError.code
            raise
        finally:
            job.timeline.ended_s = time.time()
            job.timeline.outcome = outcome
            self._reporter.report(job, outcome)

    async def _attempts(self, job: Job) -> None:
        while True:
            job.begin_attempt()
            try:
                await self._attempt(job, await self._place(job))
                return
            except PolyphaseError as error:
                if job.finished:  # the client has it all; only our record of the end is missing
                    log.warning("lost the end of a finished job", job_id=job.spec.job_id, error=error.message)
                    return
                if not error.retriable or job.attempt >= self._settings.attempts:
                    raise
                self._blame(job, error)

    def _blame(self, job: Job, error: PolyphaseError) -> None:
        instance = job.decode_instance if job.phase is Phase.DECODE else job.prefill_instance
        if instance:
            job.failed_instances.append(instance)
        log.info("attempt failed", job_id=job.spec.job_id, attempt=job.attempt, instance=instance, error=error.message)
        figures: dict[str, float | str] = {"error": error.message, "tokens": len(job.tokens)}
        job.decided("resume", "", (Reason(error.code, figures),))

    async def _place(self, job: Job, *, decode_only: bool = False) -> Route:
        """Ask a scheduler for a route; while none answers or nothing is ready, ask again for `patience_s`."""
        started = time.time()
        give_up = time.monotonic() + self._settings.patience_s
        view = job.view()
        if decode_only:
            view = type(view)(view.job_id, view.prompt_tokens, view.max_tokens, view.slo, view.prediction, True)
        while True:
            try:
                route = await self._schedulers.place(view, exclude=tuple(job.failed_instances), timeout_s=PLACE_S)
                break
            except PolyphaseError as error:
                if not error.retriable and not isinstance(error, DeadlineExceeded):
                    raise
                if time.monotonic() > give_up:
                    raise
                job.failed_instances.clear()  # an instance that failed once is better than none
                await asyncio.sleep(RETRY_S)
        job.record(Span.PLACEMENT, started, time.time())
        return route

    async def _attempt(self, job: Job, route: Route) -> None:
        job.placed(route)
        self._reporter.report(job)
        if route.prefill is None:
            assert route.decode is not None
            await self._decode(job, route.decode, None)
            return
        prefilled = await self._prefill(job, route, route.prefill)
        if job.finished:
            return
        if prefilled.decode is None or prefilled.handle is None:
            raise Unavailable(f"{route.prefill.instance_id} named no decode instance")
        try:
            await self._decode_somewhere(job, prefilled.decode, prefilled.handle)
        except BaseException:
            # Whatever ended the decode leg: KV that waits for it must not wait for its lease to end.
            self._release(route.prefill, prefilled.handle.transfer_id)
            raise

    async def _prefill(self, job: Job, route: Route, instance: InstanceRef) -> PrefillReply:
        job.phase = Phase.PREFILL
        prompt, full = job.prompt, route.split >= len(job.prompt)
        request = PrefillRequest(
            job=job.view(), transfer_id=job.transfer_id,
            prompt_token_ids=prompt if full else prompt[: route.split],
            generation=job.spec.generation, want_token=full and job.spec.carry,
            export=not (full and job.spec.carry and job.remaining <= 1), codec=self._settings.kv_codec,
            decode=route.decode, exclude=tuple(job.failed_instances),
        )  # fmt: skip
        async with _Prefetches(self._clients) as prefetches:
            reply = await self._clients.to(instance.rpc).call(
                PREFILL, request, timeout_s=self._settings.job_timeout_s, on_item=prefetches.start
            )
        self._prefilled(job, instance, reply)
        return reply

    def _prefilled(self, job: Job, instance: InstanceRef, reply: PrefillReply) -> None:
        job.record(Span.QUEUE, reply.queued_s, reply.started_s, instance.instance_id)
        job.record(Span.PREFILL, reply.started_s, reply.ended_s, instance.instance_id)
        job.prediction = reply.prediction or job.prediction
        if reply.decode is not None:
            job.decided("dispatch", reply.decode.instance_id, reply.reasons)
        if reply.tokens:
            finish = reply.finish_reason or ("length" if job.remaining <= len(reply.tokens) else "")
            job.accept(TokenStep(reply.tokens, finish, reply.stop_reason, reply.logprobs))

    async def _decode_somewhere(self, job: Job, instance: InstanceRef, handle: KvHandle) -> None:
        """Decode; when the instance refuses before it began, the same KV goes to another one."""
        try:
            await self._decode(job, instance, handle)
        except (WrongRole, Busy) as refusal:
            job.failed_instances.append(instance.instance_id)
            route = await self._place(job, decode_only=True)
            if route.decode is None:
                raise Unavailable("placement named no decode instance") from refusal
            job.decided("dispatch", route.decode.instance_id, (Reason(refusal.message), *route.reasons))
            await self._decode(job, route.decode, handle)

    async def _decode(self, job: Job, instance: InstanceRef, handle: KvHandle | None) -> None:
        job.phase = Phase.TRANSFER if handle is not None else Phase.DECODE
        job.decode_instance = instance.instance_id
        self._reporter.report(job)
        request = DecodeRequest(
            job=job.view(), prompt_token_ids=job.prompt, generation=job.spec.generation, handle=handle,
        )  # fmt: skip
        job.phase = Phase.DECODE
        reply = await self._clients.to(instance.rpc).call(
            DECODE, request, timeout_s=self._settings.job_timeout_s, on_item=job.accept
        )
        transfer = reply.transfer
        job.timeline.transfers.append(transfer)
        job.record(Span.TRANSFER, transfer.started_s, transfer.ended_s, instance.instance_id)
        began = transfer.ended_s or reply.queued_s
        job.record(Span.DECODE_QUEUE, began, reply.started_s, instance.instance_id)
        job.record(Span.DECODE, reply.started_s, reply.ended_s, instance.instance_id)
        if handle is not None and transfer.outcome is TransferOutcome.RECOMPUTED:
            log.warning("KV was recomputed", job_id=job.spec.job_id, error=transfer.error)

    def _release(self, instance: InstanceRef, transfer_id: str) -> None:
        self._clients.to(instance.rpc).notify(RELEASE, ReleaseRequest([transfer_id]))


class _Prefetches:
    """Starts transfers while a prefill is still under way; a failed or late one only costs the overlap."""

    def __init__(self, clients: RpcClients) -> None:
        self._clients = clients
        self._started: list[PrefillStarted] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "_Prefetches":
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for task in self._tasks:
            task.cancel()
        if error is not None:  # no decode will follow: what was fetched must go
            for item in self._started:
                release = ReleaseRequest([item.handle.transfer_id])
                self._clients.to(item.decode.rpc).notify(RELEASE, release)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def start(self, item: PrefillStarted) -> None:
        """Tell the decode instance to begin."""
        self._started.append(item)
        self._tasks.append(asyncio.get_running_loop().create_task(self._prefetch(item)))

    async def _prefetch(self, item: PrefillStarted) -> None:
        try:
            await self._clients.to(item.decode.rpc).call(PREFETCH, PrefetchRequest(item.handle), timeout_s=5.0)
        except PolyphaseError as error:
            log.info("prefetch failed", transfer_id=item.handle.transfer_id, error=error.message)
