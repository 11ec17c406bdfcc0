"""Every setting that a cluster file can give changes what is simulated, or is known to make no difference."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.simulate.deployment import load_deployment
from lab.simulate.from_cluster import ENGINE_ARGS, NOT_SIMULATED, read_cluster
from services.launcher.cluster_file import (
    COMMON,
    GatewaySection,
    InstanceSection,
    MonitorSection,
    SchedulerSection,
    Section,
)
from shared.cost.rates_file import Kind
from shared.domain.policies import KINDS, PolicySet
from tests.lab.simulate.test_from_cluster import DEFAULTS, calibration

REAL = {"engine": "vllm", "accelerator": "A10"}
FIXED = {**DEFAULTS, "emulated_step_s": 0.01}

# For each setting that is simulated a value other than its default, and what else the section says then.
CHANGES: dict[type[Section], dict[str, tuple[Any, dict[str, Any]]]] = {
    InstanceSection: {
        "role": ("decode", DEFAULTS),
        "engine": ("vllm", DEFAULTS),
        "accelerator": ("L40S", DEFAULTS),
        "dtype": ("float16", DEFAULTS),
        "block_size": (64, DEFAULTS),
        "chunk_size": (1024, DEFAULTS),
        "max_chunk_size": (1024, {**DEFAULTS, "chunk_size": "auto"}),
        "max_model_len": (1024, DEFAULTS),
        "max_seqs": (8, DEFAULTS),
        "kv_cache_bytes": (2 << 30, DEFAULTS),
        "tensor_parallel": (2, DEFAULTS),
        "pipeline_parallel": (2, DEFAULTS),
        "pipeline_layers": ((20, 12), {**REAL, "pipeline_parallel": 2}),
        "stage_accelerators": (["A10", "L40S"], {**DEFAULTS, "pipeline_parallel": 2}),
        "emulated_hop": ({"gbps": 1.0}, {**DEFAULTS, "pipeline_parallel": 2}),
        "node": ("one", DEFAULTS),
        "threads": (2, {**REAL, "rates_file": "CALIBRATION"}),
        "engine_args": ({"enable_prefix_caching": False}, REAL),
        "rates_file": ("CALIBRATION", REAL),
        "emulated_model": ("OPT-13B", DEFAULTS),
        "emulated_step_s": (0.02, DEFAULTS),
        "emulated_prefill_s_per_token": (1e-5, FIXED),
        "emulated_link_gbps": (10.0, DEFAULTS),
        "emulated_slowdown": (4.0, DEFAULTS),
        "emulated_prefix_cache": (False, DEFAULTS),
        "staging_bytes": (1 << 20, REAL),
        "weight": (4.0, DEFAULTS),
    },
    SchedulerSection: {},
    MonitorSection: {
        "broadcast_period_s": (0.5, {}),
        "drain_timeout_s": (5.0, {}),
        "role_flip_period_s": (5.0, {}),
        "role_flip_respects_s": (5.0, {}),
    },
    GatewaySection: {
        "max_queued_jobs": (8, {}),
        "max_queued_tokens": (4096, {}),
        "job_timeout_s": (60.0, {}),
        "patience_s": (1.0, {}),
        "moves": (0, {}),
        "slo": ({"default": {"ttft_s": 0.5}}, {}),
        "kv_codec": ("int8", {}),
    },
}
KEYS = {
    InstanceSection: "instance_defaults",
    SchedulerSection: "scheduler",
    MonitorSection: "monitor",
    GatewaySection: "gateway",
}


# Of each kind of policy one that is not the suite's.
POLICIES: dict[str, Any] = {
    "placement": {"name": "single", "instance": "p"},
    "split": {"name": "fraction", "fraction": 0.25},
    "dispatch": "random",
    "prefill_order": {"name": "sjf", "window": 4},
    "decode_admission": {"name": "reserve_dynamic", "end": "upper"},
    "step_budget": False,
    "role_flip": {"name": "idle", "for_s": 5.0},
}


def settable(section: type[Section]) -> set[str]:
    return set(section.settings.model_fields) - section.derived - COMMON


def read(folder: Path, section: type[Section], said: dict[str, Any]) -> Any:
    """What is simulated when a cluster file's section says that."""
    return read_cluster(written(folder, section, said))


def written(folder: Path, section: type[Section], said: dict[str, Any], **more: Any) -> Path:
    file = calibration(folder, *(Kind("vllm", "A10", "some-model", "bfloat16", 1, threads) for threads in (1, 2)))
    said = {key: file if value == "CALIBRATION" else value for key, value in said.items()}
    data: dict[str, Any] = {
        "name": "small",
        "model": "org/some-model",
        "instance_defaults": DEFAULTS,
        "instances": [{"id": "p"}],
        "network": {"inside": {"gbps": 100}},
    }
    data = {**data, KEYS[section]: said, **more}
    data["instance_defaults"] = {"role": "prefill", **data["instance_defaults"]}
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.mark.parametrize("section", CHANGES)
def test_every_setting_is_simulated_or_known_to_make_no_difference(section: type[Section]) -> None:
    ignored = set(NOT_SIMULATED[section.settings])  # type: ignore[index]
    simulated = set(CHANGES[section])
    assert not ignored & simulated
    assert ignored | simulated >= settable(section), "a new setting: simulate it, or say why it makes no difference"
    assert ignored <= set(section.settings.model_fields), "a setting that is gone"


@pytest.mark.parametrize(("section", "key"), [(section, key) for section, keys in CHANGES.items() for key in keys])
def test_what_is_simulated_changes_with_the_setting(tmp_path: Path, section: type[Section], key: str) -> None:
    value, beside = CHANGES[section][key]
    assert read(tmp_path, section, {**beside, key: value}) != read(tmp_path, section, beside)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_simulated_changes_with_the_policy(tmp_path: Path, kind: str) -> None:
    plain = load_deployment(written(tmp_path, MonitorSection, {})).run
    suite = written(tmp_path, MonitorSection, {}, policies={kind: PolicySet().of(kind).name})
    assert load_deployment(suite).run == plain
    other = written(tmp_path, MonitorSection, {}, policies={kind: POLICIES[kind]})
    assert load_deployment(other).run != plain


def test_reasons_are_given() -> None:
    reasons = [*ENGINE_ARGS.values(), *(reason for table in NOT_SIMULATED.values() for reason in table.values())]
    assert all(reasons)
