"""The order of a request's steps: place, prefill, transfer, decode; and the retries after a failure.

`Pipeline.run` serves one job: it waits for a placement (`_place_in_turn`), has the prefill instance compute the prompt
(`_prefill`), has the decode instance fetch the KV meanwhile (`StagedKv`) and produce the answer (`_decode`). The
pipeline owns the job's deadline and the cancellation of its calls. It reacts to failures as follows:

| failure | reaction | costs |
|---|---|---|
| `Delayed` by the scheduler | the job waits in the fair queue of its SLO class and is placed again | `queue_s` |
| no scheduler, no instance | the placement is repeated | patience |
| `NoRoom` | another decode instance with room gets the same KV; without one the job waits where it is | |
| `WrongRole`, `Busy`, `NotConnected` of a decode instance | another one gets the same KV | patience |
| the same of other instances | another attempt | patience |
| other retriable errors | another attempt, without the failed instance, from the tokens that the client has | a loss |
| a long pause, with a better place elsewhere | the job continues there | a move |
| all others | the job ends with the error | |

A token renews the patience, and progress of the answer forgives losses (`loss_forgiven_tokens`).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from gateway.job import Job
from gateway.lengths import LengthClient
from gateway.reports import Reporter
from gateway.settings import GatewaySettings
from shared.domain.job import JobView, LengthPrediction, Phase, WhenFull
from shared.domain.kv import KvHandle, TransferOutcome
from shared.domain.prompt import beginning
from shared.domain.route import InstanceRef, Reason, Route
from shared.errors import (
    Busy,
    DeadlineExceeded,
    Delayed,
    EngineFailed,
    InstancesLost,
    NoRoom,
    NotConnected,
    Overloaded,
    PolyphaseError,
    Unavailable,
    WrongRole,
)
from shared.policy.fair_share import CallerQueue, Ledger, TokenCounters
from shared.policy.ledger import Assignment, assignments, promise_of
from shared.policy.overload import MOVE_LEAST_S, steps_aside
from shared.runtime.logs import get_log
from shared.timeline import Span
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.messages import (
    DECODE,
    EXPECT,
    PREDICTED,
    PREFETCH,
    PREFILL,
    RELEASE,
    DecodeRequest,
    ExpectRequest,
    Method,
    Pause,
    Predicted,
    PrefetchRequest,
    PrefillReply,
    PrefillRequest,
    PrefillStarted,
    ReleaseRequest,
    TokenStep,
)
from shared.wire.rpc_client import RpcClient, RpcClients

log = get_log(__name__)
Request = TypeVar("Request")
Reply = TypeVar("Reply")
Item = TypeVar("Item")
PLACE_S = 2.0
RETRY_S, MAX_RETRY_S = 0.1, 0.5
ANNOUNCE_S = 2.0  # for the connection to a decode instance that is new to this gateway
MAX_REFUSALS = 3  # of a job by decode instances that turn out to have no room; the next one lets the job wait


class OutOfPatience(Unavailable):
    """No instance accepted the job for as long as it may wait for one."""

    retriable = False


class Pipeline:
    def __init__(
        self,
        settings: GatewaySettings,
        clients: RpcClients,
        schedulers: SchedulerClient,
        reporter: Reporter,
        lengths: LengthClient,
        queue: "FairQueue | None" = None,
    ) -> None:
        self._settings = settings
        self._lengths = lengths
        self._clients = clients
        self._schedulers = schedulers
        self._reporter = reporter
        self._queue = queue or FairQueue()
        self._wants_prefix = False  # as the last route said

    async def run(self, job: Job) -> None:
        """Serve the job. Returns when the client has the whole answer.

        Raises the last error once attempts, patience or the deadline are used up. Cancelling it cancels the calls.
        """
        job.record_until(Span.INTAKE, time.time())
        job.request_length(self._lengths)
        shares, caller = self._queue.shares, job.spec.caller
        shares.came(caller, time.monotonic())
        outcome = PolyphaseError.code  # for a bug of ours: the status table must not show the job as open for ever
        try:
            async with asyncio.timeout(job.left_s):
                await self._lengths.wait_before_placement(job.length, job.ttft_left_s)
                await self._attempts(job)
        except TimeoutError:
            outcome = DeadlineExceeded.code
            raise DeadlineExceeded(f"the job took longer than {self._settings.job_timeout_s:.0f} s") from None
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except PolyphaseError as error:
            outcome = error.code
            raise
        finally:
            job.length.cancel()
            shares.charge(caller, 0, len(job.tokens))
            shares.left(caller, time.monotonic())
            job.ended(outcome)
            self._reporter.report(job, job.timeline.outcome)

    async def _attempts(self, job: Job) -> None:
        route: Route | None = None
        while not job.finished:
            job.begin_attempt()
            route = route or await self._place_in_turn(job)
            try:
                route = await self._attempt(job, route)
            except PolyphaseError as error:
                route = None
                if job.finished:  # the client has the whole answer; only our record of its end is missing
                    log.warning("lost the end of a finished job", job_id=job.spec.job_id, error=error.message)
                else:
                    self._prepare_another(job, error)

    async def _attempt(self, job: Job, route: Route) -> Route | None:
        """Serve the job on a route. Returns another route if the job was paused and continues there."""
        job.placed(route)
        self._reporter.report(job)
        if route.prefill is None:
            return await self._decode_alone(job, route)
        async with StagedKv(self._clients, job, route.prefill) as staged:
            if self._schedulers.several and route.decode is not None:
                bound = next(one for one in assignments(job.view(), route, time.time()) if one.coming)
                staged.announce(route.decode, bound)
            prefilled = await self._prefill(job, route, route.prefill, staged)
            if job.finished:
                return None
            if prefilled.handle is None:
                raise self._broken(job, route.prefill, "staged no KV")
            return await self._decode_staged(job, route, prefilled.decode, prefilled.handle, staged)

    def _prepare_another(self, job: Job, error: PolyphaseError) -> None:
        """Raises where there is to be no other attempt."""
        job.moved_from = ""  # the instance where it was paused may be the only one left
        if isinstance(error, WrongRole | Busy | NotConnected):
            self._wait(job, RETRY_S, error)  # nothing was lost, but a series of refusals must have an end
        elif error.retriable:
            job.add_loss()
            self._refuse_after_losses(job, error)
        if not error.retriable:
            raise error
        log.info("attempt failed", job_id=job.spec.job_id, attempt=job.attempt, error=error.message)
        job.resumes(error)

    def _refuse_after_losses(self, job: Job, error: PolyphaseError) -> None:
        """End a job with too many losses. A job that lost several instances may be what crashes them."""
        settings, count = self._settings, len(job.tokens)
        names = job.lost_since(count)
        where = f"at output token {count}, fewer than {settings.losses_at_one_token} are allowed at one token"
        if len(names) < settings.losses_at_one_token:
            if job.open_losses(settings.loss_forgiven_tokens) < settings.attempts:
                return
            names = job.lost_since(0)
            where = f"up to output token {count}, fewer than {settings.attempts} losses are allowed"
        if len(names) < 2:
            raise error
        raise InstancesLost(
            f"the request lost {len(names)} instances ({', '.join(names)}) {where}; it may be what crashes them and is "
            f"not retried: send another request, or report this one; the last error was: {error.message}"
        ) from error

    # Place

    async def _place_in_turn(self, job: Job) -> Route:
        """A route. A job that has not begun, and finds no room at a decode instance, waits in the fair queue of its SLO
        class before anything of it is computed; a job of a class that yields waits there for heavier classes, too.
        """
        slo = job.spec.slo
        if job.begun:
            return await self._place(job)
        yields = slo.when_full is WhenFull.DELAY
        route = None
        if not yields and not self._queue.is_waiting(slo.name):
            try:
                route = await self._place(job)
            except Delayed as delay:
                job.delayed(delay)
        if route is None:
            queue_s = self._settings.slo[slo.name].queue_s if yields else None
            try:
                async with asyncio.timeout(queue_s) as limit:
                    route = await self._place_from_queue(job)
            except TimeoutError:
                if not limit.expired():
                    raise
                message = f"no room beside heavier classes for {queue_s:g} s (SLO class {slo.name!r})"
                raise Overloaded(message, cause="queue", retry_after_s=queue_s) from None
        self._queue.shares.charge(job.spec.caller, job.prompt_tokens, 0)
        return route

    async def _place_from_queue(self, job: Job) -> Route:
        """A job whose first token will be late steps aside for the jobs behind it, which may still be in time."""
        slo, caller = job.spec.slo, job.spec.caller
        async with self._queue.turn(slo.name, caller):
            route = await self._place_repeatedly(job, aside=False)
        if route is None:
            async with self._queue.turn(slo.name, caller, aside=True):
                route = await self._place_repeatedly(job, aside=True)
        assert route is not None
        return route

    async def _place_repeatedly(self, job: Job, *, aside: bool) -> Route | None:
        """A route; None where the job steps aside, which it does once."""
        while True:
            try:
                return await self._place(job)
            except Delayed as delay:
                job.delayed(delay)
                retry_s = delay.retry_after_s or MAX_RETRY_S
                if not aside and steps_aside(job.spec.slo, job.spec.slo.ttft_s - job.ttft_left_s, retry_s):
                    return None
                await asyncio.sleep(retry_s)

    async def _place(self, job: Job, *, decode_only: bool = False) -> Route:
        """A scheduler's route. Without a scheduler or a ready instance the request is repeated, within the patience."""
        over_share = not job.begun and self._queue.shares.over(job.spec.caller, time.monotonic())
        view = msgspec.structs.replace(self._view(job, decode_only=decode_only), over_share=over_share)
        while True:
            began_s = time.monotonic()
            try:
                exclude, trace = job.excluded, job.placement_trace
                route = await self._schedulers.place(view, exclude=exclude, timeout_s=PLACE_S, trace=trace)
                break
            except PolyphaseError as error:
                if not error.retriable and not isinstance(error, DeadlineExceeded):
                    raise
                job.failed_instances.clear()  # an instance that failed once is better than none
                job.moved_from = ""
                self._wait(job, time.monotonic() - began_s, error)
                pause_s = min(max(RETRY_S, job.waited_s / 2), MAX_RETRY_S)
                await asyncio.sleep(pause_s)
                job.waited_s += pause_s
        self._wants_prefix = route.wants_prefix
        job.record_until(Span.PLACEMENT, time.time())
        return route

    def _view(self, job: Job, *, decode_only: bool = False) -> JobView:
        view = job.view(decode_only=decode_only)
        return msgspec.structs.replace(view, prefix=job.prefix) if self._wants_prefix else view

    def _wait(self, job: Job, seconds: float, error: PolyphaseError) -> None:
        """Charge time without an instance to the job's patience. Raises OutOfPatience when that is used up."""
        job.waited_s += seconds
        patience_s = self._settings.patience_s
        if job.waited_s >= patience_s:
            message = f"no instance took the job for {patience_s:g} s: {error.message}"
            raise OutOfPatience(message, retry_after_s=2.0) from error

    # Prefill

    async def _prefill(self, job: Job, route: Route, instance: InstanceRef, staged: "StagedKv") -> PrefillReply:
        job.phase = Phase.PREFILL
        if self._lengths.beside and job.prediction is None:
            job.request_length(self._lengths, instance.instance_id)
            await self._lengths.wait_before_prefill(job.length, job.ttft_left_s)
        full = route.split >= job.prompt_tokens
        request = PrefillRequest(
            job=job.view(),
            transfer_id=job.transfer_id,
            prompt=beginning(job.prompt, route.split),
            generation=job.spec.generation,
            want_token=full and job.spec.carry,
            export=not (full and job.spec.carry and job.remaining <= 1),
            codec=self._settings.kv_codec,
            decode=route.decode,
            exclude=job.excluded,
            dispatch=route.dispatch,
            saved=route.prefill_saved,
            trace=job.wire_trace,
        )
        reply = await self._call(job, instance, PREFILL, request, staged.prefetch)
        job.computed(reply.reused, route.split)
        if reply.tokens:
            finish = reply.finish_reason or ("length" if job.remaining <= len(reply.tokens) else "")
            job.accept(TokenStep(reply.tokens, finish, reply.stop_reason, reply.logprobs))
        job.record_prefill(instance.instance_id, reply)
        if reply.decode is not None:
            job.decided("dispatch", reply.decode.instance_id, reply.reasons)
        if reply.codec is not None and reply.handle is not None:
            job.decided("codec", reply.handle.codec.value, (reply.codec,))
        return reply

    # Transfer and decode

    async def _decode_alone(self, job: Job, route: Route) -> Route | None:
        """Prefill and decode on one instance. If it has no room after all, the job is placed again where there is room.
        Returns what `_attempt` does.
        """
        refusals, if_room = 0, route.has_room
        while True:
            assert route.decode is not None
            try:
                return await self._decode(job, route.decode, None, route.decode_saved, if_room=if_room)
            except NoRoom as refusal:
                found = await self._place_with_room(job, refusal, decode_only=False)
            if found is not None and found.prefill is not None:
                return await self._attempt(job, found)
            refusals += 1
            route, if_room = found or route, found is not None and refusals < MAX_REFUSALS
            if found is not None:
                job.placed(route)

    async def _decode_staged(
        self, job: Job, route: Route, instance: InstanceRef | None, handle: KvHandle, staged: "StagedKv"
    ) -> Route | None:
        """Decode from staged KV; if an instance refuses the job, is unreachable or has no room, another instance gets
        the same KV. Returns what `_attempt` does.
        """
        refusals, if_room = 0, route.has_room and instance == route.decode
        saved = route.decode_saved if instance == route.decode else 0
        while True:
            if instance is None:
                placed = await self._place(job, decode_only=True)
                instance, saved, if_room = self._dispatched(job, placed), placed.decode_saved, False
            try:
                next_route = await self._decode(job, instance, handle, saved, if_room=if_room)
            except NoRoom as refusal:
                found = await self._place_with_room(job, refusal, decode_only=True)
                refusals += 1
                if found is not None:
                    instance, saved = self._dispatched(job, found), found.decode_saved
                if_room = found is not None and refusals < MAX_REFUSALS
            except (WrongRole, Busy, NotConnected) as refusal:
                self._wait(job, RETRY_S, refusal)
                instance = None
            else:
                if next_route is None:
                    staged.decoded_on(instance)
                return next_route

    async def _place_with_room(self, job: Job, refusal: NoRoom, *, decode_only: bool) -> Route | None:
        """Another route on which the job's KV is expected to find room; None where there is none."""
        full = job.failed_instances.pop()  # it has not failed
        job.decided("full", full, (Reason(refusal.message, {"code": refusal.code}),))
        view, exclude = job.view(decode_only=decode_only), (*job.failed_instances, full)
        try:
            route = await self._schedulers.place(view, exclude=exclude, timeout_s=PLACE_S)
        except PolyphaseError as error:
            log.info("no other decode instance", job_id=job.spec.job_id, reason=error.message)
            return None
        return route if route.has_room and route.decode is not None else None

    def _dispatched(self, job: Job, route: Route) -> InstanceRef:
        if route.decode is None:
            raise Unavailable("placement named no decode instance")
        job.decided("dispatch", route.decode.instance_id, route.reasons)
        return route.decode

    async def _decode(
        self, job: Job, instance: InstanceRef, handle: KvHandle | None, saved: int = 0, *, if_room: bool = False
    ) -> Route | None:
        """Decode to the end, or until the job is paused and continues on the route that is returned. Raises NoRoom
        where `if_room` and the instance finds that it has none.
        """
        job.phase = Phase.DECODE
        job.decode_instance = instance.instance_id
        self._reporter.report(job)
        request = DecodeRequest(
            job.view(),
            job.prompt,
            job.spec.generation,
            handle,
            saved,
            job.wire_trace,
            job.repeated,
            tell_pauses=True,
            if_room=if_room,
        )
        try:
            async with asyncio.timeout(None) as limit, _Mover(self, job, instance, limit) as mover:
                reply = await self._call(job, instance, DECODE, request, job.accept, mover.on_pause)
        except TimeoutError:
            if not limit.expired():
                raise
            return mover.route
        job.record_decode(instance.instance_id, reply)
        if handle is not None and reply.transfer.outcome is TransferOutcome.RECOMPUTED:
            log.warning("KV was recomputed", job_id=job.spec.job_id, error=reply.transfer.error)
        if not job.finished:
            raise self._broken(job, instance, "ended the job without a reason")
        return None

    def _broken(self, job: Job, instance: InstanceRef, what: str) -> EngineFailed:
        job.failed_instances.append(instance.instance_id)
        job.call.instance = instance
        return EngineFailed(f"{instance.instance_id} {what}")

    async def _call(
        self,
        job: Job,
        instance: InstanceRef,
        method: Method[Request, Reply, Item],
        request: Request,
        on_item: Callable[[Any], None],
        on_pause: Callable[[Pause], None] | None = None,
    ) -> Reply:
        """Call an instance for the rest of the job's time. An error is a failure of this instance, and no other."""
        call = job.begin_call(instance)
        call.on_pause = on_pause
        if job.prediction is None:
            # A prediction that arrives now still serves the dispatch of the prompt, and the admission to decode.
            call.on_predicted = partial(self._send_prediction, job, instance)
        began_s = time.monotonic()
        try:
            reply = await self._clients.to(instance.rpc).call(method, request, timeout_s=job.left_s, on_item=on_item)
        except BaseException as error:
            job.record_failed_call(instance.instance_id, error)
            if isinstance(error, PolyphaseError):
                job.failed_instances.append(instance.instance_id)
            if isinstance(error, NotConnected):
                self._wait(job, time.monotonic() - began_s, error)
            raise
        finally:
            call.on_pause = call.on_predicted = None
        call.instance = None
        return reply

    def _send_prediction(self, job: Job, instance: InstanceRef, prediction: LengthPrediction) -> None:
        self._clients.to(instance.rpc).notify(PREDICTED, Predicted(job.transfer_id, prediction, job.spec.job_id))

    # Moves of paused jobs

    def may_move(self, job: Job) -> bool:
        """Whether the job can continue elsewhere. A job that cannot be carried would repeat its tokens one by one."""
        spec = job.spec
        return spec.carry and not spec.local_only and bool(job.tokens) and job.moves < self._settings.moves

    async def place_elsewhere(self, job: Job, instance_id: str, pause_s: float) -> Route:
        """A route on which a job that stays paused for `pause_s` continues clearly sooner. Raises Stays, and the errors
        of a placement.
        """
        view = msgspec.structs.replace(self._view(job), pause_s=pause_s)
        exclude = (*job.failed_instances, instance_id)
        return await self._schedulers.place(view, exclude=exclude, timeout_s=PLACE_S)

    def stays(self, job: Job) -> None:
        """The job does not use the route of `place_elsewhere`: report to the scheduler where it decodes."""
        self._reporter.report(job)


class _Mover:
    """Entered around the decode of a job: when the instance reports that the job is paused, requests another route, and
    ends the decode once there is a better one (`route`).

    A job stays where it is if a token arrived meanwhile, or if its KV is being computed again.
    """

    def __init__(self, pipeline: Pipeline, job: Job, instance: InstanceRef, limit: asyncio.Timeout) -> None:
        self.route: Route | None = None
        self._pipeline = pipeline
        self._job = job
        self._instance_id = instance.instance_id
        self._limit = limit
        self._placement: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._placement is not None:
            self._placement.cancel()
            await asyncio.gather(self._placement)

    def on_pause(self, pause: Pause) -> None:
        placing = self._placement is not None and not self._placement.done()
        if placing or pause.computing or pause.expected_s < MOVE_LEAST_S or not self._pipeline.may_move(self._job):
            return
        self._placement = asyncio.get_running_loop().create_task(self._move(pause))

    async def _move(self, pause: Pause) -> None:
        job, instance_id, paused = self._job, self._instance_id, self._job.call.paused
        try:
            route = await self._pipeline.place_elsewhere(job, instance_id, pause.expected_s)
        except asyncio.CancelledError:
            return  # by `__aexit__`
        except PolyphaseError as error:
            log.debug("a paused job stays", job_id=job.spec.job_id, instance_id=instance_id, reason=error.message)
            return
        if paused is None or job.call.paused is not paused or paused.computed_s:
            self._pipeline.stays(job)
            return
        log.info("a paused job moves", job_id=job.spec.job_id, instance_id=instance_id, tokens=len(job.tokens))
        job.moved(instance_id, time.time() - paused.began_s, pause, route)
        self.route = route
        self._limit.reschedule(asyncio.get_running_loop().time())


class StagedKv:
    """What one attempt holds on instances: KV staged by its prefill, the fetches of it by decode instances, and the
    place that one of them reserves for it.

    Entered before the prefill is called. All is released at the end, except where `decoded_on` says that it is gone;
    also where the prefill's reply and its cancellation cross, because the gateway chose the transfer id.
    """

    def __init__(self, clients: RpcClients, job: Job, prefill: InstanceRef) -> None:
        self._clients = clients
        self._job = job
        self._transfer_id = job.transfer_id
        self._holders = {prefill.rpc}
        self._calls: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for address in self._holders:
            self._clients.to(address).notify(RELEASE, ReleaseRequest([self._transfer_id]))
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.gather(*self._calls)

    def announce(self, decode: InstanceRef, bound: Assignment) -> None:
        """Announce the job to the decode instance, so that the load of the instance shows it to all schedulers."""
        self._holders.add(decode.rpc)
        request = ExpectRequest(self._transfer_id, promise_of(bound), keep_s=self._job.left_s)
        client = self._clients.to(decode.rpc)
        if client.connected:
            client.notify(EXPECT, request)
        else:  # a notification would be lost
            self._start(client, EXPECT, request, ANNOUNCE_S)

    def prefetch(self, started: PrefillStarted) -> None:
        """Have the decode instance fetch KV during the prefill; a failure or delay only costs the overlap."""
        self._holders.add(started.decode.rpc)
        left_s = self._job.left_s
        request = PrefetchRequest(started.handle, keep_s=left_s)
        self._start(self._clients.to(started.decode.rpc), PREFETCH, request, left_s)

    def decoded_on(self, decode: InstanceRef) -> None:
        """A decode has ended there, and with it what was fetched for it.

        The prefill instance gets its release nevertheless: its connection to the importer may be broken.
        """
        self._holders.discard(decode.rpc)

    def _start(self, client: RpcClient, method: Method[Request, Any, Any], request: Request, timeout_s: float) -> None:
        self._calls.append(asyncio.get_running_loop().create_task(self._call(client, method, request, timeout_s)))

    async def _call(
        self, client: RpcClient, method: Method[Request, Any, Any], request: Request, timeout_s: float
    ) -> None:
        try:
            await client.call(method, request, timeout_s=timeout_s)
        except asyncio.CancelledError:
            return  # by `__aexit__`
        except PolyphaseError as error:
            log.info(
                "a call about staged KV failed", call=method.name, transfer_id=self._transfer_id, error=error.message
            )


class FairQueue:
    """The jobs that wait for placement: a queue for each SLO class, fair between callers, of which only the head is
    placed. Jobs that step aside for others of their class (`shared.policy.overload.steps_aside`) have another queue.

    A waiting job costs one entry and no polling. `shares`: what each caller was served, in any class.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, ledger: Ledger | None = None) -> None:
        """ledger: what callers were served by the processes that share the port."""
        self.shares = TokenCounters(weights, ledger)
        self._queues: dict[
            tuple[str, bool], CallerQueue[asyncio.Event]
        ] = {}  # by class, and whether they stepped aside

    def waiting(self, slo: str) -> int:
        """How many jobs of the class wait, including those that are being placed."""
        return sum(len(queue) for (name, _), queue in self._queues.items() if name == slo)

    def is_waiting(self, slo: str) -> bool:
        """Whether a new job of the class has others before it."""
        queue = self._queues.get((slo, False))
        return queue is not None and len(queue) > 0

    @asynccontextmanager
    async def turn(self, slo: str, caller: str, *, aside: bool = False) -> AsyncIterator[None]:
        """Enters the block when it is the turn of this job; the end of the block is the next job's turn."""
        queue = self._queues.get((slo, aside))
        if queue is None:
            queue = self._queues[slo, aside] = CallerQueue(self.shares)
        turn = asyncio.Event()
        queue.push(turn, caller)
        _wake_head(queue)
        try:
            await turn.wait()
            yield
        finally:
            queue.remove(turn, caller)
            _wake_head(queue)


def _wake_head(queue: CallerQueue[asyncio.Event]) -> None:
    if (head := queue.head()) is not None:
        head.set()
