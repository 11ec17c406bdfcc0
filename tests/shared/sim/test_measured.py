"""A calibrated cluster in the simulator: specs from instances, and neighbours that slow each other down."""

from dataclasses import replace

import pytest

from shared.cost.library import Library
from shared.cost.rates_file import Calibration, ControlPlane
from shared.domain.instance import Compatibility, InstanceInfo, KvGeometry, Role
from shared.sim.cluster import simulate
from shared.sim.measured import LiveInstance, simulate_on_hosts, specs_of, with_control
from shared.sim.spec import RunSpec
from shared.sim.workload import poisson, synthetic
from tests.shared.cost.calibrations import calibrated

CONTROL = ControlPlane(0.004, 0.002, 0.001, 0.003, 1e8)


def live(name: str, role: Role, host: str = "h") -> LiveInstance:
    compatibility = Compatibility("abc", "vllm", "1", 2, KvGeometry(32, 8, 128))
    info = InstanceInfo(
        instance_id=name,
        generation=1,
        model="Llama-3-8B",
        compatibility=compatibility,
        accelerator="A100-SXM-80",
        dtype="bfloat16",
        tensor_parallel=1,
        block_size=16,
        total_blocks=5000,
        max_model_len=4096,
        chunk_size=512,
        rpc=f"tcp://{host}:1",
        http=f"http://{host}:2",
        kv_endpoints=(),
    )
    return LiveInstance(info, role, host, 1, 64)


INSTANCES = (live("p0", Role.PREFILL), live("d0", Role.DECODE))


def calibration(*slowdown: float) -> Calibration:
    kind = calibrated(kind=INSTANCES[0].kind, slowdown=slowdown)
    return Calibration("d", "c", CONTROL, (kind,))


def test_specs_are_what_the_instances_say() -> None:
    specs, neighbours = specs_of(INSTANCES, calibration(1.0, 1.5), Library.built_in())
    prefill, decode = specs
    assert prefill.model is decode.model
    assert (decode.role, decode.kv_tokens, decode.limits.batched_tokens) == (Role.DECODE, 80_000, 512)
    assert decode.kv_bytes_per_token == 131072
    assert decode.link.bandwidth_bytes_s * decode.link.efficiency == 1e8
    assert not decode.limits.reserves_output
    assert neighbours["p0"].slowdown == (1.0, 1.5)


def test_a_link_too_fast_to_measure_takes_no_time() -> None:
    fast = Calibration("d", "c", ControlPlane(), calibration(1.0).kinds)
    specs, _ = specs_of(INSTANCES, fast, Library.built_in())
    assert specs[0].link.bandwidth_bytes_s >= 1e12


WORKLOAD = poisson(synthetic(60, 800, 60, prompt_cv=0.5, output_cv=0.5, seed=1), 2.0, seed=2)


def means(*slowdown: float, apart: bool = False) -> tuple[float, float]:
    instances = (INSTANCES[0], live("d0", Role.DECODE, "elsewhere" if apart else "h"))
    specs, neighbours = specs_of(instances, calibration(*slowdown), Library.built_in())
    result = simulate_on_hosts(WORKLOAD, specs, neighbours, with_control(RunSpec(), CONTROL))
    return float(result.outcomes.ttft_s.mean()), float(result.outcomes.jct_s.mean())


def test_without_a_slowdown_it_is_the_plain_simulation() -> None:
    specs, _ = specs_of(INSTANCES, calibration(1.0), Library.built_in())
    plain = simulate(WORKLOAD, specs, with_control(RunSpec(), CONTROL))
    assert means(1.0) == (float(plain.outcomes.ttft_s.mean()), float(plain.outcomes.jct_s.mean()))


def test_busy_neighbours_cost_time_and_those_of_other_hosts_none() -> None:
    alone, beside = means(1.0), means(1.0, 1.5)
    assert alone[1] < beside[1] < 1.5 * alone[1]
    assert means(1.0, 1.5, apart=True) == alone


def test_latencies_of_the_services_are_in_the_first_token() -> None:
    specs, _ = specs_of(INSTANCES, calibration(1.0), Library.built_in())
    lone = replace(WORKLOAD.head(1))
    with_ = simulate(lone, specs, with_control(RunSpec(), CONTROL)).outcomes.ttft_s[0]
    without = simulate(lone, specs, RunSpec()).outcomes.ttft_s[0]
    assert with_ - without == pytest.approx(0.004 + 0.002 + 0.001)
