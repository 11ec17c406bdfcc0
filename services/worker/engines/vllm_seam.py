"""Our policies inside vLLM's scheduler: a request queue of ours in its place, and a token budget for each step.

The scheduler asks its `waiting` queue for the next request; false means to it that nobody waits, so that is how the
gate is shut. Requests that hold blocks, such as those whose KV is under way, wait in a queue of its own, and go first.
"""

from collections.abc import Iterable, Iterator
from math import inf
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus

from services.worker.engines.base import EngineRequest
from services.worker.engines.entrance import Entrance
from services.worker.engines.policies import CurrentRates, EnginePolicies
from shared.domain.job import LengthPrediction
from shared.policy.admission_gate import Blocks, Decoding
from shared.policy.preemption import heaviest_first
from shared.policy.step_budget import StepLoad, prefill_tokens

_HOLDING = (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS)


class EngineQueue(RequestQueue):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's contract over an `Entrance`. Its truth is whether somebody may enter now, its length how many wait."""

    def __init__(self, entrance: Entrance[Request]) -> None:
        self._entrance = entrance
        self.inside: dict[str, Request] = {}  # those that were taken and did not come back
        self.shut = False  # when it was last asked, somebody waited and nobody could enter
        self.preemptions = 0

    def add_request(self, request: Request) -> None:
        """A new one."""
        self._entrance.add(request)

    def pop_request(self) -> Request:
        """The one that `peek_request` gave."""
        request = self._entrance.take()
        self.inside[request.request_id] = request
        return request

    def peek_request(self) -> Request:
        """The next."""
        return self._entrance.peek()

    def prepend_request(self, request: Request) -> None:
        """A preempted one."""
        self.preemptions += 1
        self._back(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Those that could not start, in reverse order."""
        for request in requests:
            self._back(request)

    def _back(self, request: Request) -> None:
        self.inside.pop(request.request_id, None)
        self._entrance.put_back(request)

    def remove_request(self, request: Request) -> None:
        """It gives up."""
        self._entrance.remove(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """They give up; some may be elsewhere."""
        for request in requests:
            self._entrance.remove(request)

    def __bool__(self) -> bool:
        may_enter = self._entrance.next() is not None
        self.shut = not may_enter and len(self) > 0
        return may_enter

    def __len__(self) -> int:
        return len(self._entrance)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._entrance)


class SchedulerSeam:
    """Everything of ours in one scheduler. All calls are the engine thread's."""

    def __init__(self, scheduler: Any, policies: EnginePolicies, rates: CurrentRates) -> None:
        self._scheduler = scheduler
        self._rates = rates
        self._most = self._chunk_size = int(scheduler.max_num_scheduled_tokens)
        self._requests: dict[str, EngineRequest] = {}  # all that the engine has
        self.policies = policies
        self._entrance: Entrance[Request] = Entrance(
            policies, rates, self._request_of, lambda request: request.num_tokens, self._inside, self._blocks
        )
        self._queue = EngineQueue(self._entrance)
        scheduler.waiting = self._queue

    @property
    def shut(self) -> bool:
        """Whether nothing can happen until another request comes, one gives up, or staged KV leaves."""
        s = self._scheduler
        return self._queue.shut and len(s.requests) == len(self._queue) and not s.deferred_waiting

    @property
    def preemptions(self) -> int:
        """How often a request lost its blocks."""
        return self._queue.preemptions

    @property
    def waiting_tokens(self) -> int:
        """Context of those that are to decode here and have not begun."""
        return self._entrance.decode_tokens

    def follow(self, policies: EnginePolicies) -> None:
        """Go by these from the next step on."""
        self.policies = policies
        self._entrance.follow(policies)

    def hold_at_most(self, tokens: int) -> None:
        """A step's tokens from the next one on; at most what the engine was built for."""
        self._chunk_size = min(tokens, self._most)

    def expect(self, request: EngineRequest) -> None:
        """The scheduler is about to get it."""
        self._requests[request.request_id] = request

    def predicted(self, request_id: str, prediction: LengthPrediction) -> None:
        """How long the answer of a request will be."""
        if (request := self._requests.get(request_id)) is not None:
            self._requests[request_id] = request.expecting(prediction)

    def forget(self, request_id: str) -> None:
        """The scheduler has it no more."""
        self._requests.pop(request_id, None)
        self._queue.inside.pop(request_id, None)

    def before_step(self) -> None:
        """Say how many tokens the coming step may compute, and who goes first: vLLM preempts who runs last."""
        running = self._scheduler.running
        running[:] = heaviest_first(running, lambda request: self._request_of(request).job.slo.weight)
        budget = self._chunk_size
        if self.policies.step_budget:
            needed, load = self._load()
            budget = needed + prefill_tokens(self._rates(), load, max(0, budget - needed))
        self._scheduler.max_num_scheduled_tokens = budget

    def _load(self) -> tuple[int, StepLoad]:
        """Tokens that the decodes take, and what they and the prompts under way are."""
        needed = decodes = context = before = 0
        tpot_s = inf
        for request in self._scheduler.running:
            computed, asked = request.num_computed_tokens, self._request_of(request)
            left = self._left(request)
            if left <= 0:
                continue  # all of it is under way: it has no part in the coming step
            if left > 1 + len(request.spec_token_ids) or not asked.decodes:
                before = max(before, computed)
                continue
            needed += left
            decodes += 1
            context += computed
            tpot_s = min(tpot_s, asked.job.slo.tpot_s)
        for request in self._scheduler.kv_holding_waiting:
            if request.num_computed_tokens < request.num_tokens - 1:
                before = max(before, request.num_computed_tokens)
        return needed, StepLoad(decodes, context, tpot_s, before)

    def _left(self, request: Request) -> int:
        """Tokens that the coming step may compute of one that runs, as vLLM's scheduler counts them: with those that
        steps under way will give, of which nobody knows yet what they are.
        """
        computed, unknown = request.num_computed_tokens, request.num_output_placeholders
        if unknown and computed + 2 - unknown >= request.num_prompt_tokens + request.max_tokens:
            return 0  # a step under way gives its last token
        if self._scheduler.current_step + 1 < request.next_decode_eligible_step:
            return 0  # another pipeline stage has it
        return int(min(request.num_tokens_with_spec + unknown, self._scheduler.max_model_len - 1) - computed)

    def _request_of(self, request: Request) -> EngineRequest:
        return self._requests[request.request_id]

    def _inside(self) -> list[Decoding]:
        """Also those that were taken in this very step, whom the scheduler has in no queue yet."""
        found = []
        for request in self._queue.inside.values():
            asked = self._request_of(request)
            holds = request.status in _HOLDING or request.num_computed_tokens > 0  # else it waits for its grammar
            if asked.decodes and holds:
                tokens = request.num_tokens + request.num_output_placeholders
                found.append(Decoding(asked.job, len(asked.prompt_token_ids), tokens))
        return found

    def _blocks(self) -> Blocks:
        pool = self._scheduler.kv_cache_manager.block_pool
        # Block 0 is vLLM's null block: it is never free and never used.
        return Blocks(pool.get_num_free_blocks(), pool.num_gpu_blocks - 1, self._scheduler.block_size)
