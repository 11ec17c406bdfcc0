"""The one file that knows the order of the steps: place, prefill, transfer, decode; and what follows a failure.

The pipeline owns the job: its deadline, the cancellation of every leg, and the tokens that the client already has.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
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
from shared.policy.assignment import Assignment, assignments, promise_of
from shared.policy.fair_share import FairLine, Ledger, Shares
from shared.policy.overload import MOVE_LEAST_S, steps_aside
from shared.runtime.logs import get_log
from shared.timeline import Span, clock_shift_s
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.messages import (
    DECODE,
    EXPECT,
    PREDICTED,
    PREFETCH,
    PREFILL,
    RELEASE,
    DecodeReply,
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

# MERGED staged.py
# What one attempt holds on instances: KV staged by its prefill, fetches of it that decode instances have begun, and
# the place that one of them keeps for it.

ANNOUNCE_S = 2.0  # for the connection to a decode instance that is new to this gateway


class StagedKv:
    """Entered before the prefill is called. At the end all is released but what `ended_on` says is gone.

    That holds for every end, also where the prefill's reply and its cancellation cross: the id is the gateway's own.
    """

    def __init__(self, clients: RpcClients, job: Job, prefill: InstanceRef) -> None:
        self._clients = clients
        self._job = job
        self._transfer_id = job.transfer_id
        self._prefill = prefill
        self._holders = {prefill.rpc}
        self._fetches: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for address in self._holders:
            self._clients.to(address).notify(RELEASE, ReleaseRequest([self._transfer_id]))
        for fetch in self._fetches:
            fetch.cancel()
        if self._fetches:
            await asyncio.gather(*self._fetches)

    def announce(self, decode: InstanceRef, bound: Assignment) -> None:
        """Tell the decode instance what will come to it, so that its load shows that to all schedulers."""
        self._holders.add(decode.rpc)
        request = ExpectRequest(self._transfer_id, promise_of(bound), keep_s=self._job.left_s)
        client = self._clients.to(decode.rpc)
        if client.connected:
            client.notify(EXPECT, request)
        else:  # a notification would be lost
            self._fetches.append(asyncio.get_running_loop().create_task(self._announce(client, request)))

    def prefetch(self, started: PrefillStarted) -> None:
        """Have the decode instance fetch while the prefill goes on; what fails or is late only costs the overlap."""
        self._holders.add(started.decode.rpc)
        self._fetches.append(asyncio.get_running_loop().create_task(self._prefetch(started)))

    def ended_on(self, decode: InstanceRef) -> None:
        """A decode has ended there, and what had been fetched for it with it.

        The prefill instance is told all the same: that the KV was pulled, it heard by a connection that may be broken.
        """
        self._holders.discard(decode.rpc)

    async def _announce(self, client: RpcClient, request: ExpectRequest) -> None:
        try:
            await client.call(EXPECT, request, timeout_s=ANNOUNCE_S)
        except asyncio.CancelledError:
            return  # by us, at the end of the attempt
        except PolyphaseError as error:
            log.info("a decode is not announced", transfer_id=self._transfer_id, error=error.message)

    async def _prefetch(self, started: PrefillStarted) -> None:
        client = self._clients.to(started.decode.rpc)
        try:
            request = PrefetchRequest(started.handle, keep_s=self._job.left_s)
            await client.call(PREFETCH, request, timeout_s=self._job.left_s)
        except asyncio.CancelledError:
            return  # by us, at the end of the attempt
        except PolyphaseError as error:
            log.info("prefetch failed", transfer_id=self._transfer_id, error=error.message)


# MERGED lines.py
# The lines of jobs that wait for their place: one a class, fair between callers, and only its head asks. Those that
# step aside for others of their class (`shared.policy.overload.steps_aside`) have a line of their own.


class Lines:
    """A job that waits costs one entry and nothing a second. `shares`: what each caller has had, of any class."""

    def __init__(self, weights: Mapping[str, float] | None = None, ledger: Ledger | None = None) -> None:
        """ledger: of the processes that share this one's port."""
        self.shares = Shares(weights, ledger)
        self._lines: dict[tuple[str, bool], FairLine[asyncio.Event]] = {}  # by class, and whether they stepped aside

    def waiting(self, slo: str) -> int:
        """How many jobs of that class wait, those that ask included."""
        return sum(len(line) for (name, _), line in self._lines.items() if name == slo)

    def queued(self, slo: str) -> bool:
        """Whether a job of that class that comes now has others before it."""
        line = self._lines.get((slo, False))
        return line is not None and len(line) > 0

    @asynccontextmanager
    async def turn(self, slo: str, caller: str, *, aside: bool = False) -> AsyncIterator[None]:
        """The block is entered when it is this job's turn to ask, and its end is the next one's turn."""
        line = self._lines.get((slo, aside))
        if line is None:
            line = self._lines[slo, aside] = FairLine(self.shares)
        turn = asyncio.Event()
        line.push(turn, caller)
        _call(line)
        try:
            await turn.wait()
            yield
        finally:
            line.remove(turn, caller)
            _call(line)


def _call(line: FairLine[asyncio.Event]) -> None:
    if (head := line.head()) is not None:
        head.set()


# MERGED spans.py
# Where the time of a job's legs went, on the gateway's clock: stretches that leave no gap before its first token.


def prefill_ended(job: Job, instance_id: str, reply: PrefillReply) -> None:
    """Take in the times of a prefill that has just replied."""
    replied_s = time.time()
    shift_s = clock_shift_s(reply.queued_s, reply.ended_s, job.mark_s, replied_s)
    for span, until_s in (
        (Span.HANDOVER, reply.queued_s),
        (Span.QUEUE, reply.started_s),
        (Span.PREFILL, reply.ended_s),
    ):
        job.spent(span, min(until_s + shift_s, replied_s), instance_id)
    job.spent(Span.REPLY, replied_s, instance_id)


def decode_ended(job: Job, instance_id: str, reply: DecodeReply) -> None:
    """Take in the times of a decode that has just replied, and its transfer: the wait until there was room for its KV,
    the transfer itself, and the wait from when the KV was there to the end of the first step are apart.
    """
    replied_s = time.time()
    shift_s = clock_shift_s(reply.queued_s, reply.ended_s, job.mark_s, replied_s)
    transfer = reply.transfer
    job.spent(Span.HANDOVER, reply.queued_s + shift_s, instance_id)
    first_step_s = job.leg_first_step_s or replied_s
    if transfer.started_s:
        transfer = msgspec.structs.replace(
            transfer, started_s=transfer.started_s + shift_s, ended_s=transfer.ended_s + shift_s
        )
        if transfer.started_s > job.mark_s:  # else it was fetched beforehand
            job.spent_here(Span.DECODE_QUEUE, min(transfer.started_s, first_step_s), instance_id)
        job.record(Span.TRANSFER, transfer.started_s, transfer.ended_s, instance_id)
    job.timeline.transfers.append(transfer)
    job.spent_here(Span.DECODE_QUEUE, min(reply.started_s + shift_s, first_step_s), instance_id)
    if job.timeline.first_token_s == first_step_s:
        job.spent(Span.REPLY, first_step_s, instance_id)
    job.spent_here(Span.DECODE, min(reply.ended_s + shift_s, replied_s), instance_id)


def leg_broke_off(job: Job, instance_id: str, error: BaseException) -> None:
    """A leg ended without a reply: it failed, or was cancelled because the client has enough or is gone."""
    now_s = time.time()
    if job.trace is not None and isinstance(error, PolyphaseError):
        job.trace.leg_lost(instance_id, job.mark_s, now_s, error.code)
    job.end_pause(now_s)
    first_s = job.leg_first_step_s or (job.pauses[0].began_s if job.pauses else 0.0)
    if first_s:
        job.spent_here(Span.DECODE_QUEUE, first_s, instance_id)
        job.spent_here(Span.DECODE, now_s, instance_id)
    else:
        job.spent(Span.LOST, now_s, instance_id)


log = get_log(__name__)
Request = TypeVar("Request")
Reply = TypeVar("Reply")
Item = TypeVar("Item")
PLACE_S = 2.0
RETRY_S = 0.1
RETRY_AT_MOST_S = 0.5
MOST_MOVES = 3  # of a job from decode instances that turn out to have no room for it; the next one lets it wait


class _Moving:
    """Of a job that decodes: each time its instance says that the job is paused, a scheduler is asked for another
    place. Once there is a better one, `route` is set and the leg ends.

    Entered around the leg. A job stays where a token came meanwhile, or where its KV is being computed again.
    """

    def __init__(self, pipeline: "Pipeline", job: Job, instance: InstanceRef, leg: asyncio.Timeout) -> None:
        self.route: Route | None = None
        self._pipeline = pipeline
        self._job = job
        self._instance = instance
        self._leg = leg
        self._asking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._job.on_pause = self._paused
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._job.on_pause = None
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking)

    def _paused(self, pause: Pause) -> None:
        asks = self._asking is not None and not self._asking.done()
        if asks or pause.computing or pause.expected_s < MOVE_LEAST_S or not self._pipeline.may_move(self._job):
            return
        self._asking = asyncio.get_running_loop().create_task(self._ask(pause))

    async def _ask(self, pause: Pause) -> None:
        job, instance_id, paused = self._job, self._instance.instance_id, self._job.paused
        try:
            route = await self._pipeline.place_elsewhere(job, instance_id, pause.expected_s)
        except asyncio.CancelledError:
            return  # by us, at the end of the leg
        except PolyphaseError as error:
            log.debug("a paused job stays", job_id=job.spec.job_id, instance_id=instance_id, reason=error.message)
            return
        if paused is None or job.paused is not paused or paused.computed_s:
            self._pipeline.stays(job)
            return
        log.info("a paused job moves", job_id=job.spec.job_id, instance_id=instance_id, tokens=len(job.tokens))
        job.moving(instance_id, time.time() - paused.began_s, pause, route)
        self.route = route
        self._leg.reschedule(asyncio.get_running_loop().time())


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
        route: Route | None = None
        while not job.finished:
            job.begin_attempt()
            route = route or await self._place_in_turn(job)
            try:
                route = await self._attempt(job, route)
            except PolyphaseError as error:
                route = None
                if job.finished:  # the client has it all; only our record of the end is missing
                    log.warning("lost the end of a finished job", job_id=job.spec.job_id, error=error.message)
                else:
                    self._prepare_another(job, error)

    def _prepare_another(self, job: Job, error: PolyphaseError) -> None:
        job.moved_from = ""  # where it was paused may be all that is left
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

    async def _attempt(self, job: Job, route: Route) -> Route | None:
        """Serve the job on a route. Another one where it was paused and goes on there."""
        job.placed(route)
        self._reporter.report(job)
        if route.prefill is None:
            return await self._decode_where_there_is_room(job, route)
        async with StagedKv(self._clients, job, route.prefill) as staged:
            if self._schedulers.several and route.decode is not None:
                bound = next(one for one in assignments(job.view(), route, time.time()) if one.coming)
                staged.announce(route.decode, bound)
            prefilled = await self._prefill(job, route, route.prefill, staged)
            if job.finished:
                return None
            if prefilled.handle is None:
                raise self._broken(job, route.prefill, "staged no KV")
            return await self._decode_somewhere(job, route, prefilled.decode, prefilled.handle, staged)

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
        view = msgspec.structs.replace(self._view(job, decode_only=decode_only), over_share=over_share)
        while True:
            asked_s = time.monotonic()
            try:
                exclude, trace = job.excluded, job.placement_trace
                route = await self._schedulers.place(view, exclude=exclude, timeout_s=PLACE_S, trace=trace)
                break
            except PolyphaseError as error:
                if not error.retriable and not isinstance(error, DeadlineExceeded):
                    raise
                job.failed_instances.clear()  # an instance that failed once is better than none
                job.moved_from = ""
                self._waited(job, time.monotonic() - asked_s, error)
                pause_s = min(max(RETRY_S, job.waited_s / 2), RETRY_AT_MOST_S)
                await asyncio.sleep(pause_s)
                job.waited_s += pause_s
        self._wants_prefix = route.wants_prefix
        job.spent(Span.PLACEMENT, time.time())
        return route

    def may_move(self, job: Job) -> bool:
        """Whether the job goes on elsewhere when it is paused. One that cannot be carried would have to repeat its
        tokens one by one there.
        """
        spec = job.spec
        return spec.carry and not spec.local_only and bool(job.tokens) and job.moves < self._settings.moves

    async def place_elsewhere(self, job: Job, instance_id: str, pause_s: float) -> Route:
        """A route on which a job that is paused there for `pause_s` more goes on clearly sooner. Raises Stays, and what
        a placement raises.
        """
        view = msgspec.structs.replace(self._view(job), pause_s=pause_s)
        exclude = (*job.failed_instances, instance_id)
        return await self._schedulers.place(view, exclude=exclude, timeout_s=PLACE_S)

    def stays(self, job: Job) -> None:
        """The job does not take the place that it was given: the scheduler hears where it decodes."""
        self._reporter.report(job)

    def _view(self, job: Job, *, decode_only: bool = False) -> JobView:
        """What a scheduler is to know of the job."""
        view = job.view(decode_only=decode_only)
        return msgspec.structs.replace(view, prefix=job.prefix) if self._wants_prefix else view

    def _waited(self, job: Job, seconds: float, error: PolyphaseError) -> None:
        """Count time without an instance. There is one patience for all of it, and a token renews it."""
        job.waited_s += seconds
        if job.waited_s >= self._settings.patience_s:
            raise OutOfPatience(
                f"no instance took the job for {self._settings.patience_s:g} s: {error.message}", retry_after_s=2.0
            ) from error

    async def _prefill(self, job: Job, route: Route, instance: InstanceRef, staged: StagedKv) -> PrefillReply:
        job.phase = Phase.PREFILL
        if self._lengths.beside and job.prediction is None:
            job.ask(self._lengths, instance.instance_id)
            await self._lengths.before_prefill(job.asked, job.ttft_left_s)
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
        with job.asked.meanwhile(lambda found: self._tell(instance, job, found)):
            reply = await self._call(job, instance, PREFILL, request, staged.prefetch)
        job.reuses(reply.reused, route.split)
        if reply.tokens:
            finish = reply.finish_reason or ("length" if job.remaining <= len(reply.tokens) else "")
            job.accept(TokenStep(reply.tokens, finish, reply.stop_reason, reply.logprobs))
        prefill_ended(job, instance.instance_id, reply)
        if reply.decode is not None:
            job.decided("dispatch", reply.decode.instance_id, reply.reasons)
        if reply.codec is not None and reply.handle is not None:
            job.decided("codec", reply.handle.codec.value, (reply.codec,))
        return reply

    def _tell(self, instance: InstanceRef, job: Job, found: LengthPrediction) -> None:
        """What came after the placement is not too late for the dispatch of a prompt, nor for decode admission."""
        self._clients.to(instance.rpc).notify(PREDICTED, Predicted(job.transfer_id, found, job.spec.job_id))

    async def _decode_where_there_is_room(self, job: Job, route: Route) -> Route | None:
        """One instance does it all. Where it has no room after all, the job is placed again as long as another has. See
        `_attempt`.
        """
        moves, if_room = 0, route.has_room
        while True:
            assert route.decode is not None
            try:
                return await self._decode(job, route.decode, None, route.decode_saved, if_room=if_room)
            except NoRoom as refusal:
                found = await self._with_room(job, refusal, decode_only=False)
            if found is not None and found.prefill is not None:
                return await self._attempt(job, found)
            moves += 1
            route, if_room = found or route, found is not None and moves < MOST_MOVES
            if found is not None:
                job.placed(route)

    async def _decode_somewhere(
        self, job: Job, route: Route, instance: InstanceRef | None, handle: KvHandle, staged: StagedKv
    ) -> Route | None:
        """Decode; an instance that refuses, or is not there, leaves the same KV to another one. So does one that has no
        room for it, where another one has. See `_attempt`.
        """
        moves, if_room = 0, route.has_room and instance == route.decode
        saved = route.decode_saved if instance == route.decode else 0
        while True:
            if instance is None:
                placed = await self._place(job, decode_only=True)
                instance, saved, if_room = self._dispatched(job, placed), placed.decode_saved, False
            try:
                moves_to = await self._decode(job, instance, handle, saved, if_room=if_room)
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
                if moves_to is None:
                    staged.ended_on(instance)
                return moves_to

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
    ) -> Route | None:
        """Decode to the end, or until the job is paused and goes on by the route that is returned. Raises NoRoom where
        `if_room` and the instance finds that it has none.
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
            job.known,
            tell_pauses=True,
            if_room=if_room,
        )
        try:
            async with asyncio.timeout(None) as leg, _Moving(self, job, instance, leg) as moving:
                with job.asked.meanwhile(lambda found: self._tell(instance, job, found)):
                    reply = await self._call(job, instance, DECODE, request, job.accept)
        except TimeoutError:
            if not leg.expired():
                raise
            return moving.route
        decode_ended(job, instance.instance_id, reply)
        if handle is not None and reply.transfer.outcome is TransferOutcome.RECOMPUTED:
            log.warning("KV was recomputed", job_id=job.spec.job_id, error=reply.transfer.error)
        if not job.finished:
            raise self._broken(job, instance, "ended the job without a reason")
        return None

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
        job.begin_leg(instance)
        began_s = time.monotonic()
        try:
            reply = await self._clients.to(instance.rpc).call(method, request, timeout_s=job.left_s, on_item=on_item)
        except BaseException as error:
            leg_broke_off(job, instance.instance_id, error)
            if isinstance(error, PolyphaseError):
                job.failed_instances.append(instance.instance_id)
            if isinstance(error, NotConnected):
                self._waited(job, time.monotonic() - began_s, error)
            raise
        job.leg_instance = None
        return reply
