"""The order of a request's steps: place, prefill, transfer, decode; and the retries after a failure.

`Pipeline.run` serves one job: it waits for a placement (`_next_route`), has the prefill instance compute the prompt
(`_prefill`), has the decode instance fetch the KV meanwhile (`StagedKv`) and produce the answer (`_decode_staged`; a
decode instance that computes the prompt as well: `_decode_whole`). Where the route says so, the instance that computes
the prompt pulls the KV of its beginning from another one (`_exported`). A decode may migrate to another instance
(`gateway.mover`). The pipeline owns the job's deadline and the cancellation of its calls. It reacts to failures as
follows:

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
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from gateway.admission import PlacementQueue
from gateway.job import Job
from gateway.lengths import LengthClient
from gateway.mover import WISHED, Mover
from gateway.reports import Reporter
from gateway.settings import GatewaySettings
from shared.domain.job import JobView, LengthPrediction, Phase
from shared.domain.kv import KvHandle, TransferOutcome, TransferReport
from shared.domain.prompt import beginning
from shared.domain.route import InstanceRef, Reason, Route
from shared.errors import (
    Busy,
    DeadlineExceeded,
    EngineFailed,
    InstancesLost,
    NoRoom,
    NotConnected,
    PolyphaseError,
    Unavailable,
    WrongRole,
)
from shared.policy.leaving import SPARE_SHARE
from shared.policy.ledger import Assignment, assignments, promise_of
from shared.runtime.logs import get_log
from shared.timeline import Span
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.messages import (
    DECODE,
    EXPECT,
    EXPORT,
    PREDICTED,
    PREFETCH,
    PREFILL,
    RELEASE,
    DecodeRequest,
    ExpectRequest,
    ExportRequest,
    Handover,
    Leave,
    Method,
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
PLACE_S = 2.0  # for one call of a scheduler
RETRY_S, MAX_RETRY_S = 0.1, 0.5
EXPORT_S = 1.0  # for an instance to say what it holds of a prompt: a pull that begins later is not worth the wait
ANNOUNCE_S = 2.0  # for the connection to a decode instance that is new to this gateway
MAX_TIMES_FULL = 3  # so often a job finds a decode instance without room; then it waits where it is placed


class OutOfPatience(Unavailable):
    """No instance accepted the job for as long as it may wait for one."""

    retriable = False


@dataclass(frozen=True, slots=True)
class DecodeTarget:
    """The instance on which a job is to decode."""

    instance: InstanceRef
    saved: int  # prompt tokens whose KV the instance is known to hold
    only_if_room: bool  # it is to refuse the job if it has no room for the job's KV, instead of queueing the job
    keep_tokens: int = 0  # as in Route


@dataclass(frozen=True, slots=True)
class Finished:
    """The client has the whole answer."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The decode has ended: the job was paused, and continues elsewhere."""

    route: Route


@dataclass(frozen=True, slots=True)
class Migrated:
    """The job has left its instance, which has staged its KV for the target."""

    target: DecodeTarget
    handover: Handover
    source: InstanceRef
    transfer_id: str


@dataclass(frozen=True, slots=True)
class Full:
    """The instance has refused the job because it has no room for its KV."""

    error: NoRoom


@dataclass(frozen=True, slots=True)
class Refused:
    """The instance has refused the job for another reason, or cannot be reached."""

    error: WrongRole | Busy | NotConnected


@dataclass(frozen=True, slots=True)
class Rerouted:
    """No room for the whole job was found: the attempt continues on a route that begins with a prefill."""

    route: Route


DecodeOutcome = Finished | Moved | Migrated | Full | Refused  # of one call


class Pipeline:
    def __init__(
        self,
        settings: GatewaySettings,
        clients: RpcClients,
        schedulers: SchedulerClient,
        reporter: Reporter,
        lengths: LengthClient,
        queue: PlacementQueue | None = None,
    ) -> None:
        self._settings = settings
        self._lengths = lengths
        self._clients = clients
        self._schedulers = schedulers
        self._reporter = reporter
        self._queue = queue or PlacementQueue()
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
            if route is None:
                route = await self._next_route(job)
            try:
                outcome = await self._attempt(job, route)
                route = outcome.route if isinstance(outcome, Moved) else None
            except PolyphaseError as error:
                route = None
                if job.finished:  # the client has the whole answer; only our record of its end is missing
                    log.warning("lost the end of a finished job", job_id=job.spec.job_id, error=error.message)
                else:
                    self._prepare_another(job, error)

    async def _attempt(self, job: Job, route: Route) -> Finished | Moved:
        """Serve the job on a route."""
        while True:
            route = job.with_whole_items(route)
            job.placed(route)
            self._reporter.report(job)
            if route.prefill is not None:
                return await self._prefill_and_decode(job, route, route.prefill)
            async with StagedKv(self._clients, job) as staged:
                outcome = await self._decode_whole(job, route, staged)
            if not isinstance(outcome, Rerouted):
                return outcome
            route = outcome.route  # of the same attempt: nothing was computed, and nothing has failed

    async def _prefill_and_decode(self, job: Job, route: Route, prefill: InstanceRef) -> Finished | Moved:
        async with StagedKv(self._clients, job) as staged:
            staged.hold(prefill)
            if self._schedulers.several and route.decode is not None:
                _, decode = assignments(job.view(), route, time.time())
                staged.announce(route.decode, decode)
            prefilled = await self._prefill(job, route, prefill, staged)
            if job.finished:
                return Finished()
            if prefilled.handle is None:
                raise self._broken(job, prefill, "staged no KV")
            if prefilled.decode is None:
                target = await self._place_decode(job)
            elif prefilled.decode == route.decode:
                target = _decode_target(route)
            else:
                target = DecodeTarget(prefilled.decode, saved=0, only_if_room=False)
            return await self._decode_staged(job, target, prefilled.handle, staged)

    def _prepare_another(self, job: Job, error: PolyphaseError) -> None:
        """Raises where there is to be no other attempt."""
        job.moved_from = ""  # the instance where it was paused may be the only one left
        if isinstance(error, WrongRole | Busy | NotConnected):
            self._spend_patience(job, RETRY_S, error)  # nothing was lost, but a series of refusals must have an end
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

    async def _next_route(self, job: Job) -> Route:
        """The route of an attempt. A job of which nothing was computed yet waits in the fair queue of its SLO class."""
        if job.begun:
            return await self._place(job)
        return await self._queue.place(job, self._place, self._settings.slo[job.spec.slo.name].queue_s)

    async def _place(self, job: Job, *, decode_only: bool = False) -> Route:
        """A scheduler's route. Without a scheduler or a ready instance the request is repeated, within the patience."""
        over_share = not job.begun and self._queue.shares.over(job.spec.caller, time.monotonic())
        while True:
            began_mono = time.monotonic()
            # Made anew for each call: the job's wait grows, and its predicted length may have arrived.
            view = msgspec.structs.replace(self._view(job, decode_only=decode_only), over_share=over_share)
            try:
                exclude, trace = job.excluded, job.placement_trace
                route = await self._schedulers.place(view, exclude=exclude, timeout_s=PLACE_S, trace=trace)
                break
            except PolyphaseError as error:
                if not error.retriable and not isinstance(error, DeadlineExceeded):
                    raise
                job.failed_instances.clear()  # an instance that failed once is better than none
                job.moved_from = ""
                self._spend_patience(job, time.monotonic() - began_mono, error)
                pause_s = min(max(RETRY_S, job.waited_s / 2), MAX_RETRY_S)
                await asyncio.sleep(pause_s)
                job.waited_s += pause_s
        self._wants_prefix = route.wants_prefix
        job.record_until(Span.PLACEMENT, time.time())
        return route

    def _view(self, job: Job, *, decode_only: bool = False) -> JobView:
        view = job.view(decode_only=decode_only, migrates=self._settings.migration)
        return msgspec.structs.replace(view, prefix=job.prefix) if self._wants_prefix else view

    async def _place_decode(self, job: Job) -> DecodeTarget:
        """Another decode instance for staged KV. If it has no room, the job waits there."""
        route = await self._place(job, decode_only=True)
        return self._dispatched(job, route, only_if_room=False)

    async def _place_with_room(
        self, job: Job, full: InstanceRef, refusal: NoRoom, *, decode_only: bool
    ) -> Route | None:
        """Another route on which the job's KV is expected to find room; None where there is none."""
        job.decided("full", full.instance_id, (Reason(refusal.message, {"code": refusal.code}),))
        view, exclude = self._view(job, decode_only=decode_only), (*job.excluded, full.instance_id)
        try:
            route = await self._schedulers.place(view, exclude=exclude, timeout_s=PLACE_S)
        except PolyphaseError as error:
            log.info("no other decode instance", job_id=job.spec.job_id, reason=error.message)
            return None
        if route.decode is None or not route.has_room:
            return None  # the job would only wait elsewhere
        return route

    async def elsewhere(self, job: Job, instance: InstanceRef, pause_s: float) -> Route:
        """See `gateway.mover.Places`."""
        view = msgspec.structs.replace(self._view(job), pause_s=pause_s)
        # It may return to an instance where it was paused before (`moved_from`): that pause may be over.
        exclude = (*job.failed_instances, instance.instance_id)
        return await self._schedulers.place(view, exclude=exclude, timeout_s=PLACE_S)

    async def target(self, job: Job, instance: InstanceRef, leave: Leave) -> InstanceRef:
        """See `gateway.mover.Places`."""
        spare_share = SPARE_SHARE if leave.cause in WISHED else 0.0
        view = msgspec.structs.replace(
            self._view(job, decode_only=True), leaves=True, tpot_s=leave.tpot_s, spare_share=spare_share
        )
        exclude = (*job.failed_instances, instance.instance_id)
        route = await self._schedulers.place(view, exclude=exclude, timeout_s=PLACE_S, to=leave.to)
        if route.decode is None:
            raise Unavailable("placement named no decode instance")
        return route.decode

    def stays(self, job: Job) -> None:
        """See `gateway.mover.Places`."""
        self._reporter.report(job)

    def _dispatched(self, job: Job, route: Route, *, only_if_room: bool) -> DecodeTarget:
        """The decode instance of a route for staged KV."""
        if route.decode is None:
            raise Unavailable("placement named no decode instance")
        job.decided("dispatch", route.decode.instance_id, route.reasons)
        return DecodeTarget(route.decode, route.decode_saved, only_if_room)

    def _spend_patience(self, job: Job, seconds: float, error: PolyphaseError) -> None:
        """The job was without an instance for so long. Raises OutOfPatience when its patience is used up."""
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
        handle = await self._exported(job, route, staged)
        # Of a job that cannot be carried, one engine has to produce all tokens.
        gives_token = route.split >= job.prompt_tokens and job.spec.carry
        request = PrefillRequest(
            job=job.view(),
            transfer_id=job.transfer_id,
            prompt=beginning(job.prompt, route.split),
            generation=job.spec.generation,
            want_token=gives_token,
            export=not (gives_token and job.remaining <= 1),  # else there is nothing left to decode
            codec=self._settings.kv_codec,
            decode=route.decode,
            exclude=job.excluded,
            dispatch=route.dispatch,
            saved=route.prefill_saved,
            trace=job.wire_trace,
            handle=handle,
        )
        reply = await self._call(job, instance, PREFILL, request, staged.prefetch)
        job.computed(reply.reused, route.split)
        if reply.tokens:
            finish = reply.finish_reason or ("length" if job.remaining <= len(reply.tokens) else "")
            job.accept(TokenStep(reply.tokens, finish, reply.stop_reason, reply.logprobs))
        job.record_prefill(instance.instance_id, reply)
        if handle is not None and reply.transfer is not None:
            self._pulled(job, handle, reply.transfer)
        if reply.decode is not None:
            job.decided("dispatch", reply.decode.instance_id, reply.reasons)
        if reply.codec is not None and reply.handle is not None:
            job.decided("codec", reply.handle.codec.value, (reply.codec,))
        return reply

    # Decode

    async def _exported(self, job: Job, route: Route, staged: "StagedKv") -> KvHandle | None:
        """KV of the prompt's beginning at the instance that holds it, where the route says that it is to be pulled.
        None where the job goes on without: then the beginning is computed.
        """
        pull = route.pull
        if pull is None:
            return None
        transfer_id = f"{job.transfer_id}/p"
        staged.hold(pull.holder, transfer_id)
        request = ExportRequest(transfer_id, prompt=beginning(job.prompt, pull.tokens), generation=job.spec.generation)
        try:
            client = self._clients.to(pull.holder.rpc)
            reply = await client.call(EXPORT, request, timeout_s=min(EXPORT_S, job.left_s))
        except PolyphaseError as error:
            job.decided("pull", "", (Reason(error.message, {"code": error.code}),))
            return None
        if reply.handle is None:
            job.decided("pull", "", (Reason("the holder has dropped it", {"holder": pull.holder.instance_id}),))
        return reply.handle

    def _pulled(self, job: Job, handle: KvHandle, report: TransferReport) -> None:
        """The report of such a pull."""
        job.timeline.transfers.append(report)
        if report.outcome is TransferOutcome.RECOMPUTED:
            log.warning("KV was recomputed", job_id=job.spec.job_id, source=handle.instance_id, error=report.error)

    async def _decode_staged(
        self,
        job: Job,
        target: DecodeTarget,
        handle: KvHandle | None,
        staged: "StagedKv",
        handover: Handover | None = None,
    ) -> Finished | Moved:
        """Decode from staged KV, which other instances fetch if the first does not take the job. handover: of a job
        that has migrated.
        """
        times_full = 0
        while True:
            match await self._decode_at(job, target, handle, handover):
                case Finished() as finished:
                    staged.decoded_on(target.instance)
                    return finished
                case Moved() as moved:
                    return moved
                case Migrated() as migrated:
                    staged.hold(migrated.source, migrated.transfer_id)
                    target, handover, times_full = migrated.target, migrated.handover, 0
                    handle = handover.handle
                case Refused(error):
                    self._spend_patience(job, RETRY_S, error)
                    target = await self._place_decode(job)
                case Full(refusal):
                    times_full += 1
                    route = await self._place_with_room(job, target.instance, refusal, decode_only=True)
                    if route is None:
                        target = replace(target, only_if_room=False)  # the job waits where it is
                    else:
                        staged.left(target.instance)
                        target = self._dispatched(job, route, only_if_room=times_full < MAX_TIMES_FULL)

    async def _decode_whole(self, job: Job, route: Route, staged: "StagedKv") -> Finished | Moved | Rerouted:
        """Have a decode instance compute the whole job, or another one that has room if the first has none."""
        times_full, target = 0, _decode_target(route)
        handle = await self._exported(job, route, staged)
        while True:
            match await self._decode_at(job, target, handle):
                case Finished() | Moved() as outcome:
                    return outcome
                case Migrated(new_target, handover, source, transfer_id):
                    staged.hold(source, transfer_id)
                    return await self._decode_staged(job, new_target, handover.handle, staged, handover)
                case Refused(error):
                    raise error  # there is no KV to keep: it takes another attempt
                case Full(refusal):
                    times_full += 1
                    other = await self._place_with_room(job, target.instance, refusal, decode_only=False)
                    if other is None:
                        target = replace(target, only_if_room=False)  # the job waits where it is
                    elif other.prefill is not None:
                        return Rerouted(other)
                    else:
                        job.placed(other)
                        target = replace(_decode_target(other), only_if_room=times_full < MAX_TIMES_FULL)

    async def _decode_at(
        self, job: Job, target: DecodeTarget, handle: KvHandle | None, handover: Handover | None = None
    ) -> DecodeOutcome:
        """Call one decode instance. Raises the errors by which the attempt is lost."""
        instance = target.instance
        job.phase = Phase.DECODE
        job.decode_instance = instance.instance_id
        job.decodes_at(instance, handle)
        self._reporter.report(job)
        request = DecodeRequest(
            job.view(),
            job.prompt,
            job.spec.generation,
            handle,
            target.saved,
            job.wire_trace,
            job.repeated,
            tell_pauses=True,
            if_room=target.only_if_room,
            resumes=handover is not None and not job.spec.carry,
            state=handover.state if handover is not None and not job.spec.carry else b"",
            tell_leaves=self._settings.migration,
            keep_tokens=target.keep_tokens,
        )
        mover = Mover(job, instance, self._settings.moves, self._clients, self)
        try:
            ended = await mover.run(self._call(job, instance, DECODE, request, job.accept, mover))
        except NoRoom as error:
            return Full(error)
        except (WrongRole, Busy, NotConnected) as error:
            return Refused(error)
        except PolyphaseError:
            if handover is not None:
                job.migrated("lost")
            raise
        if isinstance(ended, Route):
            return Moved(ended)
        job.record_decode(instance.instance_id, ended)
        if handover is not None:
            job.migrated("done")
        if handle is not None and ended.transfer.outcome is TransferOutcome.RECOMPUTED:
            log.warning("KV was recomputed", job_id=job.spec.job_id, error=ended.transfer.error)
        if ended.handover is not None and mover.migration is not None and not job.finished:
            migration = mover.migration
            target = DecodeTarget(migration.target, migration.copied, only_if_room=False)
            return Migrated(target, ended.handover, instance, migration.transfer_id)
        if not job.finished:
            raise self._broken(job, instance, "ended the job without a reason")
        return Finished()

    # Calls

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
        mover: Mover | None = None,
    ) -> Reply:
        """Call an instance for the rest of the job's time. An error is a failure of this instance, and no other; except
        for NoRoom, which is no failure.
        """
        call = job.begin_call(instance)
        if mover is not None:
            call.on_pause, call.on_leave = mover.on_pause, mover.on_leave
        if job.prediction is None:
            # A prediction that arrives now still serves the dispatch of the prompt, and the admission to decode.
            call.on_predicted = partial(self._send_prediction, job, instance)
        began_mono = time.monotonic()
        try:
            reply = await self._clients.to(instance.rpc).call(method, request, timeout_s=job.left_s, on_item=on_item)
        except BaseException as error:
            job.record_failed_call(instance.instance_id, error)
            if isinstance(error, PolyphaseError) and not isinstance(error, NoRoom):
                job.failed_instances.append(instance.instance_id)
            if isinstance(error, NotConnected):
                self._spend_patience(job, time.monotonic() - began_mono, error)
            raise
        finally:
            call.on_pause = call.on_leave = call.on_predicted = None
        call.instance = None
        return reply

    def _send_prediction(self, job: Job, instance: InstanceRef, prediction: LengthPrediction) -> None:
        self._clients.to(instance.rpc).notify(PREDICTED, Predicted(job.transfer_id, prediction, job.spec.job_id))


def _decode_target(route: Route) -> DecodeTarget:
    assert route.decode is not None
    return DecodeTarget(route.decode, route.decode_saved, route.has_room, route.keep_tokens)


class StagedKv:
    """What one attempt holds on instances: KV staged by its prefill or for other pulls of it, the fetches of it by
    decode instances, and the place that one of them reserves for it.

    Entered before the first call. All is released at the end, except where `decoded_on` says that it is gone;
    also where the prefill's reply and its cancellation cross, because the gateway chose the transfer id.
    """

    def __init__(self, clients: RpcClients, job: Job) -> None:
        self._clients = clients
        self._job = job
        self._transfer_id = job.transfer_id
        self._held: set[tuple[str, str]] = set()  # addresses of the instances that hold something, and of what transfer
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for address, transfer_id in self._held:
            self._clients.to(address).notify(RELEASE, ReleaseRequest([transfer_id]))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks)

    def hold(self, instance: InstanceRef, transfer_id: str = "") -> None:
        """The instance is about to hold something: of that transfer, by default the attempt's own."""
        self._held.add((instance.rpc, transfer_id or self._transfer_id))

    def announce(self, decode: InstanceRef, assignment: Assignment) -> None:
        """Announce the job to the decode instance, so that the load of the instance shows it to all schedulers."""
        self.hold(decode)
        request = ExpectRequest(self._transfer_id, promise_of(assignment), keep_s=self._job.left_s)
        client = self._clients.to(decode.rpc)
        if client.connected:
            client.notify(EXPECT, request)
        else:  # a notification would be lost
            self._start(client, EXPECT, request, ANNOUNCE_S)

    def prefetch(self, started: PrefillStarted) -> None:
        """Have the decode instance fetch KV during the prefill; a failure or delay only costs the overlap."""
        self.hold(started.decode)
        left_s = self._job.left_s
        request = PrefetchRequest(started.handle, keep_s=left_s)
        self._start(self._clients.to(started.decode.rpc), PREFETCH, request, left_s)

    def left(self, decode: InstanceRef) -> None:
        """The job continues elsewhere: release what the instance has fetched for it and reserves for it."""
        self._clients.to(decode.rpc).notify(RELEASE, ReleaseRequest([self._transfer_id]))
        self._held.discard((decode.rpc, self._transfer_id))

    def decoded_on(self, decode: InstanceRef) -> None:
        """A decode has ended there, and with it what was fetched for it.

        The prefill instance gets its release nevertheless: its connection to the importer may be broken.
        """
        self._held.discard((decode.rpc, self._transfer_id))

    def _start(self, client: RpcClient, method: Method[Request, Any, Any], request: Request, timeout_s: float) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(self._call(client, method, request, timeout_s)))

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
