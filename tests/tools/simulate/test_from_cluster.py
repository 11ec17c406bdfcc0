"""A cluster file, read as a simulation."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.launcher.cluster_sections import (
    GatewaySection,
    InstanceSection,
    MonitorSection,
    SchedulerSection,
    Section,
)
from shared.cost.library import Library
from shared.cost.rates_file import CalibratedKind, Calibration, ControlPlane, Kind
from shared.cost.step import Batch
from shared.domain.kv import Codec
from shared.domain.policies import KINDS, PolicySet
from shared.errors import InvalidRequest, NotFound
from shared.policy.predictive_flip import PredictiveFlip
from shared.sim.spec import InstanceSpec
from tests.shared.cost.calibrations import FIT, calibrated
from tools.simulate.deployment import load_deployment
from tools.simulate.from_cluster import NOT_SIMULATED, read_cluster

DEFAULTS = {"engine": "emulated", "accelerator": "A10"}
REAL = {"engine": "vllm", "accelerator": "A10"}


def write(folder: Path, defaults: dict[str, Any] = DEFAULTS, **changes: Any) -> Path:
    instances = [{"id": "p", "role": "prefill"}, {"id": "d", "role": "decode", "count": 2}]
    content = {"name": "small", "model": "org/some-model", "instances": instances, "instance_defaults": defaults}
    file = folder / "c.yaml"
    file.write_text(yaml.safe_dump({**content, **changes}))
    return file


def first(folder: Path, defaults: dict[str, Any], **changes: Any) -> InstanceSpec:
    return load_deployment(write(folder, defaults, **changes)).instances[0]


def calibration(folder: Path, *kinds: Kind) -> str:
    file = folder / "calibration.yaml"
    file.write_text(Calibration("2026-01-01", "test", ControlPlane(), tuple(map(slower, kinds))).to_yaml())
    return str(file)


def slower(kind: Kind) -> CalibratedKind:
    return calibrated(kind=kind, compute_factor=0.5, bandwidth_factor=0.5, step_s=2e-3, chunk_s=3e-3)


def test_a_real_cluster_has_its_own_model_and_the_workers_defaults(tmp_path: Path) -> None:
    defaults = {"accelerator": "A10", "tensor_parallel": 2, "engine_args": {"enable_prefix_caching": False}}
    rows = [{"id": "p", "role": "prefill"}, {"id": "d", "role": "decode", "enabled": False}]
    read, _ = read_cluster(write(tmp_path, defaults, instances=rows))
    (entry,) = read.instances
    assert (read.model, read.run.streaming) == ("org/some-model", True)
    assert entry.kv_cache_bytes == 2 * (256 << 20)  # vLLM's setting is one rank's
    assert (entry.prefix_cache, entry.chunk_size, entry.reserves_output) == (False, 512, False)


def test_a_pipeline_holds_what_its_fullest_stage_has_room_for(tmp_path: Path) -> None:
    def entry(**settings: Any) -> Any:
        defaults = {"accelerator": "A10", "tensor_parallel": 2, "kv_cache_bytes": 1 << 30, "pipeline_parallel": 2}
        return read_cluster(write(tmp_path, {**defaults, **settings}))[0].instances[0]

    even = entry()
    assert (even.pipeline_parallel, even.kv_cache_bytes, even.staging_bytes) == (2, 4 << 30, "auto")
    assert entry(pipeline_layers=[24, 8]).kv_cache_bytes == int((2 << 30) * 32 / 24)
    assert entry(staging_bytes=1 << 20).staging_bytes == 4 << 20


@pytest.mark.parametrize("stages", [1, 2])
def test_an_emulated_pipeline_has_no_prefix_cache(tmp_path: Path, stages: int) -> None:
    defaults = {"engine": "emulated", "accelerator": "A10", "pipeline_parallel": stages}
    entry = read_cluster(write(tmp_path, defaults))[0].instances[0]
    assert entry.prefix_cache is (stages == 1)


def test_settings_of_the_services(tmp_path: Path) -> None:
    gateway = {"slo": {"default": {"ttft_s": 1.5, "tpot_s": 0.05}}, "kv_codec": "int8", "max_queued_jobs": 9}
    monitor = {"role_flip_period_s": 0.5, "drain_timeout_s": 7, "broadcast_period_s": 0.2}
    policies = {"role_flip": {"name": "predictive", "for_s": 3}}
    run = load_deployment(write(tmp_path, gateway=gateway, monitor=monitor, policies=policies)).run
    assert (run.slo.ttft_s, run.slo.tpot_s, run.codec) == (1.5, 0.05, Codec.INT8)
    assert (run.max_queued_jobs, run.patience_s, run.streaming) == (9, 10.0, False)
    assert (run.role_flip_every_s, run.drain_timeout_s, run.broadcast_s) == (0.5, 7.0, 0.2)
    assert run.role_flip == PredictiveFlip(for_s=3.0)


@pytest.mark.parametrize("more", [{}, {"emulated_link_gbps": 25}, {"emulated_step_s": 0.01}])
def test_a_slowed_engine_has_longer_steps_and_a_slower_link_and_reports_that(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    plain = first(tmp_path, {**DEFAULTS, **more})
    slow = first(tmp_path, {**DEFAULTS, **more, "emulated_slowdown": 4.0})
    batch = Batch(((100, 0),), 4, 2_000)
    assert slow.model.step_time_s(batch) == pytest.approx(4.0 * plain.model.step_time_s(batch))
    assert slow.link.bandwidth_bytes_s == pytest.approx(plain.link.bandwidth_bytes_s / 4.0)
    assert plain.rates.step is not None
    assert slow.rates.step is not None
    assert slow.rates.step.decode_s(4, 2_000) == pytest.approx(4.0 * plain.rates.step.decode_s(4, 2_000))


def test_a_real_engine_reports_what_was_calibrated_and_is_as_fast(tmp_path: Path) -> None:
    real = {**REAL, "kv_cache_bytes": 2 << 30}
    rows = [{"id": "p", "role": "prefill"}, {"id": "d", "role": "decode", "threads": 4}]
    model: dict[str, Any] = {"model": "Llama-3-8B", "instances": rows}
    unknown = load_deployment(write(tmp_path, real, **model))
    assert {spec.rates.step for spec in unknown.instances} == {None}
    kinds = [Kind("vllm", "A10", "Llama-3-8B", "bfloat16", 1, threads) for threads in (1, 4)]
    known = load_deployment(write(tmp_path, {**real, "rates_file": calibration(tmp_path, *kinds)}, **model))
    for spec in known.instances:
        assert spec.rates.step == FIT
        assert spec.rates.price_per_hour == spec.price_per_hour
        measured = slower(kinds[0]).step_times(Library.built_in())
        assert spec.model.decode_time_s(4, 1000) == measured.decode_time_s(4, 1000)
    message = r"c\.yaml:\d+: instance_defaults\.rates_file: not calibrated: .*; calibrated: .*threads 4"
    with pytest.raises(NotFound, match=message):
        load_deployment(write(tmp_path, {**real, "rates_file": calibration(tmp_path, kinds[1])}, **model))


def test_an_emulated_engine_keeps_its_times_and_reports_the_calibrated_rates(tmp_path: Path) -> None:
    file = calibration(tmp_path, Kind("emulated", "A10", "Llama-3-8B", "bfloat16", 1, 1))
    known, plain = first(tmp_path, {**DEFAULTS, "rates_file": file}), first(tmp_path, DEFAULTS)
    assert known.rates.step == FIT != plain.rates.step
    assert known.model.decode_time_s(4, 1000) == plain.model.decode_time_s(4, 1000)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chunk_size": "many"}, r"c\.yaml:\d+: instances\.p\.chunk_size"),
        ({"max_seqs": 3.5}, r"c\.yaml:\d+: instances\.p\.max_seqs"),
        ({"enabled": False}, "no instance is enabled"),
        ({"prefill_order": "sjf"}, "prefill_order: it belongs to the whole cluster: write `policies: "),
        ({"prefill_batch": 3}, r"c\.yaml:\d+: instances\.p\.prefill_batch: unknown key 'prefill_batch'"),
        (
            {**REAL, "engine_args": {"disable_cascade_attn": True}},
            r"c\.yaml:\d+: instances\.p\.engine_args: 'disable_cascade_attn' cannot be simulated",
        ),
    ],
)
def test_errors_name_file_and_key(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_cluster(write(tmp_path, instances=[{"id": "p", "role": "prefill", **row}]))


def test_one_model_is_simulated(tmp_path: Path) -> None:
    rows = [{"id": "p", "role": "prefill"}, {"id": "d", "role": "decode", "emulated_model": "OPT-13B"}]
    with pytest.raises(InvalidRequest, match="only one model can be simulated, got Llama-3-8B, OPT-13B"):
        read_cluster(write(tmp_path, instances=rows))


# Section, what it says, and for each setting that is simulated another value than its default.
CHANGES: list[tuple[type[Section], dict[str, Any], dict[str, Any]]] = [
    (InstanceSection, DEFAULTS, {"role": "decode", "engine": "vllm", "accelerator": "L40S", "dtype": "float16"}),
    (InstanceSection, DEFAULTS, {"block_size": 64, "chunk_size": 1024, "max_model_len": 1024, "max_seqs": 8}),
    (InstanceSection, DEFAULTS, {"kv_cache_bytes": 2 << 30, "tensor_parallel": 2, "pipeline_parallel": 2}),
    (InstanceSection, DEFAULTS, {"node": "one", "weight": 4.0, "emulated_model": "OPT-13B", "emulated_step_s": 0.02}),
    (InstanceSection, DEFAULTS, {"emulated_link_gbps": 10.0, "emulated_slowdown": 4.0, "emulated_prefix_cache": False}),
    (InstanceSection, {**DEFAULTS, "chunk_size": "auto"}, {"max_chunk_size": 1024}),
    (InstanceSection, {**DEFAULTS, "emulated_step_s": 0.01}, {"emulated_prefill_s_per_token": 1e-5}),
    (InstanceSection, {**DEFAULTS, "pipeline_parallel": 2}, {"emulated_hop": {"gbps": 1.0}}),
    (InstanceSection, {**DEFAULTS, "pipeline_parallel": 2}, {"stage_accelerators": ["A10", "L40S"]}),
    (InstanceSection, {**REAL, "pipeline_parallel": 2}, {"pipeline_layers": (20, 12)}),
    (InstanceSection, {**REAL, "rates_file": "CALIBRATION"}, {"threads": 2}),
    (InstanceSection, REAL, {"rates_file": "CALIBRATION", "staging_bytes": 1 << 20}),
    (InstanceSection, REAL, {"engine_args": {"enable_prefix_caching": False}}),
    (InstanceSection, REAL, {"engine_args": {"quantization": "fp8"}}),
    (InstanceSection, REAL, {"weights": "QUANTISED"}),
    (InstanceSection, DEFAULTS, {"emulated_precision": "int8"}),
    (InstanceSection, DEFAULTS, {"host_kv_bytes": 1 << 30, "session_keep_s": 5.0, "session_share": 0.2}),
    (MonitorSection, {}, {"broadcast_period_s": 0.5, "drain_timeout_s": 5.0}),
    (MonitorSection, {}, {"role_flip_period_s": 5.0, "role_flip_respects_s": 5.0}),
    (GatewaySection, {}, {"max_queued_jobs": 8, "max_queued_tokens": 4096, "job_timeout_s": 60.0}),
    (GatewaySection, {}, {"slo": {"default": {"mixed_precision": False}}}),
    (GatewaySection, {}, {"patience_s": 1.0, "moves": 0, "slo": {"default": {"ttft_s": 0.5}}, "kv_codec": "int8"}),
    (GatewaySection, {}, {"migration": False, "sessions": 0}),
]
KEYS = {InstanceSection: "instance_defaults", MonitorSection: "monitor", GatewaySection: "gateway"}

# Of each kind of policy one that is not the default.
POLICIES: dict[str, Any] = {
    "placement": {"name": "single", "instance": "p"},
    "split": {"name": "fraction", "fraction": 0.25},
    "dispatch": "random",
    "prefill_order": {"name": "sjf", "window": 4},
    "decode_admission": {"name": "reserve_dynamic", "end": "upper"},
    "step_budget": False,
    "role_flip": {"name": "idle", "for_s": 5.0},
}


def read(folder: Path, section: type[Section], settings: dict[str, Any]) -> Any:
    kinds = (Kind("vllm", "A10", "some-model", "bfloat16", 1, threads) for threads in (1, 2))
    file = calibration(folder, *kinds)
    (folder / "int8").mkdir(exist_ok=True)
    (folder / "int8" / "config.json").write_text('{"quantization_config": {"quant_method": "experts_int8"}}')
    files = {"CALIBRATION": file, "QUANTISED": str(folder / "int8")}
    settings = {key: files.get(str(value), value) for key, value in settings.items()}
    data: dict[str, Any] = {"instance_defaults": DEFAULTS, KEYS[section]: settings}
    defaults = {"role": "prefill", **data.pop("instance_defaults")}
    return read_cluster(write(folder, defaults, instances=[{"id": "p"}], network={"inside": {"gbps": 100}}, **data))


@pytest.mark.parametrize("section", [InstanceSection, SchedulerSection, MonitorSection, GatewaySection])
def test_every_setting_is_simulated_or_known_to_make_no_difference(section: type[Section]) -> None:
    ignored = {name for names in NOT_SIMULATED[section.settings].values() for name in names}  # type: ignore[index]
    simulated = {key for owner, _, changes in CHANGES if owner is section for key in changes}
    assert not ignored & simulated
    settable = section.accepted_keys() & set(section.settings.model_fields)
    assert ignored | simulated >= settable, "a new setting: simulate it, or say why it makes no difference"
    assert ignored <= set(section.settings.model_fields), "a setting that is gone"


@pytest.mark.parametrize(
    ("section", "beside", "key", "value"),
    [(section, beside, key, value) for section, beside, changes in CHANGES for key, value in changes.items()],
)
def test_a_simulated_setting_changes_the_simulation(
    tmp_path: Path, section: type[Section], beside: dict[str, Any], key: str, value: Any
) -> None:
    assert read(tmp_path, section, {**beside, key: value}) != read(tmp_path, section, beside)


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_changes_the_simulation(tmp_path: Path, kind: str) -> None:
    plain = load_deployment(write(tmp_path)).run
    assert load_deployment(write(tmp_path, policies={kind: PolicySet().spec(kind).name})).run == plain
    assert load_deployment(write(tmp_path, policies={kind: POLICIES[kind]})).run != plain
