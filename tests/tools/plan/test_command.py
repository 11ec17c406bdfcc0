"""`polyphase plan` as a person calls it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.launcher.cli import app
from shared.cost.catalogue import Catalogue
from shared.errors import InvalidRequest, PolyphaseError
from shared.plan.inventory import read_inventory
from tools.plan import local_inventory
from tools.simulate.deployment import load_deployment

INVENTORY = """
nodes:
  - {name: fast, accelerator: A100-SXM-80, count: 1}
  - {name: slow, accelerator: A10, count: 2}
network: {between: {gbps: 25}}
"""
WORKLOAD = "prompt=600,output=80,prompt_cv=0.5,output_cv=0.5,longest=4000"


def called(*words: str) -> str:
    answer = CliRunner().invoke(app, ["plan", *words])
    if isinstance(answer.exception, PolyphaseError):
        raise answer.exception
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def planned(tmp_path: Path, *more: str, inventory: str = INVENTORY, model: str = "Llama-3-8B") -> tuple[str, Path]:
    stock, out = tmp_path / "stock.yaml", tmp_path / "plan.yaml"
    stock.write_text(inventory)
    files = ("--inventory", str(stock), "--out", str(out))
    return called(*files, "--model", model, "--workload", WORKLOAD, "--requests", "400", *more), out


def test_tables_json_and_a_cluster_file(tmp_path: Path) -> None:
    # Of two accelerators all plans are judged well within the time, however slow the machine.
    inventory = INVENTORY.replace("count: 2", "count: 1")
    words = ("--slo", "ttft=1,tpot=0.1", "--seconds", "300", "--json")
    text, out = planned(tmp_path, *words, inventory=inventory)
    for word in ("Plan (best", "goodput", "Compared with", "coupled", "USD/h", "polyphase up --cluster"):
        assert word in text
    assert "Each two are assumed" not in text
    answer = json.loads(text.splitlines()[-1])
    assert answer["ok"]
    assert answer["figures"]["goodput_requests_per_s"] > 0
    assert any(name.endswith("/goodput_requests_per_s") for name in answer["figures"])
    assert load_deployment(out).instances


def test_a_rate_beyond_the_goodput_and_an_inventory_without_links(tmp_path: Path) -> None:
    bare = INVENTORY.partition("network:")[0]
    text, out = planned(tmp_path, "--rate", "60", "--no-compare", "--seconds", "1", inventory=bare)
    assert "60.00 requests/s exceed the goodput of" in text
    assert "Each two are assumed to be joined" in " ".join(text.split())
    assert "# The inventory gives no links between its nodes." in out.read_text()


def test_the_cheapest_plan_for_a_rate(tmp_path: Path) -> None:
    text, out = planned(tmp_path, "--rate", "2", "--cheapest")
    assert "cheapest" in text
    assert len(load_deployment(out).instances) < 3


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("Llama-9-9B", (), "Llama-9-9B"),
        ("", (), "--model is missing"),
        ("Llama-3-8B", ("--slo", "ttfb=1"), "unknown target 'ttfb'; known: ttft, tpot"),
        ("Llama-3-8B", ("--slo", "ttft=fast"), "ttft must be seconds, got 'fast'"),
        ("Llama-3-8B", ("--slo", "ttft=-1"), "ttft must be positive"),
        ("Llama-3-8B", ("--method", "luck"), "unknown method 'luck'"),
        ("Llama-3-8B", ("--max-model-len", "20"), "every request is longer than 20 tokens"),
        ("Llama-2-70B", (), "GB are missing"),
        ("Llama-3-8B", ("--slo", "ttft=0.001,tpot=0.0001"), "the nearest possible SLO: TTFT"),
    ],
)
def test_errors(tmp_path: Path, model: str, more: tuple[str, ...], message: str) -> None:
    with pytest.raises(PolyphaseError, match=message):
        planned(tmp_path, *more, model=model)
    assert not (tmp_path / "plan.yaml").exists()


def test_an_inventory_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "inventory.yaml"
    called("inventory", "--out", str(out))
    assert read_inventory(out)[0].accelerators >= 1
    with pytest.raises(InvalidRequest):
        called("inventory", "--out", str(out))
    names = ["NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", "Unheard-of 1"]
    monkeypatch.setattr(local_inventory, "_accelerators", lambda: names)
    found, note = local_inventory.inventory_here(Catalogue.built_in())
    assert [(pool.accelerator.name, pool.count) for pool in found.pools] == [("A100-SXM-80", 2)]
    assert note == "not in the catalogue, left out: Unheard-of 1"
