"""Requests through one instance with continuous batching, step by step: what the step model says of a real run.

A compact replay for checking the cost model against measured runs of vLLM's V1 scheduler: running requests first,
one token budget for prefill chunks and decodes, paged KV, the youngest request preempted and recomputed when blocks
run out. The simulator (`shared/sim`) is the tool for whole clusters.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shared.cost.step import Batch, StepModel
from shared.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Request:
    """A request by its lengths; `arrival_s` from the start of the run."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Limits:
    """The engine's limits and its order of work.

    kv_tokens: KV capacity. reserves_output: a request starts only when its whole output has room, so none is preempted
    (TensorRT-LLM by default). prefill_first: prefill in steps of its own, before any decode (SGLang by default).
    """

    batched_tokens: int
    sequences: int
    kv_tokens: int
    block_tokens: int = 16
    reserves_output: bool = False
    prefill_first: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times of one request, seconds. `tpot_s` is 0 for a single output token."""

    ttft_s: float
    tpot_s: float
    jct_s: float


@dataclass(slots=True)
class _Running:
    index: int
    arrival_s: float
    prompt: int
    output: int
    computed: int = 0  # tokens whose KV is held
    produced: int = 0
    blocks: int = 0
    first_s: float = 0.0

    @property
    def target(self) -> int:
        """Tokens to compute before the next output token."""
        return self.prompt + self.produced

    @property
    def decoding(self) -> bool:
        """Whether only the latest output token is left to compute."""
        return self.produced > 0 and self.target - self.computed == 1


def replay(
    model: StepModel,
    requests: Sequence[Request],
    limits: Limits,
    concurrency: int = 0,
    *,
    stepwise: bool = False,
) -> tuple[Outcome, ...]:
    """Outcomes in the order of the requests. With `concurrency`, a closed loop: a request arrives when one ends.

    Runs of steps between which nothing changes are taken at once; `stepwise` takes them one by one, with the same
    outcomes.
    """
    engine = _Engine(model, requests, limits, concurrency, stepwise)
    while engine.step():
        pass
    return tuple(engine.outcomes[index] for index in range(len(requests)))


class _Engine:
    """State of one replay."""

    def __init__(
        self, model: StepModel, requests: Sequence[Request], limits: Limits, concurrency: int, stepwise: bool
    ) -> None:
        for index, request in enumerate(requests):
            if request.prompt_tokens < 1 or request.output_tokens < 1:
                raise InvalidRequest(f"request {index}: lengths must be at least 1, not {request}")
            wanted = -(-(request.prompt_tokens + request.output_tokens) // limits.block_tokens)
            if wanted > limits.kv_tokens // limits.block_tokens:
                raise InvalidRequest(
                    f"request {index}: {request} needs more than the KV capacity of {limits.kv_tokens} tokens"
                )
        self._model = model
        self._limits = limits
        self._closed = concurrency > 0
        self._stepwise = stepwise
        self._free = limits.kv_tokens // limits.block_tokens
        order = sorted(range(len(requests)), key=lambda i: requests[i].arrival_s)
        states = [
            _Running(i, requests[i].arrival_s, requests[i].prompt_tokens, requests[i].output_tokens) for i in order
        ]
        self._coming = deque(states)
        self._waiting: deque[_Running] = deque()
        self._running: list[_Running] = []
        self.now_s = 0.0
        self.outcomes: dict[int, Outcome] = {}
        for _ in range(min(concurrency, len(states)) if self._closed else 0):
            self._waiting.append(self._coming.popleft())

    def step(self) -> bool:
        """One engine step, or a jump to the next arrival; False when all is done."""
        self._arrive()
        if not self._running and not self._waiting:
            if not self._coming:
                return False
            self.now_s = max(self.now_s, self._coming[0].arrival_s)
            self._arrive()
        if not self._stepwise and self._glide():
            return True
        scheduled = self._schedule()
        chunks: list[tuple[int, int]] = []
        count = contexts = 0
        for state, new in scheduled:
            if state.decoding:
                count += 1
                contexts += state.computed
            else:
                chunks.append((new, state.computed))
        self.now_s += self._model.step_time_s(Batch(tuple(chunks), count, contexts))
        for state, new in scheduled:
            self._advance(state, new)
        return True

    def _glide(self) -> bool:
        """Several decode steps at once, up to the next event; equal to taking them one by one."""
        running = self._running
        if not running or not all(r.decoding for r in running):
            return False
        if (
            self._waiting
            and len(running) < self._limits.sequences
            and self._fits(self._waiting[0], self._limits.batched_tokens - len(running))
        ):
            return False
        steps = min(r.output - r.produced for r in running) - 1
        block = self._limits.block_tokens
        if sum(-(-(r.computed + steps) // block) - r.blocks for r in running) > self._free:
            return False
        count, contexts = len(running), sum(r.computed for r in running)
        if count > self._limits.batched_tokens:
            return False
        steps = self._before_arrival(count, contexts, steps)
        if steps < 2:
            return False
        self.now_s += self._model.decode_span_s(count, contexts, steps)
        for state in running:
            self._reserve(state, steps)
            state.computed += steps
            state.produced += steps
        return True

    def _before_arrival(self, count: int, contexts: int, steps: int) -> int:
        """The most of `steps` whose last one starts before the next arrival."""
        if self._closed or not self._coming or len(self._running) >= self._limits.sequences:
            return steps
        left = self._coming[0].arrival_s - self.now_s
        low, high = 0, steps
        while low < high:
            middle = (low + high + 1) // 2
            if self._model.decode_span_s(count, contexts, middle) <= left:
                low = middle
            else:
                high = middle - 1
        return low

    def _arrive(self) -> None:
        while not self._closed and self._coming and self._coming[0].arrival_s <= self.now_s:
            self._waiting.append(self._coming.popleft())

    def _schedule(self) -> list[tuple[_Running, int]]:
        """What the next step computes: (request, tokens). Running requests come before waiting ones."""
        scheduled: list[tuple[_Running, int]] = []
        budget = self._limits.batched_tokens
        before = len(self._waiting)
        if self._limits.prefill_first:
            budget = self._continue_running(scheduled, budget, prefill_only=True)
            if len(self._waiting) == before:  # nobody was preempted
                self._admit(scheduled, budget)
            if scheduled:
                return scheduled
        budget = self._continue_running(scheduled, budget, prefill_only=False)
        if len(self._waiting) == before:
            self._admit(scheduled, budget)
        return scheduled

    def _continue_running(self, scheduled: list[tuple[_Running, int]], budget: int, *, prefill_only: bool) -> int:
        index = 0
        while index < len(self._running) and budget > 0:
            state = self._running[index]
            new = min(state.target - state.computed, budget)
            index += 1
            if prefill_only and state.decoding:
                continue
            if self._make_room(state, new):
                scheduled.append((state, new))
                budget -= new
        return budget

    def _make_room(self, state: _Running, new: int) -> bool:
        """Blocks for `new` tokens, taken from the youngest requests if need be; False when it was its own victim."""
        while not self._reserve(state, new):
            victim = self._running.pop()
            self._release(victim)
            self._waiting.appendleft(victim)
            if victim is state:
                return False
        return True

    def _admit(self, scheduled: list[tuple[_Running, int]], budget: int) -> None:
        while self._waiting and budget > 0 and len(self._running) < self._limits.sequences:
            state = self._waiting[0]
            if not self._fits(state, budget):
                return
            new = min(state.target - state.computed, budget)
            self._reserve(state, self._first_reserve(state, new))
            self._running.append(self._waiting.popleft())
            scheduled.append((state, new))
            budget -= new

    def _first_reserve(self, state: _Running, new: int) -> int:
        """Tokens whose blocks a request takes when it starts."""
        return state.prompt + state.output if self._limits.reserves_output else new

    def _fits(self, state: _Running, budget: int) -> bool:
        """Whether a waiting request can start now; if not, it cannot before a running one ends."""
        new = self._first_reserve(state, min(state.target - state.computed, budget))
        return -(-(state.computed + new) // self._limits.block_tokens) <= self._free

    def _reserve(self, state: _Running, new: int) -> bool:
        wanted = -(-(state.computed + new) // self._limits.block_tokens) - state.blocks
        if wanted > self._free:
            return False
        self._free -= max(0, wanted)
        state.blocks += max(0, wanted)
        return True

    def _release(self, state: _Running) -> None:
        self._free += state.blocks
        state.blocks = 0
        state.computed = 0

    def _advance(self, state: _Running, new: int) -> None:
        state.computed += new
        if state.computed < state.target:
            return
        state.produced += 1
        if state.produced == 1:
            state.first_s = self.now_s
        if state.produced < state.output:
            return
        self._running.remove(state)
        self._release(state)
        gaps = state.output - 1
        tpot = (self.now_s - state.first_s) / gaps if gaps else 0.0
        self.outcomes[state.index] = Outcome(state.first_s - state.arrival_s, tpot, self.now_s - state.arrival_s)
        if self._closed and self._coming:
            follower = self._coming.popleft()
            follower.arrival_s = self.now_s
            self._waiting.append(follower)
