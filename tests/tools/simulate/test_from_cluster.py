"""A cluster file, read as a simulation."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.launcher.cluster_file import (
    COMMON,
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
from shared.domain.rates import PartialPrefillCost, Rates
from shared.errors import InvalidRequest, NotFound
from shared.policy.decode_admission import Greedy, PredictedEnd
from shared.policy.papers.tetriinfer import ReserveStatic
from shared.policy.prefill_order import Fcfs, Sjf
from shared.policy.role_flip import PredictiveFlip
from tools.simulate.deployment import load_deployment
from tools.simulate.from_cluster import ENGINE_ARGS, NOT_SIMULATED, read_cluster

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
    read = read_cluster(Path("emulated-mixed")).sim
    assert read.model == "Llama-3-8B"
    assert sum(entry.count for entry in read.instances) == 32
    first = read.instances[0]
    assert (first.accelerator, first.chunk_size, first.max_seqs, first.block_size) == ("A100-SXM-80", 2048, 128, 32)
    assert first.kv_cache_bytes == 60129542144
    assert not first.reserves_output
    assert first.prefix_cache


def test_a_real_cluster_has_its_own_model_and_the_workers_defaults(tmp_path: Path) -> None:
    defaults = {"accelerator": "A10", "tensor_parallel": 2, "engine_args": {"enable_prefix_caching": False}}
    read = read_cluster(write(tmp_path, instance_defaults=defaults)).sim
    assert read.model == "org/some-model"
    first = read.instances[0]
    assert first.kv_cache_bytes == 2 * (256 << 20)  # vLLM's is one rank's
    assert not first.reserves_output
    assert not first.prefix_cache
    assert first.chunk_size == 512


def test_a_pipeline_holds_what_its_fullest_stage_has_room_for(tmp_path: Path) -> None:
    def first(**settings: Any) -> Any:
        defaults = {"accelerator": "A10", "tensor_parallel": 2, "kv_cache_bytes": 1 << 30, **settings}
        return read_cluster(write(tmp_path, instance_defaults=defaults)).sim.instances[0]

    even, uneven = first(pipeline_parallel=2), first(pipeline_parallel=2, pipeline_layers=[24, 8])
    assert (even.pipeline_parallel, uneven.pipeline_parallel) == (2, 2)
    assert even.kv_cache_bytes == 4 << 30
    assert uneven.kv_cache_bytes == int((2 << 30) * 32 / 24)
    assert even.staging_bytes == "auto"
    assert first(pipeline_parallel=2, staging_bytes=1 << 20).staging_bytes == 4 << 20


def test_policies_slo_and_codec(tmp_path: Path) -> None:
    read = read_cluster(
        write(
            tmp_path,
            policies={
                "placement": "round_robin",
                "split": {"name": "fraction", "fraction": 0.25},
                "dispatch": "random",
            },
            gateway={"slo": {"default": {"ttft_s": 1.5, "tpot_s": 0.05}}, "kv_codec": "int8"},
        )
    ).sim
    assert (read.slo.ttft_s, read.slo.tpot_s) == (1.5, 0.05)
    assert read.run.codec is Codec.INT8
    assert read.run.patience_s == 10.0


def test_emulated_links_and_fixed_steps(tmp_path: Path) -> None:
    defaults = {**DEFAULTS, "emulated_link_gbps": 25, "emulated_step_s": 0.01, "emulated_prefill_s_per_token": 1e-5}
    first = read_cluster(write(tmp_path, instance_defaults=defaults)).sim.instances[0]
    assert first.link is not None
    assert not isinstance(first.link, str)
    assert first.link.gbps == 25
    assert (first.step_s, first.prefill_s_per_token) == (0.01, 1e-5)
    assert read_cluster(write(tmp_path)).sim.instances[0].link is None


@pytest.mark.parametrize("more", [{}, {"emulated_link_gbps": 25}, {"emulated_step_s": 0.01}])
def test_a_slowed_engine_takes_as_long_for_steps_and_its_link_and_says_so(tmp_path: Path, more: dict[str, Any]) -> None:
    plain = load_deployment(write(tmp_path, instance_defaults={**DEFAULTS, **more})).instances[0]
    defaults = {**DEFAULTS, **more, "emulated_slowdown": 4.0}
    slow = load_deployment(write(tmp_path, instance_defaults=defaults)).instances[0]
    batch = Batch(((100, 0),), 4, 2_000)
    assert slow.model.step_time_s(batch) == pytest.approx(4.0 * plain.model.step_time_s(batch))
    assert slow.link.bandwidth_bytes_s == pytest.approx(plain.link.bandwidth_bytes_s / 4.0)
    assert plain.rates.step is not None
    assert slow.rates.step is not None
    assert slow.rates.step.decode_s(4, 2_000) == pytest.approx(4.0 * plain.rates.step.decode_s(4, 2_000))


def test_disabled_instances_are_left_out(tmp_path: Path) -> None:
    rows = [SMALL["instances"][0], {**SMALL["instances"][1], "enabled": False}]
    assert [entry.id for entry in read_cluster(write(tmp_path, instances=rows)).sim.instances] == ["p"]


def calibrated(kind: Kind) -> CalibratedKind:
    return CalibratedKind(
        kind=kind,
        geometry="Llama-3-8B",
        instances=("p",),
        samples=100,
        mape_percent=1.0,
        naive_mape_percent=1.0,
        bias_percent=0.0,
        compute_factor=0.5,
        bandwidth_factor=0.5,
        step_s=2e-3,
        sequence_s=0.0,
        scale=1.0,
        chunk_s=3e-3,
        slowdown=(1.0,),
        saturation_tokens=256,
        rates=Rates(PartialPrefillCost(1e-4, 0.25)),
    )


def calibration(folder: Path, *kinds: Kind) -> str:
    file = folder / "calibration.yaml"
    found = Calibration("2026-01-01", "test", ControlPlane(), tuple(map(calibrated, kinds)))
    file.write_text(found.to_yaml())
    return str(file)


def test_what_every_engine_goes_by(tmp_path: Path) -> None:
    said = {
        "prefill_order": {"name": "sjf", "window": 3},
        "decode_admission": {"name": "reserve_static", "end": "upper"},
        "step_budget": False,
    }
    made = load_deployment(write(tmp_path, policies=said))
    assert made.run.prefill_order == Sjf(3)
    assert made.run.decode_admission == ReserveStatic(PredictedEnd.UPPER)
    assert not made.run.step_budget
    plain = load_deployment(write(tmp_path))
    assert (plain.run.prefill_order, plain.run.decode_admission) == (Fcfs(), Greedy())
    assert plain.run.step_budget
    assert not any(spec.limits.step_budget or spec.limits.reserves_output for spec in plain.instances)


def test_roles_flip_as_the_monitor_is_told(tmp_path: Path) -> None:
    monitor = {"role_flip_period_s": 0.5, "drain_timeout_s": 7, "broadcast_period_s": 0.2}
    policies = {"role_flip": {"name": "predictive", "for_s": 3}}
    run = load_deployment(write(tmp_path, monitor=monitor, policies=policies)).run
    assert run.role_flip == PredictiveFlip(for_s=3.0)
    assert (run.role_flip_every_s, run.drain_timeout_s, run.broadcast_s) == (0.5, 7.0, 0.2)
    assert load_deployment(write(tmp_path)).run.role_flip is None


def test_limits_are_the_gateways(tmp_path: Path) -> None:
    run = load_deployment(write(tmp_path, gateway={"max_queued_jobs": 9, "job_timeout_s": 30, "patience_s": 2})).run
    assert (run.max_queued_jobs, run.job_timeout_s, run.patience_s) == (9, 30.0, 2.0)


def test_emulated_instances_send_kv_when_the_prompt_is_computed(tmp_path: Path) -> None:
    assert not read_cluster(write(tmp_path)).sim.run.streaming
    assert read_cluster(write(tmp_path, instance_defaults={"accelerator": "A10"})).sim.run.streaming


def test_policies_know_what_instances_report_of_their_speed(tmp_path: Path) -> None:
    # A real engine knows nothing of its speed unless it was calibrated.
    real = {"engine": "vllm", "accelerator": "A10", "kv_cache_bytes": 2 << 30}
    rows = [{"id": "p", "role": "prefill"}, {"id": "d", "role": "decode", "threads": 4}]
    model: dict[str, Any] = {"model": "Llama-3-8B", "instances": rows}
    unknown = load_deployment(write(tmp_path, **model, instance_defaults=real))
    assert {spec.rates.prefill for spec in unknown.instances} == {None}
    kinds = [Kind("vllm", "A10", "Llama-3-8B", "bfloat16", 1, threads) for threads in (1, 4)]
    file = calibration(tmp_path, *kinds)
    known = load_deployment(write(tmp_path, **model, instance_defaults={**real, "rates_file": file}))
    for spec in known.instances:
        assert spec.rates.prefill == PartialPrefillCost(1e-4, 0.25)
        assert spec.rates.price_per_hour == spec.price_per_hour
        measured = calibrated(kinds[0]).step_times(Library.built_in())  # and it is as fast as it was measured
        assert spec.model.decode_time_s(4, 1000) == measured.decode_time_s(4, 1000)
    another = {**real, "rates_file": calibration(tmp_path, kinds[1])}
    with pytest.raises(
        NotFound, match=r"c\.yaml:\d+: instance_defaults\.rates_file: not calibrated: .*; calibrated: .*threads 4"
    ):
        load_deployment(write(tmp_path, **model, instance_defaults=another))


def test_an_emulated_engine_keeps_its_times_and_reports_the_calibrated_rates(tmp_path: Path) -> None:
    file = calibration(tmp_path, Kind("emulated", "A10", "Llama-3-8B", "bfloat16", 1, 1))
    known = load_deployment(write(tmp_path, instance_defaults={**DEFAULTS, "rates_file": file})).instances[0]
    plain = load_deployment(write(tmp_path)).instances[0]
    assert known.rates.prefill == PartialPrefillCost(1e-4, 0.25)
    assert plain.rates.prefill != known.rates.prefill
    assert known.model.decode_time_s(4, 1000) == plain.model.decode_time_s(4, 1000)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"id": "p", "role": "prefill", "chunk_size": "many"}], r"c\.yaml:\d+: instances\.p\.chunk_size"),
        ([{"id": "p", "role": "prefill", "max_seqs": 3.5}], r"c\.yaml:\d+: instances\.p\.max_seqs"),
        ([{"id": "p", "role": "prefill", "enabled": False}], r"no instance is enabled"),
        (
            [{"id": "p", "role": "prefill"}, {"id": "d", "role": "decode", "emulated_model": "OPT-13B"}],
            r"only one model can be simulated, got Llama-3-8B, OPT-13B",
        ),
        (
            [{"id": "p", "role": "prefill", "prefill_order": "sjf"}],
            r"prefill_order: it belongs to the whole cluster: write `policies: {prefill_order: …}` at the top",
        ),
        (
            [{"id": "p", "role": "prefill", "prefill_batch": 3}],
            r"c\.yaml:\d+: instances\.p\.prefill_batch: unknown key 'prefill_batch'",
        ),
        (
            [{"id": "p", "role": "prefill", "engine": "vllm", "engine_args": {"pipeline_parallel_size": 2}}],
            r"c\.yaml:\d+: instances\.p\.engine_args\.pipeline_parallel_size: it is a setting of its own",
        ),
        (
            [{"id": "p", "role": "prefill", "engine": "vllm", "engine_args": {"quantization": "fp8"}}],
            r"c\.yaml:\d+: instances\.p\.engine_args: 'quantization' cannot be simulated",
        ),
    ],
)
def test_errors_name_file_and_key(tmp_path: Path, rows: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read_cluster(write(tmp_path, instances=rows))


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
