"""Plans as cluster files."""

import json
from dataclasses import replace
from pathlib import Path

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
from shared.plan.plan import Plan, Target, deployed, plan_text, policies_of
from shared.plan.problem import Problem
from shared.plan.routes import Route
from shared.plan.search import Search
from shared.sim.cluster import simulate
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
@pytest.mark.parametrize("codec", [Codec.RAW, Codec.INT4])
def test_simulating_the_file_is_simulating_the_plan(tmp_path: Path, routed: bool, codec: Codec) -> None:
    asked = problem(STOCK, codec=codec)
    plan = Plan(GROUPS, ROUTES)
    if routed:
        plan = Plan(GROUPS, ROUTES, plan.routed(asked))
    found = search(asked)
    run = replace(found.evaluator.spec(plan), streaming=False)  # emulated engines send KV when a prompt is computed
    instances, network = deployed(asked, plan, found.estimator.costs, found.estimator.places)
    read = load_deployment(written(tmp_path, asked, plan))
    workload = found.evaluator.workload(Trial(plan, 4.0))
    for one, other in zip(instances, read.instances, strict=True):
        assert one.instance_id == other.instance_id
        limits = replace(other.limits, prefix_cache=False)  # the workload says nothing of prefixes
        assert (one.role, one.lanes, one.node, one.limits) == (other.role, other.lanes, other.node, limits)
        assert one.kv_tokens == pytest.approx(other.kv_tokens, abs=1)
        assert one.rates.step == other.rates.step
    assert set(read.run.network.inside) == set(network.inside)
    assert read.run.streaming is False
    ours = simulate(workload, instances, replace(run, network=network))
    theirs = simulate(workload, read.instances, read.run)
    assert theirs.outcomes.completed.all()
    assert theirs.outcomes.jct_s.mean() == pytest.approx(ours.outcomes.jct_s.mean(), rel=0.02)


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
