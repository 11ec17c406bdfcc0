"""Plans as cluster files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.launcher.cluster_file import load_cluster
from services.launcher.devices import assign
from services.launcher.model_source import PROJECT
from services.launcher.plan import links_between
from shared.domain.instance import Role
from shared.domain.kv import Codec
from shared.plan.evaluate import Trial
from shared.plan.group import Group, Part
from shared.plan.methods.registry import method
from shared.plan.plan import Plan, Target, deployed, plan_text, policies_of
from shared.plan.problem import Problem
from shared.plan.routes import Route
from shared.plan.search import Search, run_method
from shared.sim.cluster import simulate
from shared.sim.workload import conversations
from tests.shared.plan.problems import inventory, problem, search
from tools.simulate.deployment import load_deployment

P, D = Role.PREFILL, Role.DECODE
STOCK = inventory(("near", "A100-SXM-80", 2), ("far", "A10", 4), gbps=8.0)
GROUPS = (
    Group(P, 1, (Part(1, 32),)),
    Group(D, 1, (Part(0, 32),)),
    Group(P, 1, (Part(1, 10), Part(0, 22))),  # unlike stages on two nodes
    Group(D, 1, (Part(1, 16), Part(1, 16))),
)
ROUTES = (Route(0, 1, 0.5), Route(2, 3, 0.3), Route(None, 1, 0.2))


def written(tmp_path: Path, asked: Problem, plan: Plan) -> Path:
    found: Search = search(asked)
    target = Target("a plan", str(PROJECT / "models" / "demo"), "Llama-3-8B")
    file = tmp_path / "plan.yaml"
    file.write_text(plan_text(asked, plan, found.estimator.costs, found.estimator.places, target, "Why.\n\nAnd how."))
    return file


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize(("codec", "precision"), [(Codec.RAW, ""), (Codec.INT4, ""), (Codec.RAW, "int8")])
def test_simulating_the_file_is_simulating_the_plan(tmp_path: Path, routed: bool, codec: Codec, precision: str) -> None:
    asked = problem(STOCK, codec=codec)
    plan = Plan((replace(GROUPS[0], precision=precision), *GROUPS[1:]), ROUTES)
    if routed:
        plan = replace(plan, policies=plan.routed(asked))
    found = search(asked)
    run = replace(found.evaluator.spec(plan), streaming=False)  # emulated engines send KV when a prompt is computed
    instances, network = deployed(asked, plan, found.estimator.costs, found.estimator.places)
    read = load_deployment(written(tmp_path, asked, plan))
    workload = found.evaluator.requests(Trial(plan, 4.0)).workload
    for one, other in zip(instances, read.instances, strict=True):
        assert one.instance_id == other.instance_id
        # The workload says nothing of prefixes and sessions.
        limits = replace(other.limits, prefix_cache=False, session_keep_s=0.0, session_share=0.0)
        assert (one.role, one.lanes, one.node, one.limits) == (other.role, other.lanes, other.node, limits)
        assert one.kv_tokens == pytest.approx(other.kv_tokens, abs=1)
        assert (one.rates.step, one.precision) == (other.rates.step, other.precision)
    assert set(read.run.network.inside) == set(network.inside)
    assert read.run.streaming is False
    ours = simulate(workload, instances, replace(run, network=network))
    theirs = simulate(workload, read.instances, read.run)
    assert theirs.outcomes.completed.all()
    assert theirs.outcomes.jct_s.mean() == pytest.approx(ours.outcomes.jct_s.mean(), rel=0.02)


def test_the_file_has_the_caches_and_host_memory_of_the_plan(tmp_path: Path) -> None:
    pools = tuple(replace(pool, host_kv_bytes=10**10) for pool in STOCK.pools)
    asked = replace(problem(replace(STOCK, pools=pools)), workload=conversations(300, seed=2), longest_tokens=16_384)
    plan = Plan((Group(P, 2, (Part(1, 32),)), GROUPS[1], replace(GROUPS[3], parts=(Part(1, 16), Part(1, 16)))))
    found = search(asked)
    instances, _ = deployed(asked, plan, found.estimator.costs, found.estimator.places)
    assert [one.limits.prefix_cache for one in instances] == [True, True, False]  # pipelines have none
    hosts = [0 if one.limits.host is None else one.limits.host.tokens for one in instances]
    assert hosts == [2 * 10**10 // 131_072, 10**10 // 131_072, 0]  # Llama-3-8B: 131,072 bytes a token
    file = written(tmp_path, asked, plan)
    assert [one.limits for one in load_deployment(file).instances] == [one.limits for one in instances]
    target = Target("a plan", "Llama-3-8B", "Llama-3-8B", "vllm")
    text = plan_text(asked, plan, found.estimator.costs, found.estimator.places, target)
    assert [one.get("host_kv_bytes", 0) for one in yaml.safe_load(text)["instances"]] == [10**10, 10**10, 0]


def test_the_file_switches_caches_off_where_the_plan_has_none(tmp_path: Path) -> None:
    asked = replace(problem(STOCK, prefix_cache=False), workload=conversations(300, seed=2), longest_tokens=16_384)
    plan = Plan(GROUPS[:2])
    read = load_deployment(written(tmp_path, asked, plan))
    assert not any(one.limits.prefix_cache for one in read.instances)
    found = search(asked)
    target = Target("a plan", "Llama-3-8B", "Llama-3-8B", "vllm")
    text = plan_text(asked, plan, found.estimator.costs, found.estimator.places, target)
    engine_args = [one["engine_args"] for one in yaml.safe_load(text)["instances"]]
    assert engine_args == [{"enable_prefix_caching": False}] * 2


def test_the_launcher_gives_each_instance_the_paths_to_it(tmp_path: Path) -> None:
    file = written(tmp_path, problem(STOCK), Plan(GROUPS, ROUTES))
    links = links_between(load_cluster(file), "plan.yaml")
    names = Plan(GROUPS).names(problem(STOCK))
    assert set(links) == set(names)
    decodes = links[names[1]]
    assert set(decodes) == set(names) - {names[1]}
    assert decodes[names[0]].gbps == pytest.approx(8.0)
    assert decodes[names[2]].gbps > 8.0  # most of its layers are on the same node


def test_it_says_what_it_is(tmp_path: Path) -> None:
    asked = problem(STOCK)
    text = written(tmp_path, asked, Plan(GROUPS, ROUTES, Plan(GROUPS, ROUTES).routed(asked))).read_text()
    assert text.startswith("# Why.\n#\n# And how.\n")
    said = yaml.safe_load(text)
    names = [entry["id"] for entry in said["instances"]]
    assert said["policies"]["placement"]["name"] == "plan"
    assert said["policies"]["placement"]["routes"][2] == ["", names[1], 0.2]
    assert said["instances"][2]["stage_accelerators"] == ["A10", "A100-SXM-80"]
    assert said["instances"][2]["pipeline_layers"] == [10, 22]


def test_a_plan_for_vllm_names_hosts_and_devices(tmp_path: Path) -> None:
    asked = problem(inventory(("near", "A100-SXM-80", 2), ("near", "A10", 2), ("far", "A10", 2)))
    groups = (Group(P, 1, (Part(0, 32),)), Group(D, 2, (Part(2, 32),)), Group(D, 1, (Part(0, 20), Part(1, 12))))
    found = search(asked)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 32,
        "hidden_size": 4096,
    }
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    target = Target("a plan", str(tmp_path), "Llama-3-8B", "vllm")
    text = plan_text(asked, Plan(groups), found.estimator.costs, found.estimator.places, target, "Why.")
    said = yaml.safe_load(text)
    assert [(entry["host"], entry["devices"]) for entry in said["instances"]] == [
        ("near", [0]),
        ("far", [0, 1]),
        ("near", [1, 2]),
    ]
    assert said["hosts"] == {"near": "near", "far": "far"}
    assert said["control"] == "near"
    assert "# Before it starts: give each of `hosts` its address" in text
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    assert not assign(load_cluster(file), "near", lambda _: ("0", "1", "2", "3")).faults
    assert load_deployment(file).instances


def test_a_plan_for_one_host_names_devices_alone() -> None:
    asked = problem(inventory(("here", "MI300X", 2), ("here", "EPYC-9654", 1)))
    found = search(asked)
    target = Target("a plan", "m", "Llama-3-8B", "vllm")
    groups = (Group(P, 2, (Part(0, 32),)), Group(D, 1, (Part(1, 32),)))
    said = yaml.safe_load(plan_text(asked, Plan(groups), found.estimator.costs, found.estimator.places, target))
    assert "hosts" not in said
    assert [entry.get("devices") for entry in said["instances"]] == [[0, 1], None]
    assert not any("host" in entry for entry in said["instances"])


def test_policies_in_words_as_a_file_has_them() -> None:
    assert policies_of("least_load+split=none+power_of_two") == {
        "placement": "least_load",
        "split": "none",
        "dispatch": "power_of_two",
    }


@pytest.mark.parametrize(
    ("engine", "checkpoints", "said"),
    [
        ("emulated", {"fp8": ""}, {"emulated_precision": "fp8"}),
        ("vllm", {"fp8": ""}, {"engine_args": {"quantization": "fp8"}}),
        ("vllm", {"fp8": "org/fp8"}, {"weights": "org/fp8"}),
    ],
)
def test_quantised_groups_have_their_weights_in_the_file(
    engine: Any, checkpoints: dict[str, str], said: dict[str, Any]
) -> None:
    asked = problem(inventory(("here", "L40S", 2)))
    groups = (Group(P, 1, (Part(0, 32),), "fp8"), Group(D, 1, (Part(0, 32),)))
    assert groups[0].layout == "TP 1, fp8 weights"
    found, target = search(asked), Target("a plan", "m", "Llama-3-8B", engine, checkpoints)
    text = yaml.safe_load(plan_text(asked, Plan(groups), found.estimator.costs, found.estimator.places, target))
    assert text["mixed_precision"] is True
    first, second = text["instances"]
    assert {key: first.get(key) for key in said} == said
    assert not {"emulated_precision", "engine_args", "weights"} & second.keys()


def test_prompts_are_computed_with_quantised_weights_where_that_pays() -> None:
    """Long prompts on accelerators that compute int8 at twice the rate."""
    asked = problem(inventory(("a", "A40", 2), ("b", "A40", 2)), prompt=3000, output=60)
    plain, mixed = (
        run_method("best", method("best"), search(replace(asked, quantised=allowed))) for allowed in ((), ("int8",))
    )
    assert mixed.promise.goodput > 1.1 * plain.promise.goodput
    assert {(g.role, g.precision) for g in mixed.plan.groups} == {(P, "int8"), (D, "")}
    assert all(group.precision == "" for group in plain.plan.groups)
