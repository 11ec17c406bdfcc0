"""The files of `deploy/observability`, by Prometheus' own tool; and docs/metrics.md against what is exposed."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import Metric

from shared.runtime.metrics import RESTARTS
from tests.deploy.observability import HERE, generator, need, panel_queries, rules
from tests.services.expositions import expositions
from tests.services.test_metric_owners import families

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def promtool(*arguments: str) -> None:
    done = subprocess.run([need("promtool"), *arguments], capture_output=True, text=True, cwd=HERE, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus.local.yml"])
def test_configurations(name: str) -> None:
    promtool("check", "config", name)


def test_rules() -> None:
    promtool("check", "rules", "rules.yml")
    promtool("test", "rules", "rules_test.yml")


def test_every_alert_is_tested_and_explained() -> None:
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    tests = yaml.safe_load((HERE / "rules_test.yml").read_text())["tests"]
    fired = {each["alertname"] for test in tests for each in test["alert_rule_test"] if each["exp_alerts"]}
    assert fired == alerts
    assert set(re.findall(r"`(Polyphase[A-Za-z]+)`", DOCS.read_text())) == alerts


def test_the_dashboard_is_what_its_panels_make() -> None:
    made = generator()
    kept = json.loads(made.FILE.read_text())
    assert kept == made.dashboard(), "run deploy/observability/make_dashboard.py"
    drawn = [target["expr"] for panel in kept["panels"] for target in panel.get("targets", ())]
    assert drawn == panel_queries()


async def test_panels_and_rules_name_existing_series(tmp_path: Path) -> None:
    known = {sample for text in (await expositions(tmp_path)).values() for sample in samples(text)}
    known |= {rule["record"] for rule in rules() if "record" in rule} | {"up"}
    for expr in (*panel_queries(), *(rule["expr"] for rule in rules())):
        named = set(re.findall(r"\b(?:polyphase[_:]|vllm:|http_|process_)[\w:]+|\bup\b", expr))
        assert named - known == set(), expr


async def test_the_docs_have_every_series_with_owner_type_and_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RESTARTS, "0")
    described, found = documented(), dict[str, list[Metric]]()
    owners: dict[str, set[str]] = {}
    for service, text in (await expositions(tmp_path)).items():
        for family in families(text).values():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            if name in described or not name.startswith("process_"):
                found.setdefault(name, []).append(family)
                owners.setdefault(name, set()).add(service)
    assert set(described) == set(found)
    for name, (owner, kind, labels) in described.items():
        assert owner == ("each" if len(owners[name]) > 1 else owners[name].pop()), name
        assert {family.type for family in found[name]} == {kind}, name
        shown = {frozenset(sample.labels) - {"le"} for family in found[name] for sample in family.samples}
        assert shown <= {labels}, name  # one of which nothing was counted shows none


def documented() -> dict[str, tuple[str, str, frozenset[str]]]:
    """Owner, type and labels by name, of the page's table."""
    rows = [row for row in DOCS.read_text().splitlines() if row.startswith("| `")]
    cells = [each for each in (re.split(r" *\| *", row.strip("| ")) for row in rows) if len(each) == 5]
    return {
        name.strip("`"): (owner, kind, frozenset(re.findall(r"`(\w+)`", labels)))
        for name, owner, kind, labels, _ in cells
    }


def samples(exposition: str) -> set[str]:
    """Names as a query has them; a family without samples has those that it would have."""
    names: set[str] = set()
    for family in families(exposition).values():
        names |= {sample.name for sample in family.samples}
        if family.type == "counter":
            names.add(f"{family.name}_total")
        elif family.type == "histogram":
            names |= {f"{family.name}_{end}" for end in ("bucket", "sum", "count")}
        else:
            names.add(family.name)
    return names
