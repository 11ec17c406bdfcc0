"""The parts of vLLM that the worker's changes to it replace or rely on, as they were when the changes were checked.

Where a digest differs, vLLM has changed there: check the named change against the new source, then note its digest.
"""

import inspect
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm import SamplingParams
from vllm.config import ParallelConfig
from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.distributed.kv_events import EventPublisher
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator, UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.dp_utils import coordinate_batch_across_dp
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2
from vllm.v1.worker.gpu.sample.states import SamplingStates as SamplingStatesV2
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState as ThinkingBudgetStateV2
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput, GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from services.worker.engines.vllm_patches import (
    RESUMED,
    ForcedTokens,
    SamplerState,
    resumes_exactly,
    sampling_state,
    zero_imported_blocks,
)

CHECKED: dict[str, dict[Any, str]] = {
    "replace_waiting_queue": {RequestQueue: "953b423ab7cd", Scheduler.schedule: "da4f2cf2fc39"},
    "limit_prompt_chunks": {Scheduler._reserve_prefill_lookahead: "c214e49d7610"},
    "observe_steps, replace_event_publisher": {
        Scheduler.update_from_output: "85b29db96051",
        EventPublisher: "fa8b2aa2bf50",
    },
    "observe_blocks": {
        BlockPool.cache_full_blocks: "5fbbcc0cf6eb",
        BlockPool.get_new_blocks: "ab54592edae4",
        BlockPool.reset_prefix_cache: "69bba8b57584",
        FreeKVCacheBlockQueue.popleft_n: "66605b8e690c",
        KVCacheBlock: "c059877cdb7f",
    },
    "longest_hit": {
        BlockPool.get_cached_block: "900b7434e95c",
        UnitaryKVCacheCoordinator.find_longest_cache_hit: "3b3bfd695ba8",
        HybridKVCacheCoordinator.find_longest_cache_hit: "0d109ac725cf",
        FullAttentionManager.find_longest_cache_hit: "8aafda11cf9b",
        SlidingWindowManager.find_longest_cache_hit: "1be2b9cb791a",
    },
    "host_tier, host_store": {
        SingleTypeKVCacheManager.allocate_external_computed_blocks: "f5419c711084",
        KVConnectorModelRunnerMixin._get_kv_connector_output: "d31c3c5204c3",
        ActiveKVConnector.pre_forward: "d14fe71d72b6",
    },
    "disk_tier": {KVOutputAggregator.aggregate: "44ec1f793430"},
    "force_known_tokens": {
        LogitsProcessor: "a6219776f22f",
        process_dict_updates: "8be84d343f19",
        LogitsProcessorV2: "02905833cbd9",
    },
    "force_beside_drafts": {
        GPUModelRunner._sample: "5cb5c1da02cf",
        GPUModelRunner._bookkeeping_sync: "13c3e81003a7",
        RejectionSampler.parse_output: "6090d9b98327",
    },
    "resume_requests": {
        EngineCore.preprocess_add_request: "a8b386db3f85",
        Request.append_output_token_ids: "8ff2924a5d87",
        StructuredOutputRequest: "f2010f8fe0fa",
        StructuredOutputManager.grammar_init: "42855e27624b",
        StructuredOutputManager.accept_tokens: "67b4e7056934",
        StructuredOutputManager._get_constraint_bounds: "0a5938e1b801",
        CachedRequestState: "34e708ccbc99",
        InputBatch.add_request: "33b3f53b9b19",
        InputBatch.remove_request: "74776981e14d",
        InputBatch.refresh_metadata: "c587491f51bc",
        ThinkingBudgetStateHolder.sync_batch: "4015a48d0a74",
        ThinkingBudgetStateHolder._init_state_entry: "4ef86a11b49c",
        GPUModelRunner._update_states: "326599f31b27",
        GPUModelRunnerV2.add_requests: "8321187d017e",
        SamplingStatesV2.add_request: "1b306e741578",
        ThinkingBudgetStateV2: "adb7f7f8ac94",
    },
    "make_stage_buffers": {GPUModelRunner._dummy_run: "47b96b71fc65", CPUWorker._should_warm_up_model: "83dba84441ce"},
    "overlap_on_cpu": {CpuPlatform.check_and_update_config: "d2960ad5d183"},
    "vllm_cpu_worker": {
        SpinCondition.__init__: "bce0af9288aa",
        AsyncGPUModelRunnerOutput: "8d7f634bdef6",
        CPUWorker.init_device: "11721464aeb0",
        GPUModelRunner.sample_tokens: "047e6a4738de",
        lora_ops: "33bc2aca729e",
        PunicaWrapperCPU: "acc9bc9cf24e",
        CpuCommunicator.all_gather: "8fa02811b25d",
        CpuCommunicator.all_reduce: "0ef7c5e72dbd",
        AgRsAll2AllManager: "193eb103bdb1",
        CPUUnquantizedExperts.apply: "babf24f200ec",
    },
    "vllm_ranks, _coupled_config": {
        EngineCore.step: "a02d17986fb7",
        EngineCore.step_with_batch_queue: "a905a2e1c445",
        Worker.execute_dummy_batch: "0e8ea6b24469",
        coordinate_batch_across_dp: "123ed6367cfa",
        ParallelConfig.get_next_dp_init_port: "0d6ee9cd08b2",
    },
}


@pytest.mark.parametrize("change", CHECKED)
def test_vllm_is_as_it_was_when_a_change_to_it_was_checked(change: str) -> None:
    digests = {_name(each): _digest(each) for each in CHECKED[change]}
    assert digests == {_name(each): digest for each, digest in CHECKED[change].items()}


def test_vllm_0_31_zeroes_blocks_of_imports() -> None:
    """It leaves out those in a set that it adds them to. vLLM 0.32 has no such set."""
    older: Any = SimpleNamespace(_skip_zero_block_ids=set())
    zero_imported_blocks(older)
    older._skip_zero_block_ids.update([3, 4])
    assert not older._skip_zero_block_ids
    newer = SimpleNamespace()
    zero_imported_blocks(newer)
    assert vars(newer) == {}


def engine(device: str = "cpu", **more: Any) -> Any:
    """A VllmConfig as far as the sampler's state depends on it."""
    given = {"use_v2_model_runner": False, "speculative_config": None, **more}
    processors = given.pop("logits_processors", [ForcedTokens])
    return SimpleNamespace(
        **given,
        model_config=SimpleNamespace(logits_processors=processors),
        device_config=SimpleNamespace(device_type=device),
    )


def handed_over(config: Any, params: SamplingParams, tokens: int = 3, **kept: Any) -> bytes:
    """The state of a request after so many tokens in an engine whose last rank keeps this."""
    ranks = SimpleNamespace(collective_rpc=lambda *_, **__: [None, (kept.get("generator", b""), kept.get("thinking"))])
    requests = {"r": SimpleNamespace(sampling_params=params, num_output_tokens=tokens)}
    core = SimpleNamespace(vllm_config=config, model_executor=ranks, scheduler=SimpleNamespace(requests=requests))
    return sampling_state(core, "r")


SEEDED = SamplingParams(temperature=1.0, seed=3)
BUDGET = SamplingParams(temperature=0, seed=3, thinking_token_budget=7)
PLAIN = SamplingParams(temperature=1.0, frequency_penalty=1.0, min_tokens=3)


def test_most_requests_go_on_without_any_state() -> None:
    assert handed_over(engine(), PLAIN) == b""
    assert resumes_exactly(engine(), PLAIN, b"")
    assert resumes_exactly(engine(use_v2_model_runner=True, speculative_config=object()), PLAIN, b"")


@pytest.mark.parametrize(
    ("params", "kept"), [(SEEDED, {"generator": b"1234"}), (BUDGET, {"thinking": {"in_think": True}})]
)
def test_a_seed_or_a_thinking_budget_goes_on_with_its_state_in_an_engine_of_its_kind(
    params: SamplingParams, kept: dict[str, Any]
) -> None:
    state = handed_over(engine(), params, **kept)
    assert resumes_exactly(engine(), params, state)
    for other in (engine("cuda"), engine(use_v2_model_runner=True)):
        assert not resumes_exactly(other, params, state)
    assert not resumes_exactly(engine(), params, b"")
    lost = handed_over(engine(), params)
    assert not resumes_exactly(engine(), params, lost)
    older = msgspec.structs.replace(msgspec.msgpack.decode(state, type=SamplerState), engine="vllm 0.31.0 v1 cpu")
    assert not resumes_exactly(engine(), params, msgspec.msgpack.encode(older))


def test_an_answer_that_moves_on_before_its_next_token_has_the_state_with_which_it_came() -> None:
    """The ranks may not have the request yet."""
    params = SamplingParams(temperature=1.0, seed=3, extra_args={RESUMED: {"tokens": [5, 6], "state": b"came"}})
    assert handed_over(engine(), params, 2) == b"came"
    assert handed_over(engine(), params, 3, generator=b"new") == handed_over(engine(), SEEDED, generator=b"new")


def test_the_second_model_runner_keeps_nothing_but_says_that_it_is_the_second() -> None:
    second = engine("cuda", use_v2_model_runner=True)
    for params in (SEEDED, BUDGET):
        assert resumes_exactly(second, params, handed_over(second, params))
        assert not resumes_exactly(second, params, b"")


def test_what_others_keep_of_a_request_is_not_known() -> None:
    """Drafts of the first model runner, and logits processors."""
    assert not resumes_exactly(engine(speculative_config=object()), PLAIN, b"")
    assert not resumes_exactly(engine(logits_processors=["own.module:Processor", ForcedTokens]), PLAIN, b"")


def _digest(part: Any) -> str:
    return sha256(inspect.getsource(part).encode()).hexdigest()[:12]


def _name(part: Any) -> str:
    return part.__name__ if inspect.ismodule(part) else f"{part.__module__}.{part.__qualname__}"
