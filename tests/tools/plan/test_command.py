"""`polyphase plan` as a person calls it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.launcher.cli import app
from shared.errors import InvalidRequest, PolyphaseError
from shared.plan.inventory import read_inventory
from tools.simulate.deployment import load_deployment

STOCK = """
nodes:
  - {name: fast, accelerator: A100-SXM-80, count: 1}
  - {name: slow, accelerator: A10, count: 2}
network: {between: {gbps: 25}}
"""
WORKLOAD = "prompt=600,output=80,prompt_cv=0.5,output_cv=0.5,longest=4000"


def called(tmp_path: Path, *more: str, inventory: str = STOCK) -> tuple[str, Path]:
    stock, out = tmp_path / "stock.yaml", tmp_path / "plan.yaml"
    stock.write_text(inventory)
    words = ["plan", "--inventory", str(stock), "--workload", WORKLOAD, "--requests", "400", "--out", str(out), *more]
    answer = CliRunner().invoke(app, words, catch_exceptions=True)
    if isinstance(answer.exception, PolyphaseError):
        raise answer.exception
    assert answer.exit_code == 0, answer.output
    return answer.stdout, out


def test_it_prints_a_table_and_writes_a_cluster_file(tmp_path: Path) -> None:
    text, out = called(tmp_path, "--model", "Llama-3-8B", "--slo", "ttft=1,tpot=0.1", "--seconds", "120", "--json")
    for word in ("Plan (best", "goodput", "Compared with", "coupled", "USD/h", "polyphase up --cluster"):
        assert word in text
    answer = json.loads(text.splitlines()[-1])
    assert answer["ok"]
    figures = answer["figures"]
    assert figures["goodput_requests_per_s"] > 0
    assert len([name for name in figures if name.endswith("/goodput_requests_per_s")]) >= 1
    assert len(load_deployment(out).instances) >= 1


def test_a_rate_beyond_goodput_is_said_to_be(tmp_path: Path) -> None:
    text, _ = called(tmp_path, "--model", "Llama-3-8B", "--rate", "500", "--no-compare")
    assert "500.00 requests/s exceed the goodput of" in text


def test_without_links_the_assumption_is_stated(tmp_path: Path) -> None:
    bare = STOCK.partition("network:")[0]
    text, out = called(tmp_path, "--model", "Llama-3-8B", "--no-compare", "--seconds", "1", inventory=bare)
    assert "Each two are assumed to be joined" in " ".join(text.split())
    assert "# The inventory gives no links between its nodes." in out.read_text()
    assert "Each two are assumed" not in called(tmp_path, "--model", "Llama-3-8B", "--no-compare", "--seconds", "1")[0]


def test_the_cheapest_that_serves_a_rate(tmp_path: Path) -> None:
    text, out = called(tmp_path, "--model", "Llama-3-8B", "--rate", "2", "--cheapest")
    assert "cheapest" in text
    assert len(load_deployment(out).instances) < 3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model", "Llama-9-9B"], "Llama-9-9B"),
        (["--model", ""], "--model is missing"),
        (["--model", "Llama-3-8B", "--slo", "ttfb=1"], "unknown target 'ttfb'; known: ttft, tpot"),
        (["--model", "Llama-3-8B", "--slo", "ttft=fast"], "ttft must be seconds, got 'fast'"),
        (["--model", "Llama-3-8B", "--slo", "ttft=-1"], "ttft must be positive"),
        (["--model", "Llama-3-8B", "--method", "luck"], "unknown method 'luck'"),
        (["--model", "Llama-3-8B", "--codec", "zip"], "codec: one of raw"),
        (["--model", "Llama-3-8B", "--engine", "steam"], "engine: emulated or vllm"),
        (["--model", "Llama-3-8B", "--cheapest"], "cheapest needs the rate"),
        (["--model", "Llama-3-8B", "--max-model-len", "20"], "every request is longer than 20 tokens"),
        (["--model", "Llama-2-70B"], r"GB are missing"),
        (["--model", "Llama-3-8B", "--slo", "ttft=0.001,tpot=0.0001"], "the nearest possible SLO: TTFT"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, more: list[str], message: str) -> None:
    with pytest.raises(PolyphaseError, match=message):
        called(tmp_path, *more)
    assert not (tmp_path / "plan.yaml").exists()


def test_an_inventory_of_this_machine_is_one_that_can_be_read(tmp_path: Path) -> None:
    out = tmp_path / "inventory.yaml"
    answer = CliRunner().invoke(app, ["plan", "inventory", "--out", str(out)])
    assert answer.exit_code == 0, answer.output
    assert read_inventory(out)[0].accelerators >= 1
    again = CliRunner().invoke(app, ["plan", "inventory", "--out", str(out)])
    assert isinstance(again.exception, InvalidRequest)
