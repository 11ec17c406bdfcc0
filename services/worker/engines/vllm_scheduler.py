"""Polyphase's policies inside vLLM's scheduler: a request queue of its own, and a budget for the prompts of a step.

The scheduler asks its `waiting` queue for the next request. A queue that is false seems empty to it: this is how a
request is kept from starting. Requests that hold blocks, such as those whose KV is being imported, wait in a queue of
vLLM's own and start first.

The scheduler gives the tokens of a step to running requests, in order, before it looks at those that wait, so that one
running prompt would leave none to streams whose KV has arrived. The chunk that it is about to schedule is therefore
limited: prompts get the tokens that decodes and arriving streams leave.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import Any

from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import Request, RequestStatus

from services.worker.engines.admission_queue import AdmissionQueue
from services.worker.engines.base import CurrentRates, EnginePolicies, EngineRequest
from services.worker.engines.vllm_patches import limit_prompt_chunks, replace_waiting_queue
from shared.domain.job import LengthPrediction
from shared.policy.decode_admission import Blocks, Decoding
from shared.policy.prefill_order import Rank, heaviest_first
from shared.policy.step_budget import FLOOR_TOKENS, StepLoad, gap_target_s, joining_gap_s, prefill_tokens

_HOLDING = (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS)


class EngineQueue(RequestQueue):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's contract over an `AdmissionQueue`. It is true while a request may start now; its length is how many
    wait. `may_run` says whether the batch has a place for a request.
    """

    def __init__(self, admission: AdmissionQueue[Request], may_run: Callable[[Request], bool]) -> None:
        self._admission = admission
        self._may_run = may_run
        self.running: dict[str, Request] = {}  # popped and not put back
        self.blocked = False  # as of the last look: some request waits and none may start
        self.preemptions = 0

    def add_request(self, request: Request) -> None:
        self._admission.add(request)

    def pop_request(self) -> Request:
        request = self._admission.pop()
        self.running[request.request_id] = request
        return request

    def peek_request(self) -> Request:
        return self._admission.peek()

    def prepend_request(self, request: Request) -> None:
        """A preempted request."""
        self.preemptions += 1
        self.running.pop(request.request_id, None)
        self._admission.preempted(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Those that could not start, in reverse order."""
        for request in requests:
            self.running.pop(request.request_id, None)
            self._admission.put_back(request)

    def remove_request(self, request: Request) -> None:
        self._admission.remove(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Some may be in another queue."""
        for request in requests:
            self._admission.remove(request)

    def __bool__(self) -> bool:
        request = self._admission.next()
        self.blocked = request is None and len(self) > 0
        return request is not None and self._may_run(request)

    def __len__(self) -> int:
        return len(self._admission)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._admission)


def whole_item_tokens(scheduler: Any) -> int:
    """Tokens of the largest media item of a model whose items vLLM computes in one step each, because their tokens
    attend to each other in both directions; 0 for other models.
    """
    config = scheduler.vllm_config
    if not (config.scheduler_config.disable_chunked_mm_input and config.model_config.supports_multimodal_inputs):
        return 0
    budget = MultiModalBudget(config, MULTIMODAL_REGISTRY, enable_cache=False)
    return max(budget.mm_max_toks_per_item.values(), default=0)


def rest_of_item(features: Sequence[MultiModalFeatureSpec], position: int) -> int:
    """The tokens of the media item in which the position lies, from there on; 0 outside of items."""
    places = (each.mm_position for each in features)
    return next((p.offset + p.length - position for p in places if p.offset <= position < p.offset + p.length), 0)


class SchedulerPolicies:
    """The policies of one scheduler. The engine's thread makes all calls."""

    def __init__(
        self, scheduler: Any, policies: EnginePolicies, rates: CurrentRates, kept: Callable[[], int] = lambda: 0
    ) -> None:
        """kept: how many blocks are in use that a request gets when it needs them."""
        self._scheduler = scheduler
        self._kept = kept
        self._rates = rates
        self._max_tokens = self._chunk_size = int(scheduler.max_num_scheduled_tokens)
        self._requests: dict[str, EngineRequest] = {}  # all of the engine's
        self._arrived_mono: dict[str, float] = {}
        self.policies = policies
        self._admission: AdmissionQueue[Request] = AdmissionQueue(
            policies, self._request_of, lambda request: request.num_tokens, self._decoding, self._blocks
        )
        self._queue = EngineQueue(self._admission, self._may_run)
        replace_waiting_queue(scheduler, self._queue)
        self._prompts_left = 0  # prompt tokens that the step may still compute
        self._streams_left = 0  # of these, the tokens of streams that are computed again
        self._whole_item_tokens = whole_item_tokens(scheduler)
        self._cuts_prompts = bool(scheduler.scheduler_config.enable_chunked_prefill)
        if self._cuts_prompts:
            self._reserve_lookahead = limit_prompt_chunks(scheduler, self._limit_chunk)

    @property
    def blocked(self) -> bool:
        """Whether no step can do anything until a request arrives or ends, or staged KV leaves."""
        s = self._scheduler
        return self._queue.blocked and len(s.requests) == len(self._queue) and not s.deferred_waiting

    @property
    def preemptions(self) -> int:
        """How often a request lost its blocks, since the start."""
        return self._queue.preemptions

    @property
    def waiting_tokens(self) -> int:
        """Context of the requests that are to decode here and have not started."""
        return self._admission.decode_tokens

    def set_policies(self, policies: EnginePolicies) -> None:
        """From the next step on."""
        self.policies = policies
        self._admission.set_policies(policies)

    def set_chunk_size(self, tokens: int) -> None:
        """From the next step on; at most what the engine was built for, and room for an item that is not divided."""
        self._chunk_size = min(max(tokens, self._whole_item_tokens), self._max_tokens)

    def add(self, request: EngineRequest) -> None:
        """To be called before the scheduler gets the request."""
        self._requests[request.request_id] = request
        self._arrived_mono[request.request_id] = time.monotonic()

    def predicted(self, request_id: str, prediction: LengthPrediction) -> None:
        if (request := self._requests.get(request_id)) is not None:
            self._requests[request_id] = request.expecting(prediction)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._requests.pop(request_id, None)
        self._arrived_mono.pop(request_id, None)
        self._queue.running.pop(request_id, None)

    def before_step(self) -> None:
        """Set the tokens of the coming step, and the order of the requests: vLLM preempts the one that runs last."""
        scheduler = self._scheduler
        scheduler.running[:] = heaviest_first(scheduler.running, self._rank)
        self._order_importing()
        scheduler.max_num_scheduled_tokens = self._chunk_size
        self._prompts_left, self._streams_left = self._chunk_size, 0
        under_way = any(request.is_prefill_chunk for request in scheduler.running)
        if not self._cuts_prompts or not (under_way or scheduler.kv_holding_waiting or len(self._admission)):
            return  # no prompt is cut: the usual step of nothing but decodes
        needed, streams, load = self._step_load()
        available = max(0, self._chunk_size - needed)
        limited = self.policies.step_budget
        self._prompts_left = prefill_tokens(self._rates(), load, available) if limited else available
        self._streams_left = min(streams, self._prompts_left)

    def _limit_chunk(self, request: Request, computed: int, tokens: int) -> int:
        """Limit the chunk of `tokens` tokens, after `computed` ones, that vLLM is about to schedule to the step's
        prompt tokens. Prompts whose clients have no token leave to streams what these need, except for a few
        tokens.
        """
        missing = request.num_tokens_with_spec + request.num_output_placeholders - computed
        if missing <= 1 + len(request.spec_token_ids) and self._request_of(request).decodes:
            return int(self._reserve_lookahead(request, computed, tokens))
        limit, started = self._prompts_left, self._started(request)
        if not started:
            limit = max(limit - self._streams_left, min(FLOOR_TOKENS, limit))
        if self._whole_item_tokens and request.mm_features:
            limit = max(limit, rest_of_item(request.mm_features, computed))
        tokens = int(self._reserve_lookahead(request, computed, min(tokens, limit)))
        self._prompts_left = max(0, self._prompts_left - tokens)
        if started:
            self._streams_left = max(0, self._streams_left - tokens)
        return tokens

    def _order_importing(self) -> None:
        """Order the requests that hold blocks and do not run: first those whose KV has arrived and that have one
        token to compute, then streams, heavier classes first.
        """
        importing = self._scheduler.kv_holding_waiting
        if len(importing) > 1 and isinstance(importing, deque):
            ordered = sorted(importing, key=self._import_rank, reverse=True)
            importing.clear()
            importing.extend(ordered)

    def _import_rank(self, request: Request) -> tuple[bool, bool, bool, float]:
        ready = self._kv_arrived(request)
        weight, started = self._rank(request)
        return ready and _missing(request) == 1, ready, started, weight

    def _step_load(self) -> tuple[int, int, StepLoad]:
        """The tokens that decodes take, with those that join in the coming step; the prompt tokens of streams that
        are computed again; and what the decodes and the prompts under way are.
        """
        needed = streams = context = before = decodes = 0
        gaps_s: list[float] = []  # targets of the decodes, and of prompts that are to decode here
        rates = self._rates()
        gain = rates.gain if rates is not None else 1.0
        for request in self._scheduler.running:
            computed, ours = request.num_computed_tokens, self._request_of(request)
            tokens = self._next_step_tokens(request)
            if tokens <= 0:
                continue  # all of it is under way: it has no part in the coming step
            if tokens > 1 + len(request.spec_token_ids) or not ours.decodes:
                before = max(before, computed)
                streams += tokens if self._started(request) else 0
                gaps_s += [gap_target_s(ours.job.slo, gain)] if ours.decodes else []
                continue
            needed += tokens
            context += computed
            decodes += 1
            gaps_s.append(gap_target_s(ours.job.slo, gain))
        now_mono = time.monotonic()
        for request in self._joining():
            context += request.num_tokens
            decodes += 1
            handed_over = self._request_of(request).import_from is not None and not request.num_preemptions
            waited_s = now_mono - self._arrived_mono.get(request.request_id, now_mono) if handed_over else 0.0
            here = self._kv_arrived(request) and request.status != RequestStatus.WAITING
            gaps_s.append(joining_gap_s(self._request_of(request).job.slo, waited_s, here=here, gain=gain))
        for request in self._scheduler.kv_holding_waiting:
            missing, ready = _missing(request), self._kv_arrived(request)
            if missing > 1:
                before = max(before, request.num_computed_tokens)
                streams += missing if ready and self._started(request) else 0
            elif ready:
                needed += 1 + self._scheduler.num_spec_tokens
        if len(self._admission):
            first = self._request_of(self._admission.peek())
            if self._imports(self._admission.peek()):
                needed += 1  # without a token left, vLLM does not look at the queue, not even for requests that import
            elif first.decodes:
                gaps_s.append(gap_target_s(first.job.slo, gain))
        stream = self._admission.stream
        if stream is not None and not self._imports(stream):
            blocks = self._blocks()
            streams += stream.num_tokens if stream.num_tokens <= blocks.free * blocks.size_tokens else 0
        return needed, streams, StepLoad(decodes, context, min(gaps_s, default=inf), before)

    def _joining(self) -> list[Request]:
        """Requests that decode soon: streams whose KV is under way, the next stream that waits for room, and all
        others whose KV has arrived.
        """
        found = [
            request
            for request in self._scheduler.kv_holding_waiting
            if self._started(request) or (_missing(request) == 1 and self._kv_arrived(request))
        ]
        stream = self._admission.stream
        return [*found, stream] if stream is not None else found

    def _kv_arrived(self, request: Request) -> bool:
        """Whether its KV is not, or no longer, under way."""
        under_way = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        return not under_way or request.request_id in self._scheduler.finished_recving_kv_req_ids

    def _imports(self, request: Request) -> bool:
        """Whether a waiting request imports its KV, which it does once."""
        return self._request_of(request).import_from is not None and not request.num_preemptions

    def _may_run(self, request: Request) -> bool:
        """Whether the batch has a place for it; a prompt leaves one for each stream whose KV is under way."""
        limit, running = self._scheduler.max_num_active_reqs, self._queue.running
        if len(running) < limit or self._started(request):
            return True
        importing = sum(each.status != RequestStatus.RUNNING and self._started(each) for each in running.values())
        return bool(len(self._scheduler.running) + importing < limit)

    def _started(self, request: Request) -> bool:
        """Whether it is a stream: its client has a token, from this instance or another, or one is under way to it."""
        given = request.num_output_tokens or request.num_output_placeholders
        return bool(given) or self._request_of(request).job.started

    def _rank(self, request: Request) -> Rank:
        return self._request_of(request).job.slo.weight, self._started(request)

    def _next_step_tokens(self, request: Request) -> int:
        """Tokens that the coming step may compute of a running request, as vLLM's scheduler counts them: with those
        that steps under way will generate, whose values are not known yet.
        """
        computed, unknown = request.num_computed_tokens, request.num_output_placeholders
        if unknown and computed + 2 - unknown >= request.num_prompt_tokens + request.max_tokens:
            return 0  # a step under way gives its last token
        if self._scheduler.current_step + 1 < request.next_decode_eligible_step:
            return 0  # another pipeline stage has it
        return int(min(request.num_tokens_with_spec + unknown, self._scheduler.max_model_len - 1) - computed)

    def _request_of(self, request: Request) -> EngineRequest:
        return self._requests[request.request_id]

    def _decoding(self) -> list[Decoding]:
        """Also requests that were popped in this very step, which are in none of the scheduler's queues yet."""
        found = []
        for request in self._queue.running.values():
            ours = self._request_of(request)
            holds = request.status in _HOLDING or request.num_computed_tokens > 0  # else it waits for its grammar
            if ours.decodes and holds:
                tokens = request.num_tokens + request.num_output_placeholders
                found.append(Decoding(ours.job, len(ours.prompt_token_ids), tokens))
        return found

    def _blocks(self) -> Blocks:
        return blocks_of(self._scheduler, self._kept())


def blocks_of(scheduler: Any, kept: int = 0) -> Blocks:
    """KV memory in blocks that hold `size_tokens` tokens of a request in all layers.

    vLLM may keep layers in several groups, each of which takes blocks of its own from the one pool. They are counted as
    if all attention layers held the whole request. A long request takes fewer for layers with a window, which shows in
    what is free, and so do the blocks of states, of which a request has one or two. kept: blocks of the pool in use
    that count as free.
    """
    pool, size = scheduler.kv_cache_manager.block_pool, scheduler.block_size
    specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
    a_block = max(1.0, sum(size / spec.block_size for spec in specs if not isinstance(spec, MambaSpec)))
    # Block 0 is vLLM's null block: it is never free and never used.
    return Blocks(int((pool.get_num_free_blocks() + kept) / a_block), int((pool.num_gpu_blocks - 1) / a_block), size)


def _missing(request: Request) -> int:
    """Tokens to compute before its next one; the last token of a prompt is computed here."""
    return max(1, int(request.num_tokens - request.num_computed_tokens))
