"""Searches for plans: what cannot be asked, and what cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.services.control_plane import request
from tests.services.planner.search_app import QUICK, SLOW, planner, saying

LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)
WAITS = saying("time.sleep(600)")
ONE = {"nodes": [{"name": "n", "accelerator": "A10"}]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "Llama-2-70B", "method": "best"}, "GB are missing"),
        ({"model": "Llama-2-70B"}, "method coupled finds no deployment for Llama-2-70B"),
        ({"slo": {"ttft_s": 0.001, "tpot_s": 0.0001}}, "the nearest possible SLO: TTFT"),
        ({**SLOW, "inventory": ONE, "cheapest": True, "rate": 50}, "the whole inventory serves"),
        ({"budget": 0.01}, "within 0.01 USD/h"),
    ],
)
async def test_what_cannot_be_is_said_as_the_planner_says_it(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    async with planner(tmp_path) as own:
        failed = await own.state((await own.client.submit({**QUICK, **change}))["plan_id"], "failed", "done")
        assert reason in failed["error"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inventory": "nodes: ["}, "inventory:2: not valid YAML"),
        ({"inventory": "- 1"}, "inventory: expected a mapping"),
        ({"inventory": "nodes: [{name: a, accelerator: A11}]"}, ":1: nodes.0.accelerator: unknown accelerator 'A11'"),
        ({"inventory": {"nodes": []}}, "inventory: nodes:"),
        ({"inventory": {"nodes": [{"name": "a", "accelerator": "A10", "colour": 1}]}}, "nodes.0.colour"),
        ({"inventory": {"nodes": [{"name": "a", "accelerator": "A10", "replicas": 90_000}]}}, "not 90000"),
        (
            {
                "inventory": "nodes: [{name: a, accelerator: A10, replicas: 3}]\n"
                "network: {pairs: [{nodes: [a-0, a-1], gbps: 1}]}"
            },
            "inventory:2: network: no link between the nodes",
        ),
        ({"inventory": "a: &a [*a]"}, "inventory:1: an alias inside of what it names"),
        ({"inventory": LAUGHS}, "inventory:6: aliases repeat"),
        ({"inventory": "x: " + "[" * 200}, "inventory:1: lists and mappings are nested more than"),
        ({"inventory": "x: " + "[" * 100_000}, "inventory"),  # nested, or not valid: YAML readers have limits, too
        ({"inventory": 3}, "body.inventory"),
        ({"model": "Llama-9-9B"}, "model: 'Llama-9-9B' is not bundled; there are"),
        ({"workload": "luck"}, "workload: no synthetic workload 'luck'"),
        ({"workload": "prompt=0,output=1"}, "workload: prompt_tokens must be positive"),
        ({"workload": "prompt=1e300,output=1"}, "prompt must be at most"),
        ({"workload": []}, "body.workload.requests"),
        ({"workload": [{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}]}, "workload.requests.0.prompt_tokens"),
        ({"workload": [{"prompt_tokens": 1, "output_tokens": 1, "arrival_s": at} for at in (1, 0)]}, "request 1: arr"),
        ({"slo": {"ttfb_s": 1}}, "body.slo.ttfb_s"),
        ({"slo": {"ttft_s": 0}}, "body.slo.ttft_s"),
        ({"method": "luck"}, "unknown method 'luck'; known: best"),
        ({"codec": "zip"}, "codec: one of raw"),
        ({"engine": "steam"}, "engine: emulated or vllm"),
        ({"cheapest": True}, "cheapest needs the rate"),
        ({"max_model_len": 20}, "longer than 20 tokens (max_model_len)"),
        ({"target": 1}, "body.target"),
        ({"seconds": 1e6}, "seconds: at most 600"),
        ({"requests": 60_000}, "body.requests"),
        ({"luck": 1}, "body.luck"),
    ],
)
async def test_what_cannot_be_asked_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    async with planner(tmp_path, WAITS) as own:
        answer = await request(own.transport, "POST", "/plans", {**QUICK, **change})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        assert message in answer.json()["error"]["message"]
        assert await own.client.plans() == []


async def test_no_path_is_opened(tmp_path: Path) -> None:
    """What is there is refused in the same words as what is not."""
    there = tmp_path / "secret"
    there.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
    (tmp_path / "config.json").write_text("{}")
    nodes = [{"name": "a", "accelerator": "A10"}]
    changes = [
        {"inventory": "%s"},
        {"inventory": {"nodes": nodes, "accelerators": "%s"}},
        {"workload": "%s"},
        {"model": "%s"},
    ]
    async with planner(tmp_path, WAITS) as own:
        for change in changes:
            said = []
            for path in (str(there), str(tmp_path), "/nowhere"):
                body = {**QUICK, **json.loads(json.dumps(change).replace("%s", path))}
                answer = await request(own.transport, "POST", "/plans", body)
                assert answer.status_code == 400
                said.append(answer.json()["error"]["message"].replace(path, "PATH"))
            assert len(set(said)) == 1
