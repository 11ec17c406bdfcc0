"""What `engine_args` may hold: vLLM's engine arguments by name, but for those that an instance cannot follow.

The names, `engine_args.json`, are those of the version of vLLM that this was checked against, so that a mistake is
found without importing vLLM. `tests/services/worker/test_engine_args.py` compares them with the installed version.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shared.files.faults import meant
from shared.secrecy import shown_key

NAMES = Path(__file__).with_suffix(".json")


class Names(msgspec.Struct, frozen=True):
    """The engine arguments of one version of vLLM."""

    vllm: str
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Arguments that are refused for one reason, except for values that change nothing."""

    names: tuple[str, ...]
    reason: str
    harmless: tuple[object, ...] = ()


def _own(setting: str, place: str = "") -> str:
    return f"it is a setting of its own, `{setting}`{place}"


_TOP = ", at the top of the file"
_DATA_PARALLEL = f"{_own('data_parallel')}: each rank is a process of the instance"
_IN_STEP = "the data-parallel ranks of an instance keep each other in step, in their own way"
_ONE_HOST = "all ranks of an instance run on its host, where its peers find their KV"
_CONTEXT = "a token's KV is divided by `tensor_parallel` and `pipeline_parallel` alone"
_OFFLOADING = (
    "vLLM would put a connector of its own in place of the one that transfers KV: `kv_cache_bytes` is how much KV is "
    "kept on the device, `host_kv_bytes` how much of what leaves it stays in host memory, and `disk_kv_bytes` on a disk"
)
_SLEEP = "nothing wakes an instance again, and KV that peers are to pull would be lost: stop the instance instead"
_GENERATES = "an instance generates text, and nothing else"
_ORDER = "who is next is a policy: `policies: {prefill_order: …}`"
_STORED = (
    "KV in that form cannot be transferred; allowed: auto, bfloat16, float16, fp8, fp8_e4m3, fp8_e5m2. To send less, "
    "set `gateway: {kv_codec: …}`"
)

REFUSED: tuple[Refusal, ...] = (
    Refusal(("model",), _own("model", _TOP)),
    Refusal(("served_model_name",), _own("served_model_name", _TOP)),
    Refusal(("max_model_len",), _own("max_model_len", _TOP)),
    Refusal(("trust_remote_code",), _own("trust_remote_code", _TOP), (False,)),
    Refusal(("dtype",), _own("dtype")),
    Refusal(("block_size",), _own("block_size")),
    Refusal(("tensor_parallel_size",), _own("tensor_parallel")),
    Refusal(("pipeline_parallel_size",), _own("pipeline_parallel")),
    Refusal(("max_num_batched_tokens", "max_num_scheduled_tokens"), _own("chunk_size")),
    Refusal(("max_num_seqs",), _own("max_seqs")),
    Refusal(("kv_cache_memory_bytes",), _own("kv_cache_bytes")),
    Refusal(("async_scheduling",), _own("async_scheduling")),
    Refusal(("device_ids",), _own("devices")),
    Refusal(("otlp_traces_endpoint",), "vLLM's traces would be beside ours: use `tracing`"),
    Refusal(("kv_transfer_config",), "an instance's KV goes by its own connector: `kv_transport` says how"),
    Refusal(("kv_events_config",), "the instance itself listens to the events of its cache"),
    Refusal(("ec_transfer_config",), "nothing here exchanges the outputs of encoders", (None,)),
    Refusal(("worker_cls",), "the instance chooses vLLM's worker by its device", ("auto",)),
    Refusal(("kv_offloading_size",), _OFFLOADING, (None,)),
    Refusal(("data_parallel_size", "data_parallel_size_local"), _DATA_PARALLEL, (None, 1)),
    Refusal(
        ("data_parallel_rank", "data_parallel_start_rank", "data_parallel_address", "data_parallel_rpc_port"),
        _DATA_PARALLEL,
        (None,),
    ),
    Refusal(
        ("data_parallel_hybrid_lb", "data_parallel_external_lb", "data_parallel_multi_port_external_lb"),
        _DATA_PARALLEL,
        (False,),
    ),
    Refusal(("data_parallel_backend",), f"{_DATA_PARALLEL} on its host", ("mp",)),
    Refusal(("dp_sync_interval",), _IN_STEP, (16,)),
    Refusal(("prefill_schedule_interval",), _IN_STEP, (1,)),
    Refusal(("enable_fault_tolerance",), f"{_IN_STEP}, and all are started again when one dies", (False,)),
    Refusal(("enable_elastic_ep",), "the number of an instance's data-parallel ranks is fixed", (False,)),
    Refusal(("elastic_ep_max_dp_size",), "the number of an instance's data-parallel ranks is fixed", (None,)),
    Refusal(("nnodes",), _ONE_HOST, (1,)),
    Refusal(("node_rank",), _ONE_HOST, (0,)),
    Refusal(("distributed_executor_backend",), f"{_ONE_HOST}: mp, or leave it out", (None, "mp", "uni")),
    Refusal(("prefill_context_parallel_size", "decode_context_parallel_size"), _CONTEXT, (1,)),
    Refusal(("enable_sleep_mode", "sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend"), _SLEEP, (False,)),
    Refusal(("enable_lora",), _own("lora", _TOP), (False,)),
    Refusal(("max_loras",), _own("lora: {max_loras: …}", _TOP), (1,)),
    Refusal(("max_lora_rank",), _own("lora: {max_rank: …}", _TOP), (16,)),
    Refusal(
        ("mm_processor_cache_gb",), "gateways send the data of images with each job, and keep what they can", (0, 0.0)
    ),
    Refusal(("default_mm_loras",), "an adapter is chosen by the name of the model: use `lora`", (None,)),
    Refusal(("kv_cache_dtype",), _STORED, ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")),
    Refusal(("kv_cache_dtype_skip_layers",), "a transfer has KV of one type: all layers store it alike", ([],)),
    Refusal(("runner",), _GENERATES, ("auto", "generate")),
    Refusal(("convert",), _GENERATES, ("auto", "none")),
    Refusal(("mm_encoder_only",), _GENERATES, (False,)),
    Refusal(("pooler_config", "diffusion_config"), _GENERATES, (None,)),
    Refusal(("scheduler_cls",), _ORDER, (None,)),
    Refusal(("scheduling_policy",), _ORDER, ("fcfs",)),
)
_BY_NAME: Mapping[str, Refusal] = {name: refusal for refusal in REFUSED for name in refusal.names}


@functools.cache
def known() -> Names:
    """The arguments of the version of vLLM that this was checked against."""
    return msgspec.json.decode(NAMES.read_bytes(), type=Names)


def faults_of(args: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with `engine_args`: `name: why, and what to do`, one for each fault."""
    for name, value in args.items():
        refusal = _BY_NAME.get(name)
        if refusal is not None and not any(type(value) is type(each) and value == each for each in refusal.harmless):
            yield f"{shown_key(name)}: {refusal.reason}"
        elif name not in known().names:
            near = meant(name, sorted(known().names)).removesuffix(".")
            yield f"{shown_key(name)}: vLLM {known().vllm} has no such engine argument{near}"
