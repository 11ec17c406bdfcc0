"""Every change that Polyphase makes to vLLM in a worker's processes.

The changes to vLLM's CPU worker are in `vllm_cpu_worker`, which vLLM loads by name, on CPUs only.

All were checked against vLLM 0.32.0. `tests/services/worker/engines/test_vllm_patches.py` holds a digest of each part
of vLLM that a change replaces or relies on: where vLLM changes there, the test fails and names what to check again.
An instance may also run vLLM 0.31, until its turn to be upgraded comes. Of these parts 0.31.0 differs in two: in
`Scheduler.schedule`, for which there is `zero_imported_blocks`, and in `CpuPlatform.check_and_update_config`, by a
default for GPUs. `tests/e2e/test_releases.py` lets both releases serve together.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any, Protocol

import msgspec
import torch
import vllm
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.kv_events import EventPublisher
from vllm.distributed.parallel_state import get_pp_group
from vllm.sampling_params import SamplingType
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP, BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2

from shared.runtime.logs import get_log

log = get_log(__name__)
FORCED, RESUMED = "polyphase_forced_tokens", "polyphase_resumed"  # of a request's `extra_args`
Limit = Callable[[Request, int, int], int]  # of a request, its computed tokens, and those of the chunk


def replace_waiting_queue(scheduler: Any, queue: RequestQueue) -> None:
    """Have the scheduler take the requests that wait from this queue."""
    scheduler.waiting = queue


def limit_prompt_chunks(scheduler: Any, limit: Limit) -> Limit:
    """Have the scheduler ask `limit` for the size of each chunk that it is about to schedule, in place of its own
    `_reserve_prefill_lookahead`, which is returned.
    """
    inner: Limit = scheduler._reserve_prefill_lookahead
    scheduler._reserve_prefill_lookahead = limit
    return inner


def zero_imported_blocks(scheduler: Any) -> None:
    """Have vLLM 0.31 zero blocks that an import is to fill, before the import begins, as it zeroes all other new ones.

    It leaves them out, and an import does not fill the last one. vLLM 0.32 asks the connector which ones to leave out
    (`PolyphaseConnector.get_loaded_kv_cache_group_ids`).
    """
    if hasattr(scheduler, "_skip_zero_block_ids"):
        scheduler._skip_zero_block_ids = _NoBlocks()


class _NoBlocks(set[int]):
    """A set that stays empty."""

    def update(self, *_: Any) -> None:
        pass


def before_shortage(scheduler: Any, make_room: Callable[[], bool]) -> None:
    """Have vLLM (0.32) call `make_room` where a request finds too few free blocks, and look again while that is true.

    An allocation that finds too few has changed nothing that a second one would change otherwise.
    """
    manager = scheduler.kv_cache_manager
    allocate = manager.allocate_slots

    def allocate_slots(*args: Any, **kwargs: Any) -> Any:
        blocks = allocate(*args, **kwargs)
        while blocks is None and make_room():
            blocks = allocate(*args, **kwargs)
        return blocks

    manager.allocate_slots = allocate_slots


def observe_steps(scheduler: Any, scheduled: Callable[[Any], None], updated: Callable[[Any], None]) -> None:
    """Call `scheduled(plan)` after each step is scheduled, and `updated(plan)` before its tokens are accounted for.

    Only the scheduler knows what a step computes.
    """
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def observed_schedule(*args: Any, **kwargs: Any) -> Any:
        plan = schedule(*args, **kwargs)
        scheduled(plan)
        return plan

    def observed_update(plan: Any, *args: Any, **kwargs: Any) -> Any:
        updated(plan)
        return update(plan, *args, **kwargs)

    scheduler.schedule, scheduler.update_from_output = observed_schedule, observed_update


def replace_event_publisher(scheduler: Any, wrap: Callable[[EventPublisher], EventPublisher]) -> None:
    """Replace the publisher of KV events, which gets those of a step after each step."""
    scheduler.kv_event_publisher = wrap(scheduler.kv_event_publisher)


class CacheObserver(Protocol):
    def cached(self, request: Request, blocks: Sequence[KVCacheBlock], start: int, end: int, group: int) -> None:
        """Blocks [start, end) of a request, in this KV cache group, can be found from now on."""

    def evicting(self, blocks: Sequence[KVCacheBlock]) -> None:
        """These free blocks are about to be used; those with a hash could be found until now."""

    def clear(self) -> None:
        """No block can be found any more."""


def observe_blocks(pool: Any, observer: CacheObserver) -> None:
    """Call `observer` with the blocks that vLLM's block pool caches and gives away.

    vLLM's events name blocks by hashes alone, and come after the step.
    """
    cache, new, reset = pool.cache_full_blocks, pool.get_new_blocks, pool.reset_prefix_cache

    def observed_cache(
        request: Request,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        cache(request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask)
        observer.cached(request, blocks, num_cached_blocks, num_full_blocks, kv_cache_group_id)

    def observed_new(num_blocks: int) -> list[KVCacheBlock]:
        if num_blocks <= pool.get_num_free_blocks():
            leaving, block = [], pool.free_block_queue.fake_free_list_head
            for _ in range(num_blocks):
                block = block.next_free_block
                leaving.append(block)
            observer.evicting(leaving)
        blocks: list[KVCacheBlock] = new(num_blocks)
        return blocks

    def observed_reset() -> bool:
        done: bool = reset()
        if done:
            observer.clear()
        return done

    pool.cache_full_blocks, pool.get_new_blocks, pool.reset_prefix_cache = observed_cache, observed_new, observed_reset


def longest_hit(
    manager: Any, stored: Callable[[Any], Any], request: Request, most_tokens: int
) -> tuple[Sequence[Sequence[Any]], int]:
    """The longest beginning of a request, of at most so many tokens, of which vLLM's cache or `stored` has the blocks
    that vLLM would need, in each KV cache group, and its tokens. vLLM's own blocks take precedence.

    Which blocks are needed is vLLM's to say: all of full attention, the last ones of a window, and more with drafts.
    """
    pool = manager.block_pool
    cached = pool.get_cached_block

    def either(block_hash: Any, group_ids: list[int]) -> list[Any] | None:
        found = cached(block_hash, group_ids)
        if found:
            return list(found)
        blocks = []
        for group in group_ids:
            own = cached(block_hash, [group])
            block = own[0] if own else stored(make_block_hash_with_group_id(block_hash, group))
            if block is None:
                return None
            blocks.append(block)
        return blocks

    pool.get_cached_block = either
    try:
        groups, tokens, *_ = manager.coordinator.find_longest_cache_hit(request.block_hashes, most_tokens)
    finally:
        del pool.get_cached_block
    return groups, tokens


def overlap_on_cpu(config: VllmConfig) -> None:
    """Have a step scheduled while the tokens of the one before are still to be fetched, which vLLM turns off on
    CPUs: see `vllm_cpu_worker`. Raises ValueError with pipeline stages, for which vLLM's CPU backend cannot, and with
    speculative decoding, whose drafts are fetched by streams of a device.
    """
    if config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError("async_scheduling does not work with pipeline stages on vLLM's CPU backend")
    if config.speculative_config is not None:
        raise ValueError("async_scheduling does not work with speculative decoding on vLLM's CPU backend")
    config.scheduler_config.async_scheduling = True


def make_stage_buffers(core: Any) -> None:
    """Complete the pipeline stages of a started engine core; on a CPU nothing else does.

    vLLM makes what a later stage receives into in its warm-up. Its CPU backend has none where the engine is eager and
    `kv_cache_memory_bytes` is given, so that the first forward pass of such a stage would fail.
    """
    if core.vllm_config.parallel_config.pipeline_parallel_size > 1:
        core.model_executor.collective_rpc(_make_stage_buffers)


def _make_stage_buffers(worker: Any) -> None:
    runner = worker.model_runner
    if worker.device.type != "cpu" or get_pp_group().is_first_rank or runner.intermediate_tensors is not None:
        return
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


def force_known_tokens(config: VllmConfig) -> None:
    """Have the engine of this configuration begin an answer with the tokens in FORCED, of which a client has them.

    Each step goes its usual way, through grammar, penalties and the request's own generator, and only the choice is
    made for it: all other tokens get probability 0. So the sampler's whole state after the last known token is that
    of an engine that drew these tokens itself, also where its own logits would have led elsewhere.

    vLLM has an interface of its own for each of its two model runners. Both call the processors of
    `logits_processors` before temperature, top-k and top-p; neither accepts any beside speculative decoding, for which
    there is `force_beside_drafts`.
    """
    if config.speculative_config is not None:
        return
    ours = ForcedTokensV2 if config.use_v2_model_runner else ForcedTokens
    config.model_config.logits_processors = [*(config.model_config.logits_processors or ()), ours]


def force_beside_drafts(core: Any) -> None:
    """Do the same in a started engine core with speculative decoding: the sampler's choice for a request with known
    tokens is replaced by the next one of them, and its drafts count as rejected.

    Only vLLM's first model runner has such a place. The request's own generator is not where it was after the known
    tokens: how much speculative decoding draws from it depends on the drafts.
    """
    config = core.vllm_config
    if config.speculative_config is None:
        return
    if config.use_v2_model_runner:
        log.warning("speculative decoding: an answer that cannot be carried may fail when its instance is lost")
        return
    core.model_executor.collective_rpc(_force_beside_drafts)


def _force_beside_drafts(worker: Any) -> None:
    runner = worker.model_runner
    sample = runner._sample

    def forced_sample(*given: Any) -> Any:
        output = sample(*given)
        for row, name in enumerate(runner.input_batch.req_ids):
            request = runner.requests[name]
            forced, at = forced_tokens(request.sampling_params), len(request.output_token_ids)
            if at < len(forced):
                output.sampled_token_ids[row] = PLACEHOLDER_TOKEN_ID
                output.sampled_token_ids[row, 0] = forced[at]
        return output

    runner._sample = forced_sample


class ForcedTokens(LogitsProcessor):  # type: ignore[misc]  # vLLM is untyped here
    """For the model runner that CPUs have. It looks at the number of a request's output tokens, not at the tokens."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[list[int], list[int]]] = {}  # forced tokens, and vLLM's list of the output so far

    def is_argmax_invariant(self) -> bool:
        """False: greedy requests are forced too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _begun)

    def apply(self, logits: Any) -> Any:
        wanted = {row: forced[len(out)] for row, (forced, out) in self._rows.items() if len(out) < len(forced)}
        return _only(logits, wanted)


class ForcedTokensV2(LogitsProcessorV2):  # type: ignore[misc]  # vLLM is untyped here
    """For the model runner that GPUs have by default."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._prompt_len = req_states.prompt_len
        self._slots: dict[int, list[int]] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Whether it has known tokens. The last request in this slot is forgotten."""
        forced = forced_tokens(sampling_params)
        self._slots.pop(req_idx, None)
        if forced:
            self._slots[req_idx] = forced
        return bool(forced)

    def apply(self, logits: Any, ctx: Any) -> Any:
        """A row is a request: nothing is speculated."""
        if not self._slots:
            return logits
        wanted = {}
        for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
            forced = self._slots.get(slot)
            if forced is not None:
                at = int(ctx.seq_lens_upper_bound_np[row]) - int(self._prompt_len.np[slot])
                if 0 <= at < len(forced):  # below 0 the prompt goes on in the next step
                    wanted[row] = forced[at]
        return _only(logits, wanted)


def forced_tokens(params: SamplingParams) -> list[int]:
    """Empty for nearly all requests."""
    return list((params.extra_args or {}).get(FORCED, ()))


def _begun(params: SamplingParams, _: list[int] | None, output: list[int]) -> tuple[list[int], list[int]] | None:
    forced = forced_tokens(params)
    return (forced, output) if forced else None


def _only(logits: Any, wanted: dict[int, int]) -> Any:
    """Leave each of these rows its wanted token and no other."""
    if wanted:
        rows, tokens = list(wanted), list(wanted.values())
        logits[rows] = float("-inf")
        logits[rows, tokens] = 0.0
    return logits


class Resumed(msgspec.Struct, frozen=True):
    """RESUMED of a request whose answer has begun in another engine: its tokens, and `sampling_state` after them."""

    tokens: list[int]
    state: bytes = b""


class SamplerState(msgspec.Struct, frozen=True):
    """What a sampler keeps of a request besides its tokens. engine: see `_sampler_kind`. generator: of a seeded
    request. thinking: of one with a thinking budget: where in its reasoning the answer is.
    """

    engine: str
    generator: bytes = b""
    thinking: dict[str, Any] | None = None


def resume_requests(core: Any) -> None:
    """Have a started engine core go on with requests that have RESUMED as with those that it has preempted.

    vLLM's scheduler and its second model runner keep nothing of a preempted request but its tokens. Its first model
    runner keeps the request, and is given what it would have kept. A grammar accepts the tokens as soon as it is
    compiled, in the thread in which it is.
    """
    _advance_grammars(core.structured_output_manager)
    if not core.vllm_config.use_v2_model_runner:
        core.model_executor.collective_rpc(_resume_requests)


def resumes_exactly(config: VllmConfig, params: SamplingParams, state: bytes) -> bool:
    """Whether an answer goes on after its tokens as it would have in the engine that gave them and this state.

    Not with drafts in the first model runner, which draw from a request's generator, nor with logits processors of
    others, which may keep anything. A seed, or a thinking budget, needs its state, of the same kind of engine. With
    drafts in the second model runner, a seeded answer may take another course where the drafts are others.
    """
    if config.speculative_config is not None and not config.use_v2_model_runner:
        return False
    ours = (ForcedTokens, ForcedTokensV2)
    if _has_plugins() or any(each not in ours for each in config.model_config.logits_processors or ()):
        return False
    seeded, budget = _kept(params)
    if not (seeded or budget):
        return True
    if not state:
        return False
    found = msgspec.msgpack.decode(state, type=SamplerState)
    if found.engine != _sampler_kind(config):
        return False
    lacks = (seeded and not found.generator) or (budget and found.thinking is None)
    return config.use_v2_model_runner or not lacks


def add_resumed(core: Any, core_request: EngineCoreRequest) -> None:
    """Add a request that has RESUMED to an engine core."""
    request, wave = core.preprocess_add_request(core_request)
    resumed = _resumed(request.sampling_params)
    assert resumed is not None
    request.append_output_token_ids(resumed.tokens)
    # vLLM asserts that no more than the prompt is found in caches; the engine that began the answer has reported it.
    request.prefill_stats = None
    core.add_request(request, wave)


def sampling_state(core: Any, request_id: str) -> bytes:
    """The state of a request's sampler after all tokens that the engine core has given out. No step of the request may
    be under way. Empty for most requests: their tokens are all the state they have.
    """
    request = core.scheduler.requests[request_id]
    config, params, resumed = core.vllm_config, request.sampling_params, _resumed(request.sampling_params)
    if not any(_kept(params)):
        return b""
    if resumed is not None and request.num_output_tokens == len(resumed.tokens):
        return resumed.state  # nothing was drawn since, and the ranks may not know the request yet
    state = SamplerState(_sampler_kind(config))
    if not config.use_v2_model_runner:  # the second model runner draws by seed and position, and scans the tokens
        generator, thinking = core.model_executor.collective_rpc(_sampler_state, args=(request_id,))[-1]
        state = SamplerState(state.engine, generator, thinking)
    return msgspec.msgpack.encode(state)


@cache
def _has_plugins() -> bool:
    """Whether a package is installed that adds logits processors to every engine."""
    return bool(entry_points(group=LOGITSPROCS_GROUP))


def _kept(params: SamplingParams) -> tuple[bool, bool]:
    """Whether the sampler keeps a generator for the request, and a thinking budget."""
    return params.sampling_type == SamplingType.RANDOM_SEED, params.thinking_token_budget is not None


def _sampler_kind(config: VllmConfig) -> str:
    """Engines of one kind go on with each other's state."""
    runner = "v2" if config.use_v2_model_runner else "v1"
    return f"vllm {vllm.__version__} {runner} {config.device_config.device_type}"


def _resumed(params: SamplingParams | None) -> Resumed | None:
    given = (params.extra_args or {}).get(RESUMED) if params is not None else None
    return msgspec.convert(given, Resumed) if given is not None else None


def _advance_grammars(manager: Any) -> None:
    create = manager._create_grammar

    def created(request: Request) -> Any:
        grammar = create(request)
        if (resumed := _resumed(request.sampling_params)) is not None:
            _accept(manager, request, grammar, resumed.tokens)
        return grammar

    manager._create_grammar = created


def _accept(manager: Any, request: Request, grammar: Any, tokens: list[int]) -> None:
    """Have the grammar accept these tokens one by one, as they came, with reasoning left out as vLLM leaves it out.

    Meanwhile vLLM may set the request's grammar, to a future that is not done: a copy of the request is used.
    """
    ours, seen = request.structured_output_request, list(request.prompt_token_ids or ())
    known = SimpleNamespace(
        request_id=request.request_id,
        use_structured_output=True,
        structured_output_request=replace(ours, _grammar=grammar),
        prompt_token_ids=request.prompt_token_ids,
        all_token_ids=seen,
    )
    for token in tokens:
        seen.append(token)
        if not manager.accept_tokens(known, [token]):
            raise ValueError(f"the grammar does not accept token {token} of the answer so far")
    ours.reasoning_ended = known.structured_output_request.reasoning_ended
    ours.reasoner = known.structured_output_request.reasoner


_THINKING = "polyphase_thinking"  # of a CachedRequestState that is not in the batch
_NOT_STATE = ("prompt_tok_ids", "output_tok_ids", "spec_token_ids")


def _resume_requests(worker: Any) -> None:
    """Give the first model runner the tokens of a request that resumes, before it is in the batch, and its state."""
    runner = worker.model_runner
    batch, holder = runner.input_batch, runner.input_batch.thinking_budget_state_holder
    add, remove = batch.add_request, batch.remove_request

    def add_request(request: Any) -> Any:
        resumed = _resumed(request.sampling_params)
        if resumed is not None and not request.output_token_ids:
            request.output_token_ids.extend(resumed.tokens)
            if request.generator is not None:
                state = msgspec.msgpack.decode(resumed.state, type=SamplerState)
                request.generator.set_state(torch.frombuffer(bytearray(state.generator), dtype=torch.uint8))
        return add(request)

    def remove_request(name: str) -> Any:
        """A request that pauses leaves the batch, and vLLM forgets where in its reasoning it was."""
        kept = holder._state.get(batch.req_id_to_index.get(name)) if holder is not None else None
        if kept is not None and name in runner.requests:
            setattr(runner.requests[name], _THINKING, kept)
        return remove(name)

    batch.add_request, batch.remove_request = add_request, remove_request
    if holder is not None:
        _resume_thinking(holder)


def _resume_thinking(holder: Any) -> None:
    sync = holder.sync_batch

    def sync_batch(update: BatchUpdate | None) -> None:
        sync(update)
        for _, params, _, output in update.added if update is not None else ():
            resumed = _resumed(params)
            if resumed is None or len(output) != len(resumed.tokens) or params.thinking_token_budget is None:
                continue
            state = msgspec.msgpack.decode(resumed.state, type=SamplerState)
            for entry in holder._state.values():
                if entry["output_tok_ids"] is output:  # rows may have moved since they were added
                    entry.update(state.thinking)

    holder.sync_batch = sync_batch


def _sampler_state(worker: Any, request_id: str) -> tuple[bytes, dict[str, Any] | None]:
    """In the first model runner; of ranks in other stages than the last one it has no meaning."""
    runner = worker.model_runner
    request, batch = runner.requests[request_id], runner.input_batch
    generator = request.generator.get_state().numpy().tobytes() if request.generator is not None else b""
    holder, row = batch.thinking_budget_state_holder, batch.req_id_to_index.get(request_id)
    kept = getattr(request, _THINKING, None) if row is None or holder is None else holder._state.get(row)
    thinking = {name: value for name, value in kept.items() if name not in _NOT_STATE} if kept is not None else None
    return generator, thinking
