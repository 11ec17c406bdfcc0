"""A cluster file, read as a simulation."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.simulate.from_cluster import read_cluster
from shared.domain.kv import Codec
from shared.errors import InvalidRequest

DEFAULTS = {"engine": "emulated", "accelerator": "A10"}
SMALL: dict[str, Any] = {
    "name": "small",
    "model": "org/some-model",
    "instance_defaults": DEFAULTS,
    "instances": [{"id": "p", "role": "prefill"}, {"id": "d", "role": "decode", "count": 2}],
}


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "c.yaml"
    file.write_text(yaml.safe_dump({**SMALL, **changes}))
    return file


def test_the_shipped_emulated_cluster() -> None:
    read = read_cluster(Path("emulated-mixed"))
    assert read.model == "Llama-3-8B"
    assert sum(entry.count for entry in read.instances) == 32
    first = read.instances[0]
    assert (first.accelerator, first.chunk_size, first.max_seqs, first.block_size) == ("A100-SXM-80", 2048, 128, 32)
    assert first.kv_cache_bytes == 60129542144
    assert first.reserves_output
    assert not first.prefix_cache


def test_a_real_cluster_has_its_own_model_and_the_workers_defaults(tmp_path: Path) -> None:
    defaults = {"accelerator": "A10", "tensor_parallel": 2, "engine_args": {"enable_prefix_caching": False}}
    read = read_cluster(write(tmp_path, instance_defaults=defaults))
    assert read.model == "org/some-model"
    first = read.instances[0]
    assert first.kv_cache_bytes == 2 * (256 << 20)  # vLLM's is one rank's
    assert not first.reserves_output
    assert not first.prefix_cache
    assert first.chunk_size == 512


def test_policies_slo_and_codec(tmp_path: Path) -> None:
    read = read_cluster(
        write(
            tmp_path,
            scheduler={"placement": "round_robin", "split": "fraction", "split_parameters": {"fraction": 0.25}},
            gateway={"slo": {"default": {"ttft_s": 1.5, "tpot_s": 0.05}}, "kv_codec": "int8"},
            instance_defaults={**DEFAULTS, "prefill_order": "sjf", "dispatch": "random"},
        )
    )
    assert read.policies.placement is not None
    assert read.policies.placement.name == "round_robin"
    assert read.policies.split is not None
    assert read.policies.split.model_extra == {"fraction": 0.25}
    assert read.policies.prefill_order is not None
    assert read.policies.prefill_order.name == "sjf"
    assert read.policies.dispatch is not None
    assert read.policies.dispatch.name == "random"
    assert (read.slo.ttft_s, read.slo.tpot_s) == (1.5, 0.05)
    assert read.run.codec is Codec.INT8
    assert read.run.patience_s == 10.0


def test_emulated_links_and_fixed_steps(tmp_path: Path) -> None:
    defaults = {**DEFAULTS, "emulated_link_gbps": 25, "emulated_step_s": 0.01, "emulated_prefill_s_per_token": 1e-5}
    first = read_cluster(write(tmp_path, instance_defaults=defaults)).instances[0]
    assert first.link is not None
    assert not isinstance(first.link, str)
    assert first.link.gbps == 25
    assert (first.step_s, first.prefill_s_per_token) == (0.01, 1e-5)
    assert read_cluster(write(tmp_path)).instances[0].link is None


def test_disabled_instances_are_left_out(tmp_path: Path) -> None:
    rows = [SMALL["instances"][0], {**SMALL["instances"][1], "enabled": False}]
    assert [entry.id for entry in read_cluster(write(tmp_path, instances=rows)).instances] == ["p"]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"id": "p", "role": "prefill", "chunk_size": "many"}], r"c\.yaml: instances\.p\.chunk_size"),
        ([{"id": "p", "role": "prefill", "max_seqs": 3.5}], r"c\.yaml: instances\.p\.max_seqs"),
        ([{"id": "p", "role": "prefill", "enabled": False}], r"none is enabled"),
        (
            [{"id": "p", "role": "prefill"}, {"id": "d", "role": "decode", "emulated_model": "OPT-13B"}],
            r"one model can be simulated, not Llama-3-8B, OPT-13B",
        ),
        (
            [{"id": "p", "role": "prefill"}, {"id": "d", "role": "decode", "prefill_order": "sjf"}],
            r"prefill_order must be one for all, not fcfs, sjf",
        ),
    ],
)
def test_errors_name_file_and_key(tmp_path: Path, rows: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read_cluster(write(tmp_path, instances=rows))
