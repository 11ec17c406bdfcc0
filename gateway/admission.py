"""Bounds and orders the work that waits in the gateway, and holds the state of each HTTP request.

Waiting work is counted in jobs and prompt tokens, with a fair share for each caller. A request is admitted at its
headers (`Admission.admit`), claims its jobs once their number is known (`RequestState.claim`), and starts them one by
one (`RequestState.start_job`). `RequestState` is also what the layers on either side of vLLM's handlers know of a
request: vLLM passes no object of ours down to the engine client, so the state follows the request's tasks in the one
context variable `current_request`.

Jobs that started and that the scheduler delays wait in the `PlacementQueue`.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gateway.connection import BodyWriter
from gateway.job import Job
from gateway.settings import GatewaySettings
from gateway.table import Counts, Kind, LocalTable, Table
from shared.domain.job import WhenFull
from shared.domain.route import Route
from shared.errors import Busy, Delayed, InvalidRequest, Overloaded, PolyphaseError
from shared.policy.fair_queue import FairQueue, Line, Waiter, excess_jobs, excess_tokens, retry_s
from shared.policy.fair_share import Ledger, TokenCounters

if TYPE_CHECKING:
    from gateway.media import EncodedMedia
    from gateway.plain_stream import PlainStream
    from gateway.tracing import RequestTrace

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
Place = Callable[[Job], Awaitable[Route]]  # requests a route; raises Delayed


class Admissions:
    """Two queues of bounded size: one for the SLO classes that yield, and one for all others, so that jobs that wait
    for long leave room to the others. Both bound the bytes of bodies together.
    """

    def __init__(self, settings: GatewaySettings, callers: Collection[str], table: Table | None = None) -> None:
        """callers: the names of all API keys, a collection that follows the file of keys; empty without keys."""
        table = table or LocalTable()
        self._yielding = {name for name, slo in settings.slo.items() if slo.when_full is WhenFull.DELAY}
        self._delayed = Admission(
            settings, Counts(table, Kind.DELAYED), callers, settings.max_delayed_jobs, settings.max_delayed_tokens
        )
        self._others = Admission(
            settings, Counts(table, Kind.OTHERS), callers, settings.max_queued_jobs, settings.max_queued_tokens
        )
        self.held_bytes = HeldBytes(settings, callers)

    def for_class(self, slo: str) -> "Admission":
        return self._delayed if slo in self._yielding else self._others

    @property
    def own_jobs(self) -> int:
        """The waiting jobs of this process."""
        return self._delayed.counts.own_jobs + self._others.counts.own_jobs

    @property
    def jobs(self) -> int:
        """The waiting jobs of all processes."""
        return self._delayed.counts.jobs + self._others.counts.jobs

    @property
    def tokens(self) -> int:
        """The prompt tokens of the waiting jobs of all processes."""
        return self._delayed.counts.tokens + self._others.counts.tokens


class Admission:
    """Bounds the jobs that were admitted and do not decode yet, in all gateway processes of the port.

    It adds to the counters first and checks the limits afterwards, so that two processes that admit at the same time
    cannot overlook each other. With several callers none may hold more than its share of the jobs and of the tokens.
    """

    def __init__(
        self, settings: GatewaySettings, counts: Counts, callers: Collection[str], max_jobs: int, max_tokens: int
    ) -> None:
        self._callers, self._share = callers, settings.caller_share
        self._max_jobs, self._max_tokens = max_jobs, max_tokens
        self._max_jobs_a_body = settings.max_jobs_a_body
        self.counts = counts
        self.jobs_at_once = settings.jobs_at_once

    @property
    def jobs_a_body(self) -> int:
        return min(self._max_jobs_a_body, self._jobs_a_caller)

    def admit(self, caller: str, slo: str = "default") -> "RequestState":
        """Admit a request, for one job as yet. Raises Busy."""
        state = RequestState(self, caller, slo)
        state.claim(1)
        return state

    def add_jobs(self, caller: str, jobs: int) -> None:
        """Raises Busy."""
        counts = self.counts
        counts.add_jobs(caller, jobs)
        waiting, held = counts.jobs - jobs, counts.jobs_of(caller) - jobs
        if (excess := excess_jobs(waiting, jobs, self._max_jobs)) > 0:
            counts.add_jobs(caller, -jobs)
            message = f"{waiting} jobs are waiting and this request adds {jobs}; the limit is {self._max_jobs}"
            raise Busy(message, retry_after_s=self._retry_after_s(excess))
        if (excess := excess_jobs(held, jobs, self._jobs_a_caller)) > 0:
            counts.add_jobs(caller, -jobs)
            message = f"{held} jobs of {caller!r} are waiting and this request adds {jobs}; its share is "
            message += f"{self._jobs_a_caller}"
            raise Busy(message, retry_after_s=self._retry_after_s(excess * waiting / max(1, held)))

    def add_tokens(self, caller: str, tokens: int) -> None:
        """Raises Busy. A job with no other job before it passes; the first job of a caller may exceed its share."""
        counts = self.counts
        counts.add_tokens(caller, tokens)
        waiting, held = counts.tokens - tokens, counts.tokens_of(caller) - tokens
        if (excess := excess_tokens(waiting, tokens, self._max_tokens)) > 0:
            counts.add_tokens(caller, -tokens)
            message = f"{waiting} prompt tokens are waiting and this job adds {tokens}; the limit is {self._max_tokens}"
            raise Busy(message, retry_after_s=self._retry_after_s(excess * counts.jobs / waiting))
        if (excess := excess_tokens(held, tokens, self._tokens_a_caller)) > 0:
            counts.add_tokens(caller, -tokens)
            message = f"{held} prompt tokens of {caller!r} are waiting and this job adds {tokens}; its share is "
            message += f"{self._tokens_a_caller}"
            raise Busy(message, retry_after_s=self._retry_after_s(excess * counts.jobs / held))

    def release(self, caller: str, jobs: int, tokens: int = 0) -> None:
        if jobs:
            self.counts.add_jobs(caller, -jobs)
        if tokens:
            self.counts.add_tokens(caller, -tokens)

    @property
    def _jobs_a_caller(self) -> int:
        return _share_of(self._max_jobs, self._share, self._callers) or 1

    @property
    def _tokens_a_caller(self) -> int:
        return _share_of(self._max_tokens, self._share, self._callers)

    def _retry_after_s(self, jobs: float) -> float:
        return retry_after_s(jobs, self.counts.left_per_s())


def retry_after_s(jobs: float, left_per_s: float) -> float:
    """The time until so many jobs have left the queue at that rate, between MIN_RETRY_S and MAX_RETRY_S."""
    return min(MAX_RETRY_S, max(MIN_RETRY_S, jobs / left_per_s if left_per_s > 0.0 else MAX_RETRY_S))


def _share_of(limit: int, share: float, callers: Collection[str]) -> int:
    return int(limit * share) if len(callers) > 1 else limit


class HeldBytes:
    """Bounds the bytes of the bodies that this process holds, each until its answer has ended.

    With several callers none may hold more than its share, except for its first body.
    """

    def __init__(self, settings: GatewaySettings, callers: Collection[str]) -> None:
        self._limit = settings.max_held_bytes
        self._callers, self._share = callers, settings.caller_share
        self._by_caller: Counter[str] = Counter()
        self.total = 0

    @contextmanager
    def charged(self, caller: str) -> Iterator[Callable[[int], None]]:
        """Yields a function that holds so many more bytes, or raises Busy; the end of the block releases all."""
        charged = 0

        def charge(more: int) -> None:
            nonlocal charged
            held, total = self._by_caller[caller] - charged, self.total - charged
            if total and total + charged + more > self._limit:
                message = f"bodies of {total} bytes are held and this one has {charged + more}; the limit is "
                raise Busy(f"{message}{self._limit}")
            share = _share_of(self._limit, self._share, self._callers)
            if held and held + charged + more > share:
                message = f"bodies of {held} bytes of {caller!r} are held and this one has {charged + more}; its share "
                raise Busy(f"{message}is {share}")
            charged += more
            self.total += more
            self._by_caller[caller] += more

        try:
            yield charge
        finally:
            self.total -= charged
            self._by_caller[caller] -= charged
            if not self._by_caller[caller]:
                del self._by_caller[caller]


@dataclass(slots=True, eq=False)
class RequestState:
    """One HTTP request, from its headers to its end: who sent it, what it may start, and why it was refused.

    A context manager: jobs that were claimed and not started are released at its end. It starts at most
    `settings.jobs_at_once` jobs at a time that do not decode yet, so that others find short queues in the cluster.
    """

    admission: Admission
    caller: str  # the name of the API key; empty without keys
    slo: str = "default"
    arrived_s: float = 0.0  # Unix seconds at which all of the body had arrived
    tier: str = ""  # OpenAI's `service_tier` that the request is served as; empty where the body did not decide it
    cache_salt: str = ""  # of the API key; empty where its prefixes may be shared with other keys
    one_precision: bool = False  # the request forbids that several precisions compute it
    session: str = ""  # the key of the session that it is a turn of
    body_bytes: int = 0
    client_request_id: str = ""  # as the client sent it
    connection: BodyWriter | None = None  # for events that are written without vLLM's application
    trace: "RequestTrace | None" = None
    stream: "PlainStream | None" = None  # submits the next job, and replaces vLLM's output processor for it
    tokenise_inline: bool = False  # its prompt is short: vLLM renders and tokenises it on the event loop
    prompt_logprobs: int = 0  # of its prompts so far: tokens times candidates
    hold: Callable[[int], None] = lambda _: None  # holds so many bytes until its end; raises Busy
    media: "tuple[object, EncodedMedia] | None" = None  # of its last job: vLLM's features, and what was made of them
    refusal: PolyphaseError | None = None  # why a job was refused for load
    rejection: Exception | None = None  # why vLLM refused a job for what it requests
    on_submitted: Callable[[], Awaitable[None]] | None = None  # called once, when the first job is submitted
    _claimed: int = 0
    _turns: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._turns = asyncio.Semaphore(self.admission.jobs_at_once)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.admission.release(self.caller, self._claimed)
        self._claimed = 0

    def claim(self, jobs: int) -> None:
        """Claim room for so many jobs. Raises Busy; InvalidRequest when no body may have so many."""
        limit = self.admission.jobs_a_body
        if jobs > limit:
            raise InvalidRequest(
                f"the body requests {jobs} answers (prompts, conversations or items, times n); the limit is {limit}"
            )
        if jobs > self._claimed:
            self.admission.add_jobs(self.caller, jobs - self._claimed)
            self._claimed = jobs

    def move(self, slo: str, admission: Admission) -> None:
        """Serve the request in another SLO class, with the same claim. Raises Busy, and then nothing has moved."""
        if admission is not self.admission:
            admission.add_jobs(self.caller, self._claimed)
            self.admission.release(self.caller, self._claimed)
            self.admission = admission
        self.slo = slo

    def start_job(self, prompt_tokens: int) -> "QueuedJob":
        """Turn a claim into a job; a job beyond the claimed ones claims its own room. Raises Busy."""
        self.claim(1)
        self.admission.add_tokens(self.caller, prompt_tokens)
        self._claimed -= 1
        return QueuedJob(self, prompt_tokens, self._turns)

    def salted(self, cache_salt: str) -> str:
        """The salt of the prefix caches for a request that names `cache_salt`, which may be empty."""
        if not self.cache_salt:
            return cache_salt
        return hashlib.sha256(f"{self.cache_salt}\0{cache_salt}".encode()).hexdigest()


current_request: ContextVar[RequestState] = ContextVar("current_request")


class QueuedJob:
    """The room that one job occupies in the queue, until it decodes or ends."""

    def __init__(self, request: RequestState, tokens: int, turns: asyncio.Semaphore) -> None:
        self.request = request
        self.waits = True
        self._tokens = tokens
        self._turns = turns
        self._has_turn = False

    async def wait_for_turn(self, timeout_s: float) -> None:
        """Wait at most so long until few enough jobs of the request are in the cluster without decoding."""
        if not self._turns.locked():
            await self._turns.acquire()  # returns at once
            self._has_turn = True
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._turns.acquire()
                self._has_turn = True

    def leave(self) -> None:
        """The job waits no longer. Idempotent."""
        if self.waits:
            self.waits = False
            admission = self.request.admission
            admission.release(self.request.caller, 1, self._tokens)
            admission.counts.job_left()
        if self._has_turn:
            self._has_turn = False
            self._turns.release()


@dataclass(slots=True, eq=False)
class _Turn:
    """A job in the queue. event: set while it may be placed."""

    job: Job
    event: asyncio.Event = field(default_factory=asyncio.Event)


class PlacementQueue:
    """Places jobs; those that the scheduler delays wait in the fair queue, of which only the heads of lines are placed.

    A waiting job costs one entry and no polling.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, ledger: Ledger | None = None) -> None:
        """ledger: what callers were served by the processes that share the port."""
        self.shares = TokenCounters(weights, ledger)  # what each caller was served, in any class
        self._queue: FairQueue[_Turn] = FairQueue(self.shares)

    def waiting(self, slo: str) -> int:
        """How many jobs of the class wait, including those that are being placed."""
        return self._queue.waiting(slo)

    def is_waiting(self, slo: str) -> bool:
        """Whether a new job of the class has others before it."""
        return self._queue.is_waiting(slo)

    async def place(self, job: Job, place: Place, queue_s: float) -> Route:
        """A route for a job of which nothing was computed yet. While the scheduler delays the job, it waits here.

        A job of a class that yields to heavier classes waits at most `queue_s`; then it is Overloaded. Others wait
        until their deadline.
        """
        slo = job.spec.slo
        if slo.when_full is WhenFull.DELAY:
            return await self._place_within(job, place, queue_s)
        if self._queue.is_waiting(slo.name):
            return await self._place_in_turn(job, place)
        placed = await self._try_to_place(job, place)
        if isinstance(placed, Route):
            return placed
        return await self._place_in_turn(job, place, placed)

    async def _place_within(self, job: Job, place: Place, queue_s: float) -> Route:
        try:
            async with asyncio.timeout(queue_s) as limit:
                return await self._place_in_turn(job, place)
        except TimeoutError:
            if not limit.expired():
                raise
            message = f"no room beside heavier classes for {queue_s:g} s (SLO class {job.spec.slo.name!r})"
            raise Overloaded(message, cause="queue", retry_after_s=queue_s) from None

    async def _place_in_turn(self, job: Job, place: Place, delay: Delayed | None = None) -> Route:
        """Wait for the job's turns and place it in them. delay: of a placement before it joined the queue."""
        queue, slo, turn = self._queue, job.spec.slo, _Turn(job)
        waiter = Waiter(turn, slo, job.spec.caller)
        if delay is None:
            _next(queue.join(waiter))
        else:
            self._rest(queue.join_delayed(waiter), retry_s(delay))
        try:
            while True:
                await turn.event.wait()
                placed = await self._try_to_place(job, place)
                if isinstance(placed, Route):
                    return placed
                turn.event.clear()
                line, again_s = waiter.line, retry_s(placed)
                self._rest(queue.delay(waiter, slo.ttft_s - job.ttft_left_s, again_s), again_s)
                _next(line)
        finally:
            _next(queue.leave(waiter))

    async def _try_to_place(self, job: Job, place: Place) -> Route | Delayed:
        """Charges the caller for the prompt before the next turn is decided."""
        try:
            route = await place(job)
        except Delayed as delay:
            job.delayed(delay)
            return delay
        self.shares.charge(job.spec.caller, job.prompt_tokens, 0)
        return route

    def _rest(self, line: Line[_Turn] | None, again_s: float) -> None:
        if line is not None:
            asyncio.get_running_loop().call_later(again_s, self._wake, line)

    def _wake(self, line: Line[_Turn]) -> None:
        self._queue.wake(line)
        _next(line)


def _next(line: Line[_Turn] | None) -> None:
    """Let the job whose turn it is be placed."""
    if line is not None and (waiter := line.turn()) is not None:
        waiter.item.event.set()
