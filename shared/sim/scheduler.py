"""What an engine's next step computes: continuous batching with chunked prefill, paged KV memory and preemption.

Terms:

- stream: a request whose client has a token, from this instance or another.
- prompt: a request whose client has no token yet.
- joining: a stream that another instance has handed over is joining until it takes part in a step here. It joins the
  batch in the first plan that finds its KV here and a place for it (`joined`).
- gap target: the longest allowed time between two tokens of a stream (`gap_target_s`).

The states of a request (`State`), and what moves it from one to another:

    state       holds blocks  in the batch  next state
    WAITING     no            no            PREFILLING when it starts (`_start`); RECEIVING if it imports its KV
    RECEIVING   yes           no            RECEIVED when its KV is here (`kv_arrived`), or cannot come (`pull_failed`)
    RECEIVED    yes           no            DECODING or PREFILLING when it joins the batch (`_join_received`)
    PREFILLING  yes           yes           DECODING (`start_decoding`), FINISHED (`finish`), WAITING (`_preempt`)
    DECODING    yes           yes           FINISHED (`finish`), WAITING (`_preempt`)
    FINISHED    no            no

A request that is cancelled is FINISHED at once; if it is in the batch, at the next plan.

The order of work is that of vLLM's V1 scheduler with Polyphase's policies. Decodes and prefill chunks share the tokens
of a step: first the decodes, then streams that are computed again or start, then prompts under way, then prompts that
start; in each of these, heavier SLO classes go first. When blocks run out, the youngest prompt of the lightest class is
preempted, or the class's youngest stream where it has no prompt.

The simulator's engine and the emulated engine drive this scheduler. Each calls `plan` before a step, and after it
`end_decodes`, `start_decoding` and `finish`. The scheduler has no clock: `now` is an argument. `KvMemory` counts the
blocks; `shared.sim.step_load` says how many prompt tokens a step holds.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from shared.domain.rates import StepRates
from shared.policy.decode_admission import Blocks, DecodeAdmission, Decoding, Greedy, may_decode
from shared.policy.prefill_order import PrefillOrder, PrefillQueue, WaitingJob, heaviest_first, victim
from shared.sim.group import DecodeGroup
from shared.sim.memory import KvMemory
from shared.sim.request import ScheduledRequest, State, rank_of
from shared.sim.spec import EngineLimits
from shared.sim.step_load import prompt_budget

R = TypeVar("R", bound=ScheduledRequest)
R_contra = TypeVar("R_contra", bound=ScheduledRequest, contravariant=True)


class SchedulerEvents(Protocol[R_contra]):
    """What the scheduler reports to its engine while it plans."""

    def admitted(self, request: R_contra, now: float) -> None:
        """The request has blocks, and computes its prompt from now on or is ready for its KV (`State.RECEIVING`)."""
        ...

    def preempted(self, request: R_contra, now: float) -> None:
        """The request loses its blocks. Its state is that before."""
        ...


@dataclass(slots=True)
class Step(Generic[R]):
    """What a step computes that begins at `now`."""

    now: float
    prompt_budget: int = 0  # prompt tokens that may be added while the step is planned
    chunks: list[tuple[R, int]] = field(default_factory=list)  # of prompts: the request and its tokens
    has_decodes: bool = False  # whether each request of the group gets a token
    has_preempted: bool = False  # whether a request lost its blocks for this step: then none starts

    def add_chunk(self, request: R, tokens: int) -> None:
        self.chunks.append((request, tokens))
        self.prompt_budget -= tokens


@dataclass(slots=True)
class Backlog:
    """What waits on an engine. Prompt tokens are those that are neither computed nor expected in the prefix cache."""

    prompts: int = 0  # requests that have prompt tokens to compute
    prompt_tokens: int = 0  # of these
    waiting_tokens: int = 0  # context of the requests that wait and are to decode here
    begun_tokens: int = 0  # computed, of requests that have blocks and do not decode yet


class Scheduler(Generic[R]):
    """Decides what each step computes, and which requests hold how many blocks.

    A request is in one of `waiting`, `receiving`, `received` and `running`, as its `state` says. `running` is divided
    into `prefilling` and the decode group. rates: the step costs that are known by now. reserve_export: reserves room
    for the KV that the next request exports, or returns False while there is none; by default no export needs room.
    """

    def __init__(
        self,
        limits: EngineLimits,
        memory: KvMemory,
        group: DecodeGroup[R],
        events: SchedulerEvents[R],
        order: PrefillOrder,
        admission: DecodeAdmission,
        *,
        rates: Callable[[], StepRates | None] = lambda: None,
        reserve_export: Callable[[R], bool] | None = None,
    ) -> None:
        self.limits = limits
        self.memory = memory
        self.admission = admission
        self._events = events
        self._rates = rates
        self._reserve_export = reserve_export

        self.waiting: PrefillQueue[R] = PrefillQueue(order)
        self.receiving: dict[R, None] = {}
        self.received: list[R] = []
        self.running: dict[R, None] = {}  # the batch, in order of admission
        self.prefilling: dict[R, None] = {}
        self.group = group

        # What is kept from one call to the next.
        self.joined: list[R] = []  # requests with imported KV that run since the last plan
        self.leaving: list[R] = []  # cancelled while they ran, or to go on elsewhere; they leave in the next plan
        self.left: list[R] = []  # decodes that go on elsewhere since the last plan
        self._step: Step[R] = Step(0.0)  # the last one planned; while it runs, `admit_streams` starts others beside it

    @property
    def blocked(self) -> int:
        """Requests that wait for blocks, a place in the batch or their KV."""
        return len(self.waiting) + len(self.receiving) + len(self.received)

    @property
    def count(self) -> int:
        return len(self.running) + self.blocked

    def add(self, request: R) -> None:
        self.waiting.push(request, WaitingJob(request.job, request.uncomputed_tokens, request.is_stream))

    def became_stream(self, request: R) -> bool:
        """The client of a request has its first token, from elsewhere: a waiting request now goes before all prompts.
        False where it does not wait.
        """
        if not self.waiting.remove(request):
            return False
        self.add(request)
        return True

    def kv_arrived(self, request: R) -> None:
        del self.receiving[request]
        self.received.append(request)
        request.state = State.RECEIVED

    def pull_failed(self, request: R) -> None:
        """The KV of a prefix does not come: the request computes it, from what it holds here."""
        request.pulled_tokens, request.pulling = 0, False
        if request.state is State.RECEIVING:
            request.computed_tokens = self.memory.cached_part(request)
            self.kv_arrived(request)

    def cancel(self, request: R) -> None:
        """Forget a request. A running one keeps its place until the next plan: the step under way computes it."""
        request.cancelled = True
        if request.state in (State.PREFILLING, State.DECODING):
            self.leaving.append(request)
            return
        if request.state is State.RECEIVING:
            del self.receiving[request]
        elif request.state is State.RECEIVED:
            self.received.remove(request)
        else:
            self.waiting.remove(request)
        self.memory.release(request)
        request.state = State.FINISHED

    def leave(self, request: R) -> None:
        """Have a decode go at the next plan, with the token of the step under way (`left`)."""
        self.leaving.append(request)

    def plan(self, now: float) -> Step[R]:
        """Decide what the coming step computes, which begins now."""
        step = self._step = Step(now)
        self.memory.sessions.expire(now)
        self.memory.reserve_for_decodes(0)
        self._drop_cancelled()
        self._join_received()
        if self.limits.prefill_first:
            step.prompt_budget = self.limits.batched_tokens
            self._plan_prompts(step)
            if not step.chunks:
                self._reserve_for_decodes(step)
                step.has_decodes = self.group.count > 0
        else:
            self._reserve_for_decodes(step)
            step.prompt_budget = self.limits.batched_tokens - self.group.count
            if self.limits.step_budget:
                step.prompt_budget = prompt_budget(self, self._rates(), step.prompt_budget, now)
            self._plan_prompts(step)
            step.has_decodes = self.group.count > 0
        return step

    def end_decodes(self, steps: int) -> list[R]:
        """The group has taken so many steps. Returns the requests that are complete with it."""
        gained_blocks = 0  # where outputs are reserved, each has had its blocks since it started
        if not self.limits.reserves_output:
            gained_blocks = self.group.blocks_for(steps)
        self.memory.take_for_decodes(gained_blocks)
        return self.group.advance(steps)

    def start_decoding(self, request: R) -> None:
        """All tokens of a running request are computed, or come with the next decode: it joins the group."""
        request.state = State.DECODING
        self.prefilling.pop(request, None)
        self.group.join(request)

    def finish(self, request: R) -> None:
        """A running request is complete; if it decoded, it has left the group."""
        del self.running[request]
        self.prefilling.pop(request, None)
        self.memory.release(request)
        request.state = State.FINISHED

    # Requests in the batch

    def _drop_cancelled(self) -> None:
        self.left = []
        for request in self.leaving:
            if request.state is State.DECODING:
                self.group.leave(request)
                if not request.cancelled:
                    self.left.append(request)
            if request.state is not State.FINISHED:  # it may have been complete with the step that was under way
                self.finish(request)
        self.leaving.clear()

    def _join_received(self) -> None:
        """Run requests whose KV has come, as many as the batch has places for: streams before prompts, heavier classes
        first.
        """
        self.joined = []
        if not self.received:
            return
        self.received.sort(key=lambda request: (request.is_stream, request.job.slo.weight), reverse=True)
        while self.received and len(self.running) < self.limits.sequences:
            request = self.received.pop(0)
            self.joined.append(request)
            self.running[request] = None
            if request.uncomputed_tokens == 1 and not request.pulled_tokens:
                self.start_decoding(request)
            else:
                request.state = State.PREFILLING
                self.prefilling[request] = None

    def _reserve_for_decodes(self, step: Step[R]) -> None:
        """Reserve blocks for the next token of each decode, and preempt requests as long as there are too few."""
        if self.limits.reserves_output or not self.group.count:
            return
        while (needed := self.group.blocks_for(1)) > self.memory.free:
            self._preempt(step)
        self.memory.reserve_for_decodes(needed)

    def _plan_prompts(self, step: Step[R]) -> None:
        """Plan chunks of requests that run and start others, streams first. After a preemption none starts: it would
        take the blocks that another has just lost.
        """
        for streams in (True, False):
            if self.prefilling:
                self._continue_prefills(step, streams=streams)
            if len(self.waiting) and not step.has_preempted:
                self._admit(step, streams=streams)

    def _continue_prefills(self, step: Step[R], *, streams: bool) -> None:
        """Plan chunks of the streams, or of the prompts without a token, that run."""
        running = [request for request in self.prefilling if request.is_stream is streams]
        for request in heaviest_first(running, rank_of):
            tokens = min(request.uncomputed_tokens, step.prompt_budget)
            if tokens <= 0:
                break
            while request in self.prefilling and not self.memory.allocate(request, request.computed_tokens + tokens):
                self._preempt(step)  # in the end the request itself
            if request in self.prefilling:
                step.add_chunk(request, tokens)

    def _preempt(self, step: Step[R]) -> None:
        """Take the blocks of the `victim`. It waits before the others of its class, a stream before all prompts."""
        request = victim(self.running, rank_of)
        self._events.preempted(request, step.now)
        step.has_preempted = True
        del self.running[request]
        if request.state is State.PREFILLING:
            del self.prefilling[request]
            step.chunks = [chunk for chunk in step.chunks if chunk[0] is not request]
        else:
            self.group.leave(request)
            if self.memory.reserved:  # else this plan has not reserved yet, or the step has no decodes
                self.memory.reserve_for_decodes(self.group.blocks_for(1))
        self.memory.release(request)
        request.computed_tokens = request.import_tokens = request.pulled_tokens = request.cached_tokens = 0
        request.state = State.WAITING
        self.waiting.put_back(request, request.job.slo.weight, started=request.is_stream)

    # Admission

    def next_waiting(self) -> R | None:
        """The next request, which stays in the queue; None where none waits, or its export has no room yet."""
        if not len(self.waiting):
            return None
        request = self.waiting.peek()
        if self._reserve_export is None or not request.exports:
            return request
        if not self._reserve_export(request):
            return None
        return self.waiting.hold()  # no request overtakes one whose export has room

    def admit_streams(self, now: float) -> None:
        """Start the imports of streams beside the step under way, whose decodes have their blocks."""
        if not self._step.has_preempted:
            self._admit(Step(now), streams=True)

    def admit_imports(self, now: float) -> bool:
        """Start the imports that are next beside the step under way. False where the next request needs a step to
        start, or more blocks.
        """
        while len(self.running) < self.limits.sequences and (request := self.next_waiting()) is not None:
            if not self._has_place(request):
                break
            if not request.imports or not self._start(request, Step(now)):
                return False
        return True

    def _admit(self, step: Step[R], *, streams: bool) -> None:
        """Start the requests that are next, with `streams` only streams. If the next cannot start, none does."""
        while len(self.running) < self.limits.sequences:
            if streams and self.waiting.stream is None:
                break
            request = self.next_waiting()
            if request is None or (streams and not request.is_stream):
                break
            self.memory.check_import(request)
            if not request.imports and step.prompt_budget <= 0:
                break
            if not self._has_place(request) or not self._policy_admits(request, step.now):
                break
            if not self._start(request, step):
                break

    def _start(self, request: R, step: Step[R]) -> bool:
        """Start the next request: it imports its KV, or the step computes its first chunk. False where it has too few
        blocks.
        """
        if not self.memory.start(request, step.prompt_budget):
            return False
        self.waiting.pop()
        if request.imports:
            request.state = State.RECEIVING
            self.receiving[request] = None
        else:
            request.state = State.PREFILLING
            self.running[request] = self.prefilling[request] = None
            step.add_chunk(request, min(request.uncomputed_tokens, step.prompt_budget))
        self._events.admitted(request, step.now)
        return True

    def _has_place(self, request: R) -> bool:
        """Whether the batch has a place for it. A prompt leaves one for each stream whose KV comes or has come."""
        if request.is_stream:
            return True
        coming = sum(other.is_stream for other in (*self.receiving, *self.received))
        return len(self.running) + coming < self.limits.sequences

    def _policy_admits(self, request: R, now: float) -> bool:
        """Whether a request that is to decode here may start beside the others. For Greedy the blocks decide."""
        if isinstance(self.admission, Greedy) or not request.decodes:
            return True
        inside = [
            Decoding(other.job, other.job.prompt_tokens, self.group.tokens_of(other))
            for other in (*self.running, *self.receiving)
            if other.decodes
        ]
        blocks = Blocks(self.memory.available, self.memory.total, self.limits.block_tokens)
        return may_decode(self.admission, request.remaining_job, inside, blocks, now)

    def count_backlog(self, found: Backlog) -> None:
        """Add what waits here to `found`."""
        for request in self.waiting.everyone():
            if request.decodes:
                found.waiting_tokens += request.tokens
            if not request.import_tokens:
                found.prompts += 1
                found.prompt_tokens += request.uncomputed_tokens - request.cached_tokens
        for request in (*self.prefilling, *self.receiving, *self.received):
            found.begun_tokens += request.computed_tokens
            received = request.state is State.RECEIVED or request.pulling
            if request.state is State.PREFILLING or (received and request.uncomputed_tokens > 1):
                found.prompts += 1
                found.prompt_tokens += request.uncomputed_tokens
