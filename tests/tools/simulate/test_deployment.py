"""Instances as the simulator takes them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.worker.engines.emulated import fixed_step_rates
from shared.cost.catalogue import Catalogue
from shared.cost.efficiency import SHIPPED
from shared.cost.geometry import kv_capacity_tokens
from shared.cost.library import Library
from shared.cost.linear import rates_of
from shared.cost.pipeline import Pipeline
from shared.cost.step import Batch, StepModel
from shared.domain.instance import Role
from shared.errors import Incompatible, InvalidRequest, NotFound
from shared.policy.placement import RoundRobin
from shared.policy.split import FractionSplit
from shared.sim.spec import Flip, Loss
from tools.simulate.deployment import FixedSteps, load_deployment

A100 = {"id": "p", "accelerator": "A100-SXM-80", "count": 2, "role": "prefill"}
A10 = {"id": "d", "accelerator": "A10", "role": "decode", "tensor_parallel": 2}
FIXED: dict[str, Any] = {"step_s": 0.01, "prefill_s_per_token": 1e-4}
SMALL: dict[str, Any] = {"model": "Llama-3-8B", "instances": [A100, A10]}


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "sim.yaml"
    file.write_text(yaml.safe_dump({**SMALL, **changes}))
    return file


def test_what_the_catalogue_and_the_cost_model_say(tmp_path: Path) -> None:
    made = load_deployment(write(tmp_path))
    catalogue = Catalogue.built_in()
    first, second, third = made.instances
    assert [spec.instance_id for spec in made.instances] == ["p-0", "p-1", "d"]
    assert first.model is second.model  # which remembers what it has computed
    assert (third.role, third.accelerator, third.accelerators) == (Role.DECODE, "A10", 2)
    geometry = Library.built_in().geometry("Llama-3-8B")
    assert third.kv_tokens == kv_capacity_tokens(catalogue.get("A10"), geometry, tensor_parallel=2)
    assert third.kv_bytes_per_token == 131072
    assert third.price_per_hour == pytest.approx(2 * catalogue.get("A10").price_usd_hour)
    assert third.link.bandwidth_bytes_s == pytest.approx(2 * catalogue.get("A10").links.network)
    assert third.limits.max_model_len == 8192
    assert first.rates.prefill is not None
    assert first.rates.price_per_hour == first.price_per_hour
    assert first.model.step_time_s(Batch(((512, 0),))) < third.model.step_time_s(Batch(((512, 0),)))


def test_what_an_entry_may_say_otherwise(tmp_path: Path) -> None:
    entry = {
        **A100,
        "count": 1,
        "kv_cache_bytes": 2**30,
        "price_usd_hour": 1.0,
        "weight": 2.0,
        "max_model_len": 2048,
        "link": "slow",
        "max_prefills": 2,
        "pipeline_parallel": 2,
        "chunk_size": 512,
        "max_seqs": 64,
        "block_size": 32,
        "prefill_first": True,
    }
    spec = load_deployment(write(tmp_path, instances=[entry], links={"slow": {"gbps": 8}})).instances[0]
    assert spec.kv_tokens == 8192
    assert (spec.price_per_hour, spec.rates.weight, spec.max_prefills, spec.lanes) == (2.0, 2.0, 2, 2)
    assert spec.link.bandwidth_bytes_s == 1e9
    assert (spec.limits.batched_tokens, spec.limits.sequences, spec.limits.block_tokens) == (
        512,
        32,
        32,
    )  # seats are shared by the lanes
    assert spec.limits.prefill_first


def test_unlike_stages_on_nodes_of_a_network(tmp_path: Path) -> None:
    rows = [
        {**A100, "count": 1, "id": "p", "node": "one"},
        {
            "id": "d",
            "role": "decode",
            "accelerator": "A10",
            "node": "two",
            "pipeline_parallel": 2,
            "pipeline_layers": [10, 22],
            "stage_accelerators": ["A10", "A100-SXM-80"],
            "hop": {"gbps": 64},
        },
    ]
    made = load_deployment(write(tmp_path, instances=rows, network={"between": {"gbps": 8, "efficiency": 1.0}}))
    second = made.instances[1]
    assert isinstance(second.model, Pipeline)
    assert [stage.geometry.layers for stage in second.model.stages if isinstance(stage, StepModel)] == [10, 22]
    assert (second.accelerator, second.accelerators, second.lanes, second.node) == ("A10+A100-SXM-80", 2, 2, "two")
    assert made.run.network.path("one", "two").bandwidth_bytes_s == 1e9
    assert (
        made.run.network.path("one", "one").bandwidth_bytes_s
        == Library.built_in().catalogue.get("A100-SXM-80").links.scale_up
    )


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"pipeline_parallel": 2, "pipeline_layers": [10, 10, 12]}, "pipeline_layers: 3 for 2 stages"),
        ({"pipeline_parallel": 2, "pipeline_layers": [10, 10]}, r"\[10, 10\].* sum to the 32"),
        ({"node": "one"}, "node: the file has no `network`"),
    ],
)
def test_stages_and_nodes_that_make_no_sense(tmp_path: Path, entry: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        load_deployment(write(tmp_path, instances=[{**A100, **entry}]))


def test_a_link_called_default_is_for_all_that_name_none(tmp_path: Path) -> None:
    rows = [A100, {**A10, "link": {"gbps": 16}}]
    made = load_deployment(write(tmp_path, instances=rows, links={"default": {"gbps": 80, "efficiency": 1.0}}))
    assert [spec.link.bandwidth_bytes_s for spec in made.instances] == [1e10, 1e10, 2e9]


def test_the_run_is_as_the_file_says(tmp_path: Path) -> None:
    made = load_deployment(
        write(
            tmp_path,
            name="mine",
            policies={"placement": "round_robin", "split": {"name": "fraction", "fraction": 0.5}},
            prediction={"accuracy": 0.75, "buckets": 5},
            losses=[{"instance": "d", "at_s": 1.0}],
            flips=[{"instance": "p-1", "at_s": 2.0}],
            slo={"ttft_s": 0.4, "tpot_s": 0.05},
            run={"hop_s": 0.001, "streaming": False},
        )
    )
    assert (made.name, made.run.label) == ("mine", "mine")
    assert made.run.policies.placement == RoundRobin()
    assert made.run.policies.split == FractionSplit(0.5)
    assert made.run.prediction is not None
    assert made.run.prediction.buckets == 5
    assert made.run.losses == (Loss("d", 1.0),)
    assert made.run.flips == (Flip("p-1", 2.0),)
    assert (made.run.slo.ttft_s, made.run.slo.tpot_s) == (0.4, 0.05)
    assert (made.run.hop_s, made.run.streaming) == (0.001, False)


def test_a_calibration_is_honoured(tmp_path: Path) -> None:
    raw = yaml.safe_load(SHIPPED.read_text())
    raw["devices"]["A100-SXM-80"]["step_s"] = 1.0
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(raw))
    plain = load_deployment(write(tmp_path)).instances[0].model.decode_time_s(1, 100)
    for made in (
        load_deployment(write(tmp_path, calibration="own.yaml")),
        load_deployment(write(tmp_path), tmp_path / "own.yaml"),
    ):
        assert made.instances[0].model.decode_time_s(1, 100) == pytest.approx(plain + 1.0, abs=0.01)


def test_own_accelerators(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "Mine: {vendor: Acme, memory_gib: 64, bandwidth_gb_s: 1000, compute_units: 10, matrix_tflops: {bf16: 100}, "
        "mode: dense, links: {scale_up: 10, pcie: 16, network: 1}, price_usd_hour: 0.5, source: me}"
    )
    made = load_deployment(write(tmp_path, accelerators="mine.yaml", instances=[{**A100, "accelerator": "Mine"}]))
    assert made.instances[0].price_per_hour == 0.5


def test_the_shipped_emulated_cluster() -> None:
    made = load_deployment(Path("emulated-mixed"))
    assert len(made.instances) == 32
    assert len({id(spec.model) for spec in made.instances}) == 5
    assert all(spec.kv_tokens >= spec.limits.max_model_len for spec in made.instances)


def test_the_shipped_real_cluster_uses_its_models_own_config() -> None:
    made = load_deployment(Path("laptop"))
    assert len(made.instances) == 4
    assert made.model.endswith("models/demo")


def test_fixed_steps(tmp_path: Path) -> None:
    entry = {**A100, **FIXED}
    spec = load_deployment(write(tmp_path, instances=[entry])).instances[0]
    assert spec.model == FixedSteps(0.01, 1e-4)
    assert spec.model.step_time_s(Batch(((100, 0),), 3, 30)) == pytest.approx(0.02)
    assert spec.model.decode_time_s(3, 30) == 0.01
    assert spec.model.decode_segments(3, 30, 7) == ((7, 0.01, 0.01),)
    told = fixed_step_rates(0.01, 1e-4, 2048)  # as an emulated instance with such steps reports them
    assert (spec.rates.prefill, spec.rates.chunked, spec.rates.batch) == (told.prefill, told.chunked, told.batch)
    assert spec.rates.price_per_hour == spec.price_per_hour


def test_staging_is_any_a_size_or_what_workers_take(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"any": None, "said": 1 << 30, "auto": "auto", "least": "auto"}
    entries = [{**A10, "id": name, "staging_bytes": size} for name, size in sizes.items()]
    entries[-1] |= {"kv_cache_bytes": 8192 * 131072}
    made = {spec.instance_id: spec for spec in load_deployment(write(tmp_path, instances=entries)).instances}
    assert made["any"].staging_tokens is None
    assert made["said"].staging_tokens == (1 << 30) // 131072
    assert made["auto"].staging_tokens == max(made["auto"].kv_tokens // 4, 8192)
    assert made["least"].staging_tokens == 8192  # a prompt of the greatest length fits


def test_a_chunk_size_of_its_own(tmp_path: Path) -> None:
    entries = [{**one, "chunk_size": "auto", "max_seqs": 64} for one in (A100, A10, {**A100, "id": "f", **FIXED})]
    made = {spec.instance_id: spec for spec in load_deployment(write(tmp_path, instances=entries)).instances}
    chunks = {name: spec.limits.batched_tokens for name, spec in made.items()}
    # Fixed steps have no attention: 10 ms / 0.1 ms × 0.9 / 0.1, in blocks of 16.
    assert chunks == {"p-0": 640, "p-1": 640, "d": chunks["d"], "f-0": 912, "f-1": 912}
    assert 512 <= chunks["d"] <= 1024
    model = Library.built_in().step_model("A100-SXM-80", "Llama-3-8B")
    assert made["p-0"].rates.prefill == rates_of(model, 640).prefill  # what policies know is of these chunks
    bounded = [{**A100, "chunk_size": "auto", "max_chunk_size": 400, "max_seqs": 64}]
    assert load_deployment(write(tmp_path, instances=bounded)).instances[0].limits.batched_tokens == 400


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        (
            {"instances": [{**A10, "accelerator": "A1OO"}]},
            NotFound,
            r"sim\.yaml:\d+: instances\.d: unknown accelerator",
        ),
        ({"instances": [{**A10, "accelerator": "A100-SMX-80"}]}, NotFound, r"did you mean A100-SXM-80"),
        ({"model": "Llama-9"}, NotFound, r"sim\.yaml:\d+: model: no bundled geometry"),
        (
            {"model": "Llama-2-70B"},
            Incompatible,
            r"sim\.yaml:\d+: instances\.p: Llama-2-70B does not fit 1 x A100-SXM-80",
        ),
        ({"instances": [{**A10, "kv_cache_bytes": 2**36}]}, Incompatible, r"d: Llama-3-8B does not fit 2 x A10"),
        ({"instances": [{**A10, "kv_cache_bytes": 2**28}]}, Incompatible, r"d: kv_cache_bytes hold 2048 tokens"),
        ({"instances": [{**A10, "max_seqs": 4096}]}, InvalidRequest, r"d: batched_tokens 2048"),
        ({"instances": [{**A10, "dtype": "int3"}]}, InvalidRequest, r"d: unknown precision 'int3'"),
        ({"policies": {"split": "halves"}}, InvalidRequest, r"sim\.yaml:\d+: policies\.split: unknown split policy"),
        ({"policies": {"split": {"name": "full", "x": 1}}}, InvalidRequest, r"policies\.split: .*no parameter 'x'"),
        ({"policies": {"split": 3}}, InvalidRequest, r"policies\.split: expected a policy's name"),
        ({"policies": {"splits": "full"}}, InvalidRequest, r"policies\.splits: no kind of policy 'splits'; known: "),
        ({"prediction": {"confusion": [[1.0]]}}, InvalidRequest, r"confusion has 1 rows"),
    ],
)
def test_errors(tmp_path: Path, changes: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        load_deployment(write(tmp_path, **changes))
