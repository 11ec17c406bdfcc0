"""Before an engine is built: what it takes of its device, and models that cannot be served."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import __version__
from vllm.config import CacheConfig
from vllm.v1.worker.utils import request_memory

from benchmarks.model_families import FAMILIES, make_model
from services.launcher.model_source import PROJECT
from services.worker.engines import vllm_start
from services.worker.engines.vllm_start import (
    check_arguments,
    check_model,
    engine_config,
    engine_info,
    kept_kv,
    ranks_port,
    utilization,
)
from services.worker.settings import MARGIN_BYTES
from shared.domain.instance import KvComponent, KvKind
from shared.errors import InvalidRequest
from shared.policy.decode_admission import Blocks
from tests.services.worker.test_settings import settings
from tests.shared.model.configs import REFUSED

GIB = 1 << 30


def starts(free: int, total: int, share: float) -> bool:
    """Whether vLLM's own check at an engine's start passes."""
    snapshot: Any = SimpleNamespace(free_memory=free, total_memory=total, device_="cuda:0")
    try:
        request_memory(snapshot, CacheConfig(gpu_memory_utilization=share))
    except ValueError:
        return False
    return True


def test_two_instances_share_a_device() -> None:
    one = settings(kv_cache_bytes=8 * GIB)
    share = utilization(one, 16 * GIB, 80 * GIB)
    assert share == pytest.approx((16 * GIB + 8 * GIB + MARGIN_BYTES) / (80 * GIB))
    left = 80 * GIB
    for fits in (True, True, True, False):  # 25 GiB each
        assert starts(left, 80 * GIB, share) is fits
        left -= one.device_bytes(16 * GIB)
    assert starts(80 * GIB, 80 * GIB, 0.92)
    assert not starts(55 * GIB, 80 * GIB, 0.92)  # vLLM's default refuses the second


@pytest.mark.parametrize(
    ("changes", "weights", "needed"),
    [
        ({}, 40, 40),
        ({"tensor_parallel": 4}, 40, 10),
        ({"pipeline_parallel": 2}, 40, 20),
        ({"pipeline_parallel": 2, "pipeline_layers": [30, 10], "tensor_parallel": 2}, 40, 15),
        ({"engine_args": {"quantization": "fp8"}}, 40, 0),
        ({"engine_args": {"cpu_offload_gb": 8}}, 40, 0),
    ],
)
def test_each_device_has_its_share_of_the_weights(changes: dict[str, Any], weights: int, needed: int) -> None:
    made = settings(kv_cache_bytes=2 * GIB, **changes)
    assert made.device_bytes(weights * GIB) == (needed + 2) * GIB + MARGIN_BYTES


def test_what_a_device_does_not_have_is_refused_with_the_figures() -> None:
    said = (
        r"A10: weights, KV \(`kv_cache_bytes`: 16\.0 GiB\) and 1 GiB .* are 32\.3 GiB of each device, which has 22\.1"
    )
    with pytest.raises(InvalidRequest, match=said):
        utilization(settings(accelerator="A10", kv_cache_bytes=16 * GIB), int(15.3 * GIB), int(22.1 * GIB))


def test_an_argument_that_the_installed_release_lacks_is_refused_by_name() -> None:
    newer = settings(engine_args={"seed": 3}).model_copy(update={"engine_args": {"seed": 3, "of_a_newer_release": 1}})
    with pytest.raises(InvalidRequest, match=rf"engine_args: of_a_newer_release: vLLM {__version__}, which this inst"):
        check_arguments(newer)
    check_arguments(settings(engine_args={"seed": 3}))


class Device:
    """A platform with devices of these sizes, in place of vLLM's."""

    def __init__(self, *totals: int) -> None:
        self._totals = totals

    def is_cpu(self) -> bool:
        return False

    def get_device_total_memory(self, rank: int) -> int:
        return self._totals[rank]


def test_the_smallest_device_counts_and_the_users_share_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_start, "current_platform", Device(80 * GIB, 40 * GIB))
    demo = str(PROJECT / "models" / "demo")
    two = settings(model=demo, kv_cache_bytes=9 * GIB, tensor_parallel=2)
    share = vllm_start._memory_arguments(two)["gpu_memory_utilization"]
    assert share == pytest.approx(10 / 40, rel=1e-3)
    assert not vllm_start._memory_arguments(settings(engine_args={"gpu_memory_utilization": 0.5}))
    monkeypatch.setattr(vllm_start, "current_platform", Device())  # which raises IndexError
    assert not vllm_start._memory_arguments(two)


def test_a_drafts_weights_count_too() -> None:
    demo = str(PROJECT / "models" / "demo")
    alone = vllm_start._weights(settings(model=demo))
    drafted = settings(model=demo, engine_args={"speculative_config": {"method": "draft_model", "model": demo}})
    assert alone > 0
    assert vllm_start._weights(drafted) == 2 * alone
    assert vllm_start._weights(settings(model=demo, engine_args={"speculative_config": {"method": "ngram"}})) == alone


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A mixture of experts."""
    return str(make_model(FAMILIES["Qwen3-MoE"], tmp_path_factory.mktemp("experts") / "model"))


def test_ranks_that_share_experts_meet_at_ports_that_the_settings_say(
    experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as in a worker
    shared: dict[str, Any] = {"model": experts, "data_parallel": 4, "data_parallel_port": 21_000}
    shared |= {"engine_args": {"enable_expert_parallel": True, "skip_tokenizer_init": True}}
    ports = []
    for rank in (0, 3):
        config = engine_config(settings(data_parallel_rank=rank, **shared), {}, None)
        parallel = config.parallel_config
        assert (parallel.data_parallel_size, parallel.data_parallel_rank, parallel.world_size_across_dp) == (4, rank, 4)
        assert parallel.distributed_executor_backend == "uni"  # as without other ranks
        assert parallel.data_parallel_rank_local == 0  # it sees its own devices only
        assert parallel.data_parallel_master_ip == "127.0.0.1"
        ports.append([parallel.get_next_dp_init_port() for _ in range(7)])
    assert ports[0] == ports[1] == [21_000, *range(21_002, 21_008)]
    assert ranks_port(settings(**shared)) == 21_001


def test_ranks_of_a_dense_model_are_engines_of_their_own() -> None:
    demo = str(PROJECT / "models" / "demo")
    config = engine_config(settings(model=demo, data_parallel=2, data_parallel_rank=1), {}, None)
    assert config.parallel_config.data_parallel_size == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data_parallel_port": 0}, "data_parallel_port: the ranks of a mixture of experts need ports"),
        ({"lora": {"allow_runtime_updating": True}}, "lora: .* vLLM forgets all adapters whenever one of them has"),
        (
            {"engine_args": {"enable_expert_parallel": True, "quantization": "int8_per_channel_weight_only"}},
            "CPU kernels",
        ),
    ],
)
def test_what_ranks_that_share_experts_cannot_do_is_refused(experts: str, changes: dict[str, Any], said: str) -> None:
    shared: dict[str, Any] = {"model": experts, "data_parallel": 2, "data_parallel_port": 21_000}
    args = {"skip_tokenizer_init": True} | changes.pop("engine_args", {})
    with pytest.raises(InvalidRequest, match=said):
        engine_config(settings(**(shared | changes), engine_args=args), {}, None)


def test_ranks_divide_the_weights_of_experts_and_no_others(experts: str) -> None:
    for model, ranks in ((experts, 2), (str(PROJECT / "models" / "demo"), 1)):
        alone = vllm_start._weights(settings(model=model))
        assert vllm_start._weights(settings(model=model, data_parallel=2)) == alone // ranks > 0


def test_where_kv_is_given_vllm_does_not_count_by_the_share() -> None:
    """A small share of a device refuses no KV: vLLM returns the given size before it looks at what it asked for."""
    source = Path(str(find_spec("vllm").origin)).parent / "v1/worker/gpu_worker.py"  # type: ignore[union-attr]
    body = source.read_text().partition("def determine_available_memory")[2].partition("\n    def ")[0]
    given, _, otherwise = body.partition("if kv_cache_memory_bytes := self.cache_config.kv_cache_memory_bytes:")
    assert "requested_memory" not in given
    assert (
        "return reserve_mm_ipc_gpu_memory(\n                kv_cache_memory_bytes,"
        in otherwise.partition("requested_memory")[0]
    )


def test_on_a_cpu_nothing_is_said_of_a_devices_memory() -> None:
    assert not vllm_start._memory_arguments(settings())


@pytest.mark.parametrize("name", ["DeepSeek-V3.2", "MiniMax-M3", "Whisper"])
def test_a_model_that_cannot_be_served_is_refused_before_vllm_has_it(tmp_path: Path, name: str) -> None:
    config, kind, _ = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidRequest) as refused:
        engine_config(settings(model=str(tmp_path)), {}, None)
    assert refused.value.message.startswith(f"model {tmp_path}: the model has {kind}")


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"use_mla": True}, ""),
        ({"use_mla": True, "chunks": False}, "use a CPU with AMX"),
        ({"is_hybrid": True}, ""),
        ({"cache_dtype": "fp8_e4m3"}, ""),
        ({"cache_dtype": "nvfp4"}, "set `engine_args: {kv_cache_dtype: bfloat16}`"),
        ({"cache_dtype": "bfloat16"}, ""),
        ({"cache_dtype": "float16"}, "not in float16 beside bfloat16: set `dtype: float16`"),
        ({"cache_dtype": "bfloat16", "dtype": torch.float32}, "not in bfloat16 beside float32"),
        ({}, ""),
    ],
)
def test_what_vllm_knows_of_a_model_without_config_json_counts_too(facts: dict[str, Any], said: str) -> None:
    plain = {"use_mla": False, "is_hybrid": False, "model": "m", "dtype": torch.bfloat16}
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(**plain | facts),
        cache_config=SimpleNamespace(cache_dtype=facts.get("cache_dtype", "auto")),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=facts.get("chunks", True)),
    )
    if not said:
        check_model(config)
        return
    with pytest.raises(InvalidRequest) as refused:
        check_model(config)
    assert said in refused.value.message


def test_the_demo_model_is_served_with_kv_in_its_own_precision() -> None:
    config = engine_config(settings(model=str(PROJECT / "models" / "demo")), {}, None)
    assert config.cache_config.cache_dtype in ("auto", "bfloat16")
    assert config.cache_config.kv_cache_memory_bytes == 256 << 20


LATENTS = (KvComponent(KvKind.LATENT, (0, 1), sides=1, heads=1, head_dim=576),)


def test_the_properties_of_an_engine_name_what_its_model_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(worker=SimpleNamespace(components=list(LATENTS), kv_dtype="float8_e4m3fn"))
    monkeypatch.setattr(vllm_start, "get_kv_transfer_group", lambda: group)
    made = settings(model=str(PROJECT / "models" / "demo"))
    blocks = Blocks(free=3, total=40, size_tokens=64)
    info = engine_info(made, engine_config(made, {}, None), blocks, kept_kv(None), {"sql": "digest"})
    assert info.adapters == {"sql": "digest"}
    assert info.compatibility.geometry.components == LATENTS
    assert (info.total_blocks, info.block_size, info.kv_dtype) == (40, 64, "float8_e4m3fn")
