"""Simulation files, and the instances and runs that either kind of file becomes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.launcher.cluster_file import CLUSTERS
from services.worker.engines.emulated import fixed_steps
from shared.cost.efficiency import SHIPPED
from shared.cost.geometry import kv_capacity_tokens
from shared.cost.library import Library
from shared.cost.pipeline import Pipeline
from shared.cost.step import Batch, StepModel
from shared.cost.step_rates import step_rates_of
from shared.domain.instance import Role
from shared.domain.kv import Codec
from shared.errors import Incompatible, InvalidRequest, NotFound, PolyphaseError
from shared.policy.placement import RoundRobin
from shared.policy.split import FractionSplit
from shared.sim.spec import Flip, InstanceSpec, Loss
from tools.simulate.deployment import Deployment, FixedSteps, load_deployment
from tools.simulate.sim_file import find_file, is_sim_file, load_sim_file

A100 = {"id": "p", "accelerator": "A100-SXM-80", "count": 2, "role": "prefill"}
A10 = {"id": "d", "accelerator": "A10", "role": "decode", "tensor_parallel": 2}
FIXED: dict[str, Any] = {"step_s": 0.01, "prefill_s_per_token": 1e-4}
LIBRARY = Library.built_in()


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "sim.yaml"
    file.write_text(yaml.safe_dump({"model": "Llama-3-8B", "instances": [A100, A10], **changes}))
    return file


def load(folder: Path, **changes: Any) -> Deployment:
    return load_deployment(write(folder, **changes))


def by_id(folder: Path, entries: list[dict[str, Any]]) -> dict[str, InstanceSpec]:
    return {spec.instance_id: spec for spec in load(folder, instances=entries).instances}


def test_defaults_come_from_the_catalogue_and_the_cost_model(tmp_path: Path) -> None:
    first, second, third = load(tmp_path).instances
    assert [spec.instance_id for spec in (first, second, third)] == ["p-0", "p-1", "d"]
    assert first.model is second.model  # it caches its results
    a10 = LIBRARY.catalogue.get("A10")
    assert (third.role, third.accelerator, third.accelerators) == (Role.DECODE, "A10", 2)
    assert third.kv_tokens == kv_capacity_tokens(a10, LIBRARY.geometry("Llama-3-8B"), tensor_parallel=2)
    assert third.kv_bytes_per_token == 131072
    assert third.price_per_hour == pytest.approx(2 * a10.price_usd_hour)
    assert third.link.bandwidth_bytes_s == pytest.approx(2 * a10.links.network)
    assert third.limits.max_model_len == 8192
    assert first.rates.step is not None
    assert first.rates.price_per_hour == first.price_per_hour
    assert first.model.step_time_s(Batch(((512, 0),))) < third.model.step_time_s(Batch(((512, 0),)))


def test_an_entry_overrides_them(tmp_path: Path) -> None:
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
    (spec,) = load(tmp_path, instances=[entry], links={"slow": {"gbps": 8}}).instances
    assert spec.kv_tokens == 8192
    assert (spec.price_per_hour, spec.rates.weight, spec.max_prefills, spec.lanes) == (2.0, 2.0, 2, 2)
    assert spec.link.bandwidth_bytes_s == 1e9
    limits = spec.limits  # the lanes share the sequences
    assert (limits.batched_tokens, limits.sequences, limits.block_tokens, limits.prefill_first) == (512, 32, 32, True)


def test_unlike_stages_on_nodes_of_a_network(tmp_path: Path) -> None:
    stages = {"pipeline_parallel": 2, "pipeline_layers": [10, 22], "stage_accelerators": ["A10", "A100-SXM-80"]}
    rows = [
        {**A100, "count": 1, "node": "one"},
        {"id": "d", "role": "decode", "accelerator": "A10", "node": "two", **stages, "hop": {"gbps": 64}},
    ]
    made = load(tmp_path, instances=rows, network={"between": {"gbps": 8, "efficiency": 1.0}})
    second = made.instances[1]
    assert isinstance(second.model, Pipeline)
    assert [stage.geometry.layers for stage in second.model.stages if isinstance(stage, StepModel)] == [10, 22]
    assert (second.accelerator, second.accelerators, second.lanes, second.node) == ("A10+A100-SXM-80", 2, 2, "two")
    assert made.run.network.path("one", "two").bandwidth_bytes_s == 1e9
    scale_up = LIBRARY.catalogue.get("A100-SXM-80").links.scale_up
    assert made.run.network.path("one", "one").bandwidth_bytes_s == scale_up


def test_the_link_named_default_is_for_entries_without_one(tmp_path: Path) -> None:
    links = {"default": {"gbps": 80, "efficiency": 1.0}}
    made = load(tmp_path, instances=[A100, {**A10, "link": {"gbps": 16}}], links=links)
    assert [spec.link.bandwidth_bytes_s for spec in made.instances] == [1e10, 1e10, 2e9]


def test_the_run_is_that_of_the_file(tmp_path: Path) -> None:
    made = load(
        tmp_path,
        name="mine",
        instance_defaults={"chunk_size": 512, "max_seqs": 32},
        policies={"placement": "round_robin", "split": {"name": "fraction", "fraction": 0.5}},
        prediction={"accuracy": 0.75, "buckets": 5},
        losses=[{"instance": "d", "at_s": 1.0}],
        flips=[{"instance": "p-1", "at_s": 2.0}],
        slo={"ttft_s": 0.4},
        run={"hop_s": 0.001, "streaming": False, "codec": "int8", "first_token": "decode"},
    )
    run = made.run
    assert (made.name, run.label) == ("mine", "mine")
    assert {spec.limits.batched_tokens for spec in made.instances} == {512}
    assert (run.policies.placement, run.policies.split) == (RoundRobin(), FractionSplit(0.5))
    assert run.prediction is not None
    assert run.prediction.buckets == 5
    assert (run.losses, run.flips) == ((Loss("d", 1.0),), (Flip("p-1", 2.0),))
    assert (run.slo.ttft_s, run.slo.tpot_s) == (0.4, 0.2)
    assert (run.hop_s, run.streaming, run.codec) == (0.001, False, Codec.INT8)


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    raw = yaml.safe_load(SHIPPED.read_text())
    raw["devices"]["A100-SXM-80"]["step_s"] = 1.0
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(raw))
    (tmp_path / "mine.yaml").write_text(
        "Mine: {vendor: Acme, memory_gib: 64, bandwidth_gb_s: 1000, compute_units: 10, matrix_tflops: {bf16: 100}, "
        "mode: dense, links: {scale_up: 10, pcie: 16, network: 1}, price_usd_hour: 0.5, source: me}"
    )
    plain_s = load(tmp_path).instances[0].model.decode_time_s(1, 100)
    for made in (load(tmp_path, calibration="own.yaml"), load_deployment(write(tmp_path), tmp_path / "own.yaml")):
        assert made.instances[0].model.decode_time_s(1, 100) == pytest.approx(plain_s + 1.0, abs=0.01)
    made = load(tmp_path, accelerators="mine.yaml", instances=[{**A100, "accelerator": "Mine"}])
    assert made.instances[0].price_per_hour == 0.5
    (tmp_path / "config.json").write_text("{}")
    assert load_sim_file(write(tmp_path, model="config.json")).model == str(tmp_path / "config.json")


def test_shipped_clusters() -> None:
    emulated = load_deployment(Path("emulated-mixed"))
    assert (len(emulated.instances), len({id(spec.model) for spec in emulated.instances})) == (32, 5)
    assert all(spec.kv_tokens >= spec.limits.max_model_len for spec in emulated.instances)
    real = load_deployment(Path("laptop"))
    assert (len(real.instances), Path(real.model).name) == (4, "demo")


def test_fixed_steps(tmp_path: Path) -> None:
    spec = load(tmp_path, instances=[{**A100, **FIXED}]).instances[0]
    assert spec.model == FixedSteps(0.01, 1e-4)
    assert spec.model.step_time_s(Batch(((100, 0),), 3, 30)) == pytest.approx(0.02)
    assert spec.model.decode_time_s(3, 30) == 0.01
    assert spec.model.decode_segments(3, 30, 7) == ((7, 0.01, 0.01),)
    assert spec.rates.step == fixed_steps(0.01, 1e-4)
    assert spec.rates.price_per_hour == spec.price_per_hour


def test_staging(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"any": None, "given": 1 << 30, "auto": "auto", "least": "auto"}
    entries = [{**A10, "id": name, "staging_bytes": size} for name, size in sizes.items()]
    entries[-1] |= {"kv_cache_bytes": 8192 * 131072}
    made = by_id(tmp_path, entries)
    assert made["any"].staging_tokens is None
    assert made["given"].staging_tokens == (1 << 30) // 131072
    assert made["auto"].staging_tokens == max(made["auto"].kv_tokens // 4, 8192)
    assert made["least"].staging_tokens == 8192  # a prompt of the greatest length fits


def test_automatic_chunk_size(tmp_path: Path) -> None:
    own = {"chunk_size": "auto", "max_seqs": 64}
    entries = [{**entry, **own} for entry in (A100, A10, {**A100, **FIXED, "id": "f"})]
    made = by_id(tmp_path, [*entries, {**A100, **own, "id": "b", "max_chunk_size": 400}])
    chunks = {name: made[name].limits.batched_tokens for name in ("p-0", "d", "f-0", "b-0")}
    # Fixed steps have no attention: 10 ms / 0.1 ms × 0.9 / 0.1, in blocks of 16.
    assert chunks == {"p-0": 640, "d": chunks["d"], "f-0": 912, "b-0": 400}
    assert 512 <= chunks["d"] <= 1024
    model = LIBRARY.step_model("A100-SXM-80", "Llama-3-8B")
    assert made["p-0"].rates.step == step_rates_of(model.step_time_s, 640)  # policies know steps of this chunk size


PIPELINE = {"pipeline_parallel": 2}


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"instances": [{**A100, "chunk": 3}]},
            InvalidRequest,
            r":\d+: instances\.p\.chunk: unknown key 'chunk'; did you",
        ),
        ({"instances": [{**A100, "role": "both"}]}, InvalidRequest, r"instances\.p\.role"),
        ({"instances": [{**A100, "link": "fast"}]}, InvalidRequest, r"p\.link: unknown link 'fast'\. Known: none"),
        ({"instances": [{**A100, "link": {"gbps": 0}}]}, InvalidRequest, "gbps"),
        ({"instances": [{**A100, "count": 1}, {**A10, "id": "p"}]}, InvalidRequest, "'p' is used twice"),
        ({"instances": []}, InvalidRequest, "instances"),
        ({"instances": [{**A100, "node": "one"}]}, InvalidRequest, "node: the file has no `network`"),
        ({"instances": [{**A100, **PIPELINE, "pipeline_layers": [10, 22, 0]}]}, InvalidRequest, "pipeline_layers"),
        ({"instances": [{**A100, **PIPELINE, "pipeline_layers": [10, 10]}]}, InvalidRequest, r"\[10, 10\].* to the 32"),
        ({"instances": [{**A10, "accelerator": "A1OO"}]}, NotFound, r":\d+: instances\.d: unknown accelerator"),
        ({"instances": [{**A10, "accelerator": "A100-SMX-80"}]}, NotFound, "did you mean A100-SXM-80"),
        ({"instances": [{**A10, "kv_cache_bytes": 2**36}]}, Incompatible, "d: Llama-3-8B does not fit 2 x A10"),
        ({"instances": [{**A10, "kv_cache_bytes": 2**28}]}, Incompatible, "d: kv_cache_bytes hold 2048 tokens"),
        ({"instances": [{**A10, "max_seqs": 4096}]}, InvalidRequest, "d: batched_tokens 2048"),
        ({"instances": [{**A10, "dtype": "int3"}]}, InvalidRequest, "d: unknown precision 'int3'"),
        (
            {"losses": [{"instance": "x", "at_s": 1}]},
            InvalidRequest,
            "losses.0.instance: unknown instance 'x'. Known: d",
        ),
        ({"flips": [{"instance": "x", "at_s": 1}]}, InvalidRequest, "flips.0.instance: unknown instance 'x'"),
        ({"run": {"flip_s": -1}}, InvalidRequest, r"run\.flip_s"),
        ({"slo": {"ttft_s": 0}}, InvalidRequest, r"slo\.ttft_s"),
        ({"prediction": {"accuracy": 2}}, InvalidRequest, r"prediction\.accuracy"),
        ({"prediction": {"confusion": [[1.0]]}}, InvalidRequest, r":\d+: prediction: confusion has 1 rows"),
        ({"model": "Llama-9"}, NotFound, r":\d+: model: no bundled geometry"),
        ({"model": "Llama-2-70B"}, Incompatible, r":\d+: instances\.p: Llama-2-70B does not fit 1 x A100-SXM-80"),
        (
            {
                "network": {"between": {"gbps": 1}},
                "instances": [{**A100, "node": "x", "slowdown": 2}, {**A10, "node": "y"}],
            },
            InvalidRequest,
            r":\d+: network: instances on its nodes must have the same slowdown",
        ),
        ({"policies": {"split": "halves"}}, InvalidRequest, r":\d+: policies\.split: unknown split policy"),
        ({"policies": {"split": {"name": "full", "x": 1}}}, InvalidRequest, r"policies\.split: .*no parameter 'x'"),
        ({"policies": {"split": 3}}, InvalidRequest, r"policies\.split: expected a policy's name"),
        ({"policies": {"splits": "full"}}, InvalidRequest, r"policies\.splits: no kind of policy 'splits'; known: "),
    ],
)
def test_errors_name_file_and_key(
    tmp_path: Path, changes: dict[str, Any], kind: type[PolyphaseError], message: str
) -> None:
    with pytest.raises(kind, match=message) as error:
        load(tmp_path, **changes)
    assert "sim.yaml" in error.value.message


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        load_deployment(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(InvalidRequest, match="not valid YAML"):
        load_deployment(tmp_path / "bad.yaml")


def test_which_kind_of_file_it_is(tmp_path: Path) -> None:
    assert is_sim_file(write(tmp_path, name="x"))
    assert not is_sim_file(write(tmp_path, name="small", instances=[{"id": "p", "role": "prefill"}]))
    assert not any(is_sim_file(file) for file in CLUSTERS.glob("*.yaml"))
    assert find_file(Path("emulated-mixed")) == CLUSTERS / "emulated-mixed.yaml"
    assert find_file(Path("nothing.yaml")) == Path("nothing.yaml")
