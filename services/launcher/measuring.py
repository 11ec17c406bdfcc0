"""Commands that measure: a run of a bench, its table for people, and one JSON line for machines."""

import importlib
import json
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

# name → module and function; each gives {"figures": {name_unit: number}, "aims": {name: {want, got, met}}} and may add
# "notes": [text].
BENCHES: dict[str, tuple[str, str]] = {
    "overhead": ("bench.overhead", "run_overhead_bench"),
    "kv": ("bench.kv", "run_kv_bench"),
    "soak": ("bench.soak", "run_soak_bench"),
    "growth": ("bench.growth", "run_growth_bench"),
    "streams": ("bench.streams", "run_streams_bench"),
    "kv_engines": ("bench.kv_engines", "run_kv_engines_bench"),
    "kv_quality": ("bench.kv_quality", "run_kv_quality_bench"),
    "control": ("bench.control", "run_control_bench"),
    "console": ("bench.console", "run_console_bench"),
    "dashboard": ("bench.dashboard", "run_dashboard_bench"),
    "policy": ("bench.policy", "run_policy_bench"),
    "policies": ("bench.policies", "run_policies_bench"),
    "policies_live": ("bench.policies_live", "run_policies_live"),
    "roles": ("bench.roles", "run_roles_bench"),
    "roles_live": ("bench.roles_live", "run_live"),
    "overload": ("bench.overload", "run_overload_bench"),
    "cost": ("bench.cost", "run_cost_bench"),
    "mixed": ("bench.mixed", "run_mixed_bench"),
    "prefix": ("bench.prefix", "run_prefix_bench"),
    "learning": ("bench.learning", "run_learning_bench"),
    "engine": ("bench.engine", "run_engine_bench"),
    "live": ("bench.live", "run_live_bench"),
    "traces": ("bench.traces", "run_traces_bench"),
    "sim": ("bench.sim", "run_sim_bench"),
    "plan": ("bench.plan", "run_plan_bench"),
    "predictor": ("bench.predictor", "run_predictor_bench"),
    "papers": ("papers", "run_papers_bench"),
    "troubles": ("bench.troubles", "run_troubles_bench"),
    "chaos": ("chaos.run", "run_chaos_bench"),
}
_WORDS = ("scenario", "policy", "run")  # columns of tables that are words
Bench = Callable[..., dict[str, Any]]


def from_lab(module: str, name: str) -> Any:
    """`name` of a module of `lab`, loaded by name: what serves imports nothing of what measures."""
    return getattr(importlib.import_module(f"lab.{module}"), name)


def find_bench(name: str) -> Bench:
    """The function of a bench."""
    bench: Bench = from_lab(*BENCHES[name])
    return bench


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """The JSON object of a measuring command: ok iff every aim is met. tables: rows by title, where it has any."""
    figures, aims = result.get("figures", {}), result.get("aims", {})
    tables = {"tables": result["tables"]} if result.get("tables") else {}
    return {"ok": all(aim["met"] for aim in aims.values()), "figures": figures, "aims": aims, **tables}


def report(console: Console, result: dict[str, Any], as_json: bool) -> bool:
    """Print a result; with `as_json` its last line is the JSON object. Whether every aim is met."""
    answer = summary(result)
    console.print(_figures(answer["figures"]))
    for title, rows in answer.get("tables", {}).items():
        console.print(_rows(title, rows))
    if answer["aims"]:
        console.print(_aims(answer["aims"]))
    for note in result.get("notes", ()):
        console.print(note, style="dim", markup=False)
    if as_json:
        print_json(answer)
    return bool(answer["ok"])


def print_json(answer: Any) -> None:
    """One line, unstyled and unwrapped."""
    print(json.dumps(answer, default=str), flush=True)


def _figures(figures: dict[str, Any]) -> Table:
    table = Table(title="Figures", title_justify="left", box=None, padding=(0, 2))
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, int | float) else str(value))
    return table


def _rows(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for name in rows[0] if rows else ():
        per_s, seconds = name.endswith("_per_s"), name.endswith("_s")
        words = name.removesuffix("_per_s").removesuffix("_s").replace("_", " ")
        head = f"{words}/s" if per_s else f"{words}, s" if seconds else words
        table.add_column(head, justify="left" if name in _WORDS else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:,.3g}" if isinstance(value, float) else str(value)


def _aims(aims: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="Aims", title_justify="left", box=None, padding=(0, 2))
    for column in ("", "aim", "want", "got"):
        table.add_column(column)
    for name, aim in aims.items():
        table.add_row("[green]✔[/]" if aim["met"] else "[red]✘[/]", name, str(aim["want"]), str(aim["got"]))
    return table
