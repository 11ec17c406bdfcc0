"""Writes Grafana's dashboard of a cluster from `panels.yaml`: `python deploy/observability/make_dashboard.py`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
FILE = HERE / "grafana" / "dashboards" / "polyphase.json"
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT = 8, 8
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
ROLES = {"0": {"text": "decode", "color": "orange"}, "1": {"text": "prefill", "color": "blue"}}

Panel = dict[str, Any]


def rows() -> dict[str, list[Panel]]:
    """Panels by the title of their row, as the file has them."""
    found: dict[str, list[Panel]] = yaml.safe_load((HERE / "panels.yaml").read_text())
    return found


def queries(panel: Panel) -> Iterator[tuple[str, str]]:
    """Legends and PromQL, with Grafana's variable in it."""
    if series := panel.get("quantiles"):
        by = panel.get("by", [])
        legend = "".join(f" {{{{{label}}}}}" for label in by)
        labels = ", ".join(("le", *by))
        for name, share in SHARES.items():
            rate = f"sum by ({labels}) (rate({series}_bucket[$__rate_interval]))"
            yield f"{name}{legend}", f"histogram_quantile({share}, {rate})"
    yield from panel.get("queries", {}).items()


def dashboard() -> dict[str, Any]:
    """As Grafana reads it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in rows().items():
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        panels.append({"type": "row", "id": len(panels) + 1, "title": title, "gridPos": place, "panels": []})
        y += 1
        for at, panel in enumerate(row):
            place = {"h": HEIGHT, "w": WIDTH, "x": at % 3 * WIDTH, "y": y + at // 3 * HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_drawn(panel)})
        y += (len(row) + 2) // 3 * HEIGHT
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "uid": "polyphase",
        "title": "Polyphase",
        "tags": ["polyphase"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def _drawn(panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + at), "datasource": SOURCE, "expr": expr, "legendFormat": legend, "range": True}
        for at, (legend, expr) in enumerate(queries(panel))
    ]
    field: dict[str, Any] = {"unit": panel["unit"]}
    kind = panel.get("kind", "timeseries")
    if panel["unit"] == "percentunit":
        field |= {"min": 0, "max": 1}
    if kind == "state-timeline":
        field["mappings"] = [{"type": "value", "options": ROLES}]
    return {
        "type": kind,
        "title": panel["title"],
        "description": panel.get("text", ""),
        "datasource": SOURCE,
        "fieldConfig": {"defaults": field, "overrides": []},
        "targets": targets,
    }


def main() -> None:
    """Write the file."""
    FILE.write_text(json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
