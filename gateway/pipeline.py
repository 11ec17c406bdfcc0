"""The one file that knows the order of the steps: place, prefill, transfer, decode; and what follows a failure.

The pipeline owns the job: its deadline, the cancellation of every leg, and the tokens that the client already has.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from gateway import spans
from gateway.job import Job
from gateway.lengths import LengthClient
from gateway.lines import Lines
from gateway.reports import Reporter
from gateway.settings import GatewaySettings
from gateway.staged import StagedKv
from shared.domain.job import LengthPrediction, Phase, WhenFull
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
from shared.policy.assignment import assignments
from shared.policy.overload import steps_aside
from shared.runtime.logs import get_log
from shared.timeline import Span
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.messages import DecodeRequest, Predicted, PrefillReply, PrefillRequest, TokenStep
from shared.wire.methods import DECODE, PREDICTED, PREFILL, Method
from shared.wire.rpc_clients import RpcClients

log = get_log(__name__)
Request = TypeVar("Request")
Reply = TypeVar("Reply")
Item = TypeVar("Item")
PLACE_S = 2.0
RETRY_S = 0.1
RETRY_AT_MOST_S = 0.5
MOST_MOVES = 3  # of a job from decode instances that turn out to have no room for it; the next one lets it wait


class OutOfPatience(Unavailable):
    """No instance took the job for as long as it may wait for one."""

    retriable = False


class Pipeline:
    """Runs jobs to their end. `run` returns when the client has everything, or raises why it cannot."""

    def __init__(
        self,
        settings: GatewaySettings,
        clients: RpcClients,
        schedulers: SchedulerClient,
        reporter: Reporter,
        lengths: LengthClient,
        lines: Lines | None = None,
    ) -> None:
        self._settings = settings
        self._lengths = lengths
        self._clients = clients
        self._schedulers = schedulers
        self._reporter = reporter
        self._lines = lines or Lines()
        self._wants_prefix = False  # as the last route said

    async def run(self, job: Job) -> None:
        """Serve the job, again after each failure that another attempt can mend.

        Raises the last error once attempts, patience or the deadline are used up. Cancelling stops both legs.
        """
        job.spent(Span.INTAKE, time.time())
        job.ask(self._lengths)
        shares, caller = self._lines.shares, job.spec.caller
        shares.came(caller, time.monotonic())
        outcome = PolyphaseError.code  # of a bug of ours: the status table must not show the job as under way for ever
        try:
            async with asyncio.timeout(job.left_s):
                await self._lengths.soon(job.asked, job.ttft_left_s)
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
            job.asked.cancel()
            shares.charge(caller, 0, len(job.tokens))
            shares.left(caller, time.monotonic())
            self._ended(job, outcome)

    def _ended(self, job: Job, outcome: str) -> None:
        job.ended(outcome)
        self._reporter.report(job, job.timeline.outcome)

    async def _attempts(self, job: Job) -> None:
        while not job.finished:
            job.begin_attempt()
            route = await self._place_in_turn(job)
            try:
                await self._attempt(job, route)
            except PolyphaseError as error:
                if job.finished:  # the client has it all; only our record of the end is missing
                    log.warning("lost the end of a finished job", job_id=job.spec.job_id, error=error.message)
                else:
                    self._prepare_another(job, error)

    def _prepare_another(self, job: Job, error: PolyphaseError) -> None:
        if isinstance(error, WrongRole | Busy | NotConnected):
            self._waited(job, RETRY_S, error)  # nothing was lost, but refusals in turn must not take for ever
        elif error.retriable:
            job.lose()
            self._refuse_killer(job, error)
        if not error.retriable:
            raise error
        log.info("attempt failed", job_id=job.spec.job_id, attempt=job.attempt, error=error.message)
        job.resumes(error)

    def _refuse_killer(self, job: Job, error: PolyphaseError) -> None:
        """End a job that has lost too much. One that took several instances with it may be what ends them."""
        s, count = self._settings, len(job.tokens)
        names = job.lost_since(count)
        where = f"at output token {count}, fewer than {s.losses_at_one_token} are allowed at one token"
        if len(names) < s.losses_at_one_token:
            open_losses = job.open_losses(s.loss_forgiven_tokens)
            if open_losses < s.attempts:
                return
            names = job.lost_since(0)
            where = f"up to output token {count}, fewer than {s.attempts} losses are allowed"
        if len(names) < 2:
            raise error
        raise InstancesLost(
            f"the request lost {len(names)} instances ({', '.join(names)}) {where}; it may be what ends them and is "
            f"not tried again: send another request, or report this one; the last error was: {error.message}"
        ) from error

    async def _attempt(self, job: Job, route: Route) -> None:
        job.placed(route)
        self._reporter.report(job)
        if route.prefill is None:
            await self._decode_where_there_is_room(job, route)
            return
        async with StagedKv(self._clients, job, route.prefill) as staged:
            if self._schedulers.several and route.decode is not None:
                bound = next(one for one in assignments(job.view(), route, time.time()) if one.coming)
                staged.announce(route.decode, bound)
            prefilled = await self._prefill(job, route, route.prefill, staged)
            if job.finished:
                return
            if prefilled.handle is None:
                raise self._broken(job, route.prefill, "staged no KV")
            await self._decode_somewhere(job, route, prefilled.decode, prefilled.handle, staged)

    async def _place_in_turn(self, job: Job) -> Route:
        """A route. A job that has not begun waits for room at a decode instance before anything of it is computed, and
        one of a class that yields for heavier classes, too. Of those that wait only the first of each class asks.
        """
        slo = job.spec.slo
        if job.begun:
            return await self._place(job)
        yields = slo.when_full is WhenFull.DELAY
        route = None if yields or self._lines.queued(slo.name) else await self._place_at_once(job)
        if route is None:
            queue_s = self._settings.slo[slo.name].queue_s if yields else None
            try:
                async with asyncio.timeout(queue_s) as limit:
                    route = await self._place_in_line(job)
            except TimeoutError:
                if not limit.expired():
                    raise
                said = f"no room beside heavier classes for {queue_s:g} s (SLO class {slo.name!r})"
                raise Overloaded(said, cause="queue", retry_after_s=queue_s) from None
        self._lines.shares.charge(job.spec.caller, job.prompt_tokens, 0)
        return route

    async def _place_in_line(self, job: Job) -> Route:
        """One whose first token will be late leaves the line to those behind it that may still be in time."""
        slo, caller = job.spec.slo, job.spec.caller
        async with self._lines.turn(slo.name, caller):
            route = await self._place_when_told(job, aside=False)
        if route is None:
            async with self._lines.turn(slo.name, caller, aside=True):
                route = await self._place_when_told(job, aside=True)
        assert route is not None
        return route

    async def _place_at_once(self, job: Job) -> Route | None:
        """A route; None where the job is to wait."""
        try:
            return await self._place(job)
        except Delayed as delay:
            job.delayed(delay)
            return None

    async def _place_when_told(self, job: Job, *, aside: bool) -> Route | None:
        """A route; None where the job steps aside, which it does once."""
        while True:
            try:
                return await self._place(job)
            except Delayed as delay:
                job.delayed(delay)
                again_s = delay.retry_after_s or RETRY_AT_MOST_S
                if not aside and steps_aside(job.spec.slo, job.spec.slo.ttft_s - job.ttft_left_s, again_s):
                    return None
                await asyncio.sleep(again_s)

    async def _place(self, job: Job, *, decode_only: bool = False) -> Route:
        """Ask a scheduler for a route; while none answers or nothing is ready, ask again for `patience_s`."""
        over_share = not job.begun and self._lines.shares.over(job.spec.caller, time.monotonic())
        view = msgspec.structs.replace(job.view(decode_only=decode_only), over_share=over_share)
        if self._wants_prefix:
            view = msgspec.structs.replace(view, prefix=job.prefix)
        while True:
            asked_s = time.monotonic()
            try:
                exclude, trace = tuple(job.failed_instances), job.placement_trace
                route = await self._schedulers.place(view, exclude=exclude, timeout_s=PLACE_S, trace=trace)
                break
            except PolyphaseError as error:
                if not error.retriable and not isinstance(error, DeadlineExceeded):
                    raise
                job.failed_instances.clear()  # an instance that failed once is better than none
                self._waited(job, time.monotonic() - asked_s, error)
                pause_s = min(max(RETRY_S, job.waited_s / 2), RETRY_AT_MOST_S)
                await asyncio.sleep(pause_s)
                job.waited_s += pause_s
        self._wants_prefix = route.wants_prefix
        job.spent(Span.PLACEMENT, time.time())
        return route

    def _waited(self, job: Job, seconds: float, error: PolyphaseError) -> None:
        """Count time without an instance. There is one patience for all of it, and a token renews it."""
        job.waited_s += seconds
        if job.waited_s >= self._settings.patience_s:
            raise OutOfPatience(
                f"no instance took the job for {self._settings.patience_s:g} s: {error.message}", retry_after_s=2.0
            ) from error

    async def _prefill(self, job: Job, route: Route, instance: InstanceRef, staged: StagedKv) -> PrefillReply:
        job.phase = Phase.PREFILL
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
            exclude=tuple(job.failed_instances),
            dispatch=route.dispatch,
            saved=route.prefill_saved,
            trace=job.wire_trace,
        )
        with job.asked.meanwhile(lambda found: self._tell(instance, job, found)):
            reply = await self._call(job, instance, PREFILL, request, staged.prefetch)
        if reply.tokens:
            finish = reply.finish_reason or ("length" if job.remaining <= len(reply.tokens) else "")
            job.accept(TokenStep(reply.tokens, finish, reply.stop_reason, reply.logprobs))
        spans.prefill_ended(job, instance.instance_id, reply)
        if reply.decode is not None:
            job.decided("dispatch", reply.decode.instance_id, reply.reasons)
        if reply.codec is not None and reply.handle is not None:
            job.decided("codec", reply.handle.codec.value, (reply.codec,))
        return reply

    def _tell(self, instance: InstanceRef, job: Job, found: LengthPrediction) -> None:
        """What came after the placement is not too late for the dispatch of a prompt, nor for decode admission."""
        self._clients.to(instance.rpc).notify(PREDICTED, Predicted(job.transfer_id, found, job.spec.job_id))

    async def _decode_where_there_is_room(self, job: Job, route: Route) -> None:
        """One instance does it all. Where it has no room after all, the job is placed again as long as another has."""
        moves, if_room = 0, route.has_room
        while True:
            assert route.decode is not None
            try:
                await self._decode(job, route.decode, None, route.decode_saved, if_room=if_room)
            except NoRoom as refusal:
                found = await self._with_room(job, refusal, decode_only=False)
                if found is not None and found.prefill is not None:
                    await self._attempt(job, found)
                    return
                moves += 1
                route, if_room = found or route, found is not None and moves < MOST_MOVES
                if found is not None:
                    job.placed(route)
            else:
                return

    async def _decode_somewhere(
        self, job: Job, route: Route, instance: InstanceRef | None, handle: KvHandle, staged: StagedKv
    ) -> None:
        """Decode; an instance that refuses, or is not there, leaves the same KV to another one. So does one that has no
        room for it, where another one has.
        """
        moves, if_room = 0, route.has_room and instance == route.decode
        saved = route.decode_saved if instance == route.decode else 0
        while True:
            if instance is None:
                placed = await self._place(job, decode_only=True)
                instance, saved, if_room = self._dispatched(job, placed), placed.decode_saved, False
            try:
                await self._decode(job, instance, handle, saved, if_room=if_room)
            except NoRoom as refusal:
                other = await self._with_room(job, refusal, decode_only=True)
                moves += 1
                if other is not None:
                    instance, saved = self._dispatched(job, other), other.decode_saved
                if_room = other is not None and moves < MOST_MOVES
            except (WrongRole, Busy, NotConnected) as refusal:
                self._waited(job, RETRY_S, refusal)
                instance = None
            else:
                staged.ended_on(instance)
                return

    async def _with_room(self, job: Job, refusal: NoRoom, *, decode_only: bool) -> Route | None:
        """Another route, on which the job's KV is expected to find room; None where there is none."""
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
    ) -> None:
        """Raises NoRoom where `if_room` and the instance finds that it has none."""
        job.phase = Phase.DECODE
        job.decode_instance = instance.instance_id
        self._reporter.report(job)
        trace, known = job.wire_trace, job.known
        request = DecodeRequest(job.view(), job.prompt, job.spec.generation, handle, saved, trace, known, if_room)
        with job.asked.meanwhile(lambda found: self._tell(instance, job, found)):
            reply = await self._call(job, instance, DECODE, request, job.accept)
        spans.decode_ended(job, instance.instance_id, reply)
        if handle is not None and reply.transfer.outcome is TransferOutcome.RECOMPUTED:
            log.warning("KV was recomputed", job_id=job.spec.job_id, error=reply.transfer.error)
        if not job.finished:
            raise self._broken(job, instance, "ended the job without a reason")

    def _broken(self, job: Job, instance: InstanceRef, what: str) -> EngineFailed:
        job.failed_instances.append(instance.instance_id)
        job.leg_instance = instance
        return EngineFailed(f"{instance.instance_id} {what}")

    async def _call(
        self,
        job: Job,
        instance: InstanceRef,
        method: Method[Request, Reply, Item],
        request: Request,
        on_item: Callable[[Any], None],
    ) -> Reply:
        """One leg, for what is left of the job's time. What fails in it is its instance's failure and no other's."""
        job.leg_first_step_s = 0.0
        job.leg_instance = instance
        began_s = time.monotonic()
        try:
            reply = await self._clients.to(instance.rpc).call(method, request, timeout_s=job.left_s, on_item=on_item)
        except BaseException as error:
            spans.leg_broke_off(job, instance.instance_id, error)
            if isinstance(error, PolyphaseError):
                job.failed_instances.append(instance.instance_id)
            if isinstance(error, NotConnected):
                self._waited(job, time.monotonic() - began_s, error)
            raise
        job.leg_instance = None
        return reply
