"""Our policies inside vLLM's scheduler: a request queue of ours in its place, and a budget for the prompts of a step.

The scheduler asks its `waiting` queue for the next request; false means to it that nobody waits, so that is how the
gate is shut. Requests that hold blocks, such as those whose KV is under way, wait in a queue of its own, and go first.

The scheduler gives the tokens of a step to what runs, in order, before it looks at what waits, so that one running
prompt would leave none to streams whose KV has come. `_reserve_prefill_lookahead` (vLLM 0.32), which it calls with each
chunk that it is about to schedule, is therefore wrapped: prompts get the tokens that decodes and arriving streams
leave.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2

from services.worker.engines.admission_queue import Entrance
from services.worker.engines.base import CurrentRates, EnginePolicies, EngineRequest
from shared.domain.job import LengthPrediction
from shared.policy.admission_gate import Blocks, Decoding
from shared.policy.preemption import Rank, heaviest_first
from shared.policy.step_budget import FLOOR_TOKENS, StepLoad, gap_target_s, joining_gap_s, prefill_tokens
from shared.runtime.logs import get_log

_HOLDING = (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS)


class EngineQueue(RequestQueue):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's contract over an `Entrance`. Its truth is whether somebody may enter now, its length how many wait.
    `has_seat` says whether the running requests leave a seat for one.
    """

    def __init__(self, entrance: Entrance[Request], has_seat: Callable[[Request], bool]) -> None:
        self._entrance = entrance
        self._has_seat = has_seat
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
        self.inside.pop(request.request_id, None)
        self._entrance.preempted(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Those that could not start, in reverse order."""
        for request in requests:
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
        request = self._entrance.next()
        self.shut = request is None and len(self) > 0
        return request is not None and self._has_seat(request)

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
        self._came: dict[str, float] = {}  # when, monotonic
        self.policies = policies
        self._entrance: Entrance[Request] = Entrance(
            policies, rates, self._request_of, lambda request: request.num_tokens, self._inside, self._blocks
        )
        self._queue = EngineQueue(self._entrance, self._has_seat)
        scheduler.waiting = self._queue
        self._prompts_left = 0  # tokens of prompts that the step may compute yet
        self._streams_left = 0  # of those, what streams need that are computed again
        self._cuts_prompts = bool(scheduler.scheduler_config.enable_chunked_prefill)
        if self._cuts_prompts:
            self._reserve_lookahead = scheduler._reserve_prefill_lookahead
            scheduler._reserve_prefill_lookahead = self._cut

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
        self._came[request.request_id] = time.monotonic()

    def predicted(self, request_id: str, prediction: LengthPrediction) -> None:
        """How long the answer of a request will be."""
        if (request := self._requests.get(request_id)) is not None:
            self._requests[request_id] = request.expecting(prediction)

    def forget(self, request_id: str) -> None:
        """The scheduler has it no more."""
        self._requests.pop(request_id, None)
        self._came.pop(request_id, None)
        self._queue.inside.pop(request_id, None)

    def before_step(self) -> None:
        """Say how many tokens the coming step may compute, and who goes first: vLLM preempts who runs last."""
        scheduler = self._scheduler
        scheduler.running[:] = heaviest_first(scheduler.running, self._rank)
        self._order_coming()
        scheduler.max_num_scheduled_tokens = self._chunk_size
        self._prompts_left, self._streams_left = self._chunk_size, 0
        under_way = any(request.is_prefill_chunk for request in scheduler.running)
        if not self._cuts_prompts or not (under_way or scheduler.kv_holding_waiting or len(self._entrance)):
            return  # no prompt is cut: the usual step of nothing but decodes
        needed, streams, load = self._load()
        most = max(0, self._chunk_size - needed)
        self._prompts_left = prefill_tokens(self._rates(), load, most) if self.policies.step_budget else most
        self._streams_left = min(streams, self._prompts_left)

    def _cut(self, request: Request, computed: int, tokens: int) -> int:
        """The chunk of `tokens` tokens, after `computed` ones, that vLLM is about to schedule: as much of it as the
        step's prompts may take. Those without a token leave to streams what these need, but for a few tokens.
        """
        missing = request.num_tokens_with_spec + request.num_output_placeholders - computed
        if missing <= 1 + len(request.spec_token_ids) and self._request_of(request).decodes:
            return int(self._reserve_lookahead(request, computed, tokens))
        most, started = self._prompts_left, self._started(request)
        if not started:
            most = max(most - self._streams_left, min(FLOOR_TOKENS, most))
        tokens = int(self._reserve_lookahead(request, computed, min(tokens, most)))
        self._prompts_left -= tokens
        if started:
            self._streams_left = max(0, self._streams_left - tokens)
        return tokens

    def _order_coming(self) -> None:
        """Of those that hold blocks and do not run: first those whose KV has come and that have one token to compute,
        then streams, heavier classes first.
        """
        coming = self._scheduler.kv_holding_waiting
        if len(coming) > 1 and isinstance(coming, deque):
            ordered = sorted(coming, key=self._coming_rank, reverse=True)
            coming.clear()
            coming.extend(ordered)

    def _coming_rank(self, request: Request) -> tuple[bool, bool, bool, float]:
        ready = self._has_come(request)
        weight, started = self._rank(request)
        return ready and _missing(request) == 1, ready, started, weight

    def _load(self) -> tuple[int, int, StepLoad]:
        """Tokens that decodes take, those included that join with the coming step; prompt tokens of streams that are
        computed again; and what the decodes and the prompts under way are.
        """
        needed = streams = context = before = decodes = 0
        gaps_s: list[float] = []  # targets of the decodes, and of prompts that are to decode here
        for request in self._scheduler.running:
            computed, asked = request.num_computed_tokens, self._request_of(request)
            left = self._left(request)
            if left <= 0:
                continue  # all of it is under way: it has no part in the coming step
            if left > 1 + len(request.spec_token_ids) or not asked.decodes:
                before = max(before, computed)
                streams += left if self._started(request) else 0
                gaps_s += [gap_target_s(asked.job.slo)] if asked.decodes else []
                continue
            needed += left
            context += computed
            decodes += 1
            gaps_s.append(gap_target_s(asked.job.slo))
        now_mono = time.monotonic()
        for request in self._joining():
            context += request.num_tokens
            decodes += 1
            handed_over = self._request_of(request).import_from is not None and not request.num_preemptions
            waited_s = now_mono - self._came.get(request.request_id, now_mono) if handed_over else 0.0
            here = self._has_come(request) and request.status != RequestStatus.WAITING
            gaps_s.append(joining_gap_s(self._request_of(request).job.slo, waited_s, here=here))
        for request in self._scheduler.kv_holding_waiting:
            missing, ready = _missing(request), self._has_come(request)
            if missing > 1:
                before = max(before, request.num_computed_tokens)
                streams += missing if ready and self._started(request) else 0
            elif ready:
                needed += 1 + self._scheduler.num_spec_tokens
        if len(self._entrance):
            first = self._request_of(self._entrance.peek())
            if self._imports(self._entrance.peek()):
                needed += 1  # while vLLM has no token left it does not look who waits, not even for KV
            elif first.decodes:
                gaps_s.append(gap_target_s(first.job.slo))
        stream = self._entrance.stream
        if stream is not None and not self._imports(stream):
            blocks = self._blocks()
            streams += stream.num_tokens if stream.num_tokens <= blocks.free * blocks.size_tokens else 0
        return needed, streams, StepLoad(decodes, context, min(gaps_s, default=inf), before)

    def _joining(self) -> list[Request]:
        """Those that decode soon: streams whose KV is under way, the next one that waits for room, and all others
        whose KV has come.
        """
        found = [
            request
            for request in self._scheduler.kv_holding_waiting
            if self._started(request) or (_missing(request) == 1 and self._has_come(request))
        ]
        stream = self._entrance.stream
        return [*found, stream] if stream is not None else found

    def _has_come(self, request: Request) -> bool:
        """Whether its KV is not under way any more."""
        under_way = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        return not under_way or request.request_id in self._scheduler.finished_recving_kv_req_ids

    def _imports(self, request: Request) -> bool:
        """Whether one that waits takes its KV from elsewhere; it does so once."""
        return self._request_of(request).import_from is not None and not request.num_preemptions

    def _has_seat(self, request: Request) -> bool:
        """Whether one is left; a prompt leaves one for each stream whose KV is under way."""
        seats, inside = self._scheduler.max_num_active_reqs, self._queue.inside
        if len(inside) < seats or self._started(request):
            return True
        coming = sum(one.status != RequestStatus.RUNNING and self._started(one) for one in inside.values())
        return bool(len(self._scheduler.running) + coming < seats)

    def _started(self, request: Request) -> bool:
        """Whether it is a stream: its client has a token, given here or elsewhere, or one is under way to it."""
        given = request.num_output_tokens or request.num_output_placeholders
        return bool(given) or self._request_of(request).job.started

    def _rank(self, request: Request) -> Rank:
        return self._request_of(request).job.slo.weight, self._started(request)

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


def _missing(request: Request) -> int:
    """Tokens to compute before its next one; the last of a prompt is always computed here."""
    return max(1, int(request.num_tokens - request.num_computed_tokens))


# MERGED vllm_forced.py
# Has vLLM produce known tokens first: the second run of an answer of which a client has the beginning.
#
# Each step of such a run goes its usual way, through grammar, penalties and the request's own generator, and only the
# choice is made for it: all other tokens get probability 0. So the sampler's whole state after the last known token is
# that of an engine that drew these tokens itself, also where its own logits would have led elsewhere.
#
# vLLM 0.32 has an interface of its own for each of its two model runners. Both call the processors of
# `logits_processors` before temperature, top-k and top-p; neither takes any beside speculative decoding.


log = get_log(__name__)
FORCED = "polyphase_forced_tokens"  # of a request's `extra_args`


class ForcedTokens(LogitsProcessor):  # type: ignore[misc]  # vLLM is untyped here
    """For the model runner that CPUs have. It looks at the number of a request's output tokens, not at the tokens."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[list[int], list[int]]] = {}  # forced tokens, and vLLM's list of the output so far

    def is_argmax_invariant(self) -> bool:
        """Greedy requests are forced, too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of the batch."""
        process_dict_updates(self._rows, batch_update, _begun)

    def apply(self, logits: Any) -> Any:
        """Leave the next known token alone."""
        wanted = {row: forced[len(out)] for row, (forced, out) in self._rows.items() if len(out) < len(forced)}
        return _leave(logits, wanted)


class ForcedTokensV2(LogitsProcessorV2):  # type: ignore[misc]  # vLLM is untyped here
    """For the model runner that GPUs have by default."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._prompt_len = req_states.prompt_len
        self._slots: dict[int, list[int]] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Whether it has known tokens; the slot's last request is forgotten."""
        forced = forced_tokens(sampling_params)
        self._slots.pop(req_idx, None)
        if forced:
            self._slots[req_idx] = forced
        return bool(forced)

    def apply(self, logits: Any, ctx: Any) -> Any:
        """Leave the next known token alone. A row is a request: nothing is speculated."""
        if not self._slots:
            return logits
        wanted = {}
        for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
            forced = self._slots.get(slot)
            if forced is not None:
                at = int(ctx.seq_lens_upper_bound_np[row]) - int(self._prompt_len.np[slot])
                if 0 <= at < len(forced):  # below 0 the prompt goes on in the next step
                    wanted[row] = forced[at]
        return _leave(logits, wanted)


def forced_tokens(params: SamplingParams) -> list[int]:
    """Of a request, as `CoreRequests` puts them there; empty for nearly all."""
    return list((params.extra_args or {}).get(FORCED, ()))


def force_known_tokens(config: VllmConfig) -> None:
    """Have the engine of this configuration obey FORCED."""
    if config.speculative_config is not None:
        log.warning("speculative decoding: an answer that cannot be carried may fail when its instance is lost")
        return
    ours = ForcedTokensV2 if config.use_v2_model_runner else ForcedTokens
    config.model_config.logits_processors = [*(config.model_config.logits_processors or ()), ours]


def _begun(params: SamplingParams, _: list[int] | None, output: list[int]) -> tuple[list[int], list[int]] | None:
    forced = forced_tokens(params)
    return (forced, output) if forced else None


def _leave(logits: Any, wanted: dict[int, int]) -> Any:
    """Of each row the token that is wanted, and no other."""
    if wanted:
        rows, tokens = list(wanted), list(wanted.values())
        logits[rows] = float("-inf")
        logits[rows, tokens] = 0.0
    return logits
