"""Calibration from operator tables: fitted constants for each device, with held-out errors, as an efficiencies file."""

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import yaml

from shared.cost.catalogue import Accelerator
from shared.cost.efficiency import BY_PRECISION, SHIPPED, EfficiencyTable
from shared.cost.library import Library
from shared.cost.operators import VarlenAttention
from shared.cost.rates_file import rounded
from shared.files.yaml_file import read_yaml
from tools.fit.forms import (
    all_reduce_form,
    decode_form,
    elementwise_form,
    experts_form,
    gemm_form,
    mlp_form,
    varlen_form,
)
from tools.fit.least_squares import (
    AllReduceRows,
    AttentionRows,
    ElementwiseRows,
    ExpertRows,
    Fit,
    GemmRows,
    MlpRows,
    fit,
)
from tools.fit.profilers import Table, read_tables

# The tables that give an operator's constants, first choice first. Other tables are fitted and reported, but not used:
# they measure kernels that present engines do not run.
_PREFERENCE: Mapping[str, tuple[str, ...]] = {
    "gemm": (
        "aiconfigurator bfloat16",
        "aiconfigurator fp8",
        "aiconfigurator fp8_block",
        "llmservingsim",
        "vidur",
        "llmservingsim v0",
    ),
    "experts": ("aiconfigurator bfloat16", "aiconfigurator fp8", "aiconfigurator fp8_block", "llmservingsim"),
    "decode": ("aiconfigurator kv bfloat16", "aiconfigurator kv fp8", "llmservingsim"),
    "mixed": ("llmservingsim",),
    "prefill": ("aiconfigurator kv bfloat16", "aiconfigurator kv fp8"),
    "elementwise": ("llmservingsim", "vidur"),
    "all_reduce": ("aiconfigurator custom",),
}


_MIXED_ONLY = ("decode_rows", "decode_item_s", "packs_groups", "decode_share", "decode_sharpness", "cache_use")


@dataclass(frozen=True, slots=True)
class TableFit:
    """The fit of a table; None when no row of the table can be a measurement."""

    table: Table
    fit: Fit[Any] | None

    @property
    def precision(self) -> str:
        """The precision of the weights or of the KV."""
        rows = self.table.rows
        if isinstance(rows, AttentionRows):
            return rows.kv_precision
        name = rows.precision if isinstance(rows, GemmRows | MlpRows | ExpertRows) else "bf16"
        name = f"{name}_block" if self.table.blocks else name
        return "bf16" if name == "fp16" else name


def run_tables(folder: Path, out: Path, base: Path = SHIPPED) -> dict[str, Any]:
    """Fit the tables below `folder`, and write an efficiencies file based on `base`.

    Returns figures, aims and notes; the aim for each table is to have a smaller held-out error than the roofline.
    Raises NotFound when there is no table, InvalidRequest for a table that cannot be read or fitted.
    """
    raw = read_yaml(base)
    profiles = folder / "profiles" if (folder / "profiles").is_dir() else folder
    tables = read_tables(profiles, Library.built_in().catalogue)
    fits = fit_tables(tables, EfficiencyTable(raw))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    out.write_text(to_yaml(recalibrated(raw, fits, today)), encoding="utf-8")
    figures: dict[str, float] = {}
    aims: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for one in fits:
        name = f"{one.table.accelerator.name} {one.table.operator} ({one.table.origin})"
        if one.fit is None:
            notes.append(f"{name}: {one.table.rejected} rows exceed the device's peak rate; the table is not used")
            continue
        got, naive = 100.0 * one.fit.mape, 100.0 * one.fit.naive_mape
        figures[f"{name} mape_percent"] = round(got, 2)
        figures[f"{name} naive_mape_percent"] = round(naive, 2)
        aims[f"{name} beats the roofline"] = {"want": f"< {naive:.3g} %", "got": round(got, 2), "met": got < naive}
    return {"figures": figures, "aims": aims, "notes": notes}


def fit_tables(tables: Iterable[Table], base: EfficiencyTable) -> tuple[TableFit, ...]:
    """Fit each table. `base` has the kernels that a device runs (`packs_groups`)."""
    return tuple(TableFit(table, fit_table(table, base) if len(table.rows) else None) for table in tables)


def fit_table(table: Table, base: EfficiencyTable) -> Fit[Any]:
    """Fit a table with the form of its operator."""
    accelerator, rows = table.accelerator, table.rows
    if isinstance(rows, GemmRows):
        products = gemm_form(
            accelerator, rows.precision, quantised=table.quantised, cached=table.cached, blocks=table.blocks
        )
        return fit(products, rows)
    if isinstance(rows, MlpRows):
        return fit(mlp_form(accelerator, rows.precision), rows)
    if isinstance(rows, ExpertRows):
        return fit(experts_form(accelerator, rows.precision, base.for_device(accelerator.name).elementwise), rows)
    if isinstance(rows, ElementwiseRows):
        return fit(elementwise_form(accelerator), rows)
    if isinstance(rows, AllReduceRows):
        return fit(all_reduce_form(accelerator), rows)
    assert isinstance(rows, AttentionRows)
    if table.operator == "decode":
        return fit(decode_form(accelerator), rows)
    packs = base.for_device(accelerator.name).varlen_for("bf16").packs_groups
    contexts = bool((rows.context > 0).any())
    form = varlen_form(accelerator, mixed=table.operator == "mixed", packs_groups=packs, contexts=contexts)
    return fit(form, rows)


def constants(fits: Sequence[TableFit], base: EfficiencyTable) -> dict[str, dict[str, Any]]:
    """Constants by device, from the preferred table of each operator and precision, ready for `EfficiencyTable`."""
    chosen: dict[tuple[str, str, str], TableFit] = {}
    for one in fits:
        order = _PREFERENCE.get(one.table.operator, ())
        if one.fit is None or one.table.origin not in order:
            continue
        operator = "varlen" if one.table.operator in ("mixed", "prefill") else one.table.operator
        key = (one.table.accelerator.name, operator, one.precision)
        if key not in chosen or _rank(one) < _rank(chosen[key]):
            chosen[key] = one
    devices: dict[str, dict[str, Any]] = {}
    for (name, operator, precision), one in chosen.items():
        device = devices.setdefault(name, {})
        value = _plain(one, base)
        if operator in BY_PRECISION:
            device.setdefault(operator, {})[precision] = value
        else:
            device[_collective_of(one.table.accelerator) if operator == "all_reduce" else operator] = value
        assert one.fit is not None
        device.setdefault("sources", []).append(f"{one.table.operator}: {one.table.origin}, {one.fit.rows} rows")
    return devices


def _collective_of(accelerator: Accelerator) -> str:
    """The constants that an accelerator's table of all-reduces gives, see `Efficiencies.collective_over`."""
    return "collective" if accelerator.links.scale_up > accelerator.links.pcie else "pcie_collective"


def _rank(one: TableFit) -> tuple[int, int]:
    order = list(_PREFERENCE)
    return order.index(one.table.operator), _PREFERENCE[one.table.operator].index(one.table.origin)


def _plain(one: TableFit, base: EfficiencyTable) -> Any:
    """The fitted constants as plain, rounded values; those of mixed batches are `base`'s for a prefill table."""
    assert one.fit is not None
    operator = one.fit.operator
    if isinstance(operator, VarlenAttention) and one.table.operator == "prefill":
        known = base.for_device(one.table.accelerator.name).varlen_for("bf16")
        operator = replace(operator, **{name: getattr(known, name) for name in _MIXED_ONLY})
    return rounded(msgspec.to_builtins(operator), 4)


def recalibrated(raw: Mapping[str, Any], fits: Sequence[TableFit], date: str) -> dict[str, Any]:
    """The efficiencies document `raw` with the fitted devices, and with defaults computed from all its devices.

    The rest of `raw` stays: other devices, `like`, the allowance for a step.
    """
    fresh = constants(fits, EfficiencyTable(raw))
    devices = {name: dict(value) for name, value in (raw.get("devices") or {}).items()}
    for name, value in fresh.items():
        known = devices.setdefault(name, {})
        for operator, fitted in value.items():
            nested = operator in BY_PRECISION
            known[operator] = {**known.get(operator, {}), **fitted} if nested else fitted
    default = _default_constants(devices, raw.get("default") or {})
    return {"date": date, "default": default, "like": dict(raw.get("like") or {}), "devices": devices}


def _default_constants(devices: Mapping[str, Mapping[str, Any]], known: Mapping[str, Any]) -> dict[str, Any]:
    """Constants for devices without a table: for each operator the geometric mean of the fitted ones.

    Constants of decodes in mixed batches stay: most devices' tables do not determine them.
    """
    default = dict(known)
    for operator in BY_PRECISION:
        fitted: dict[str, list[Any]] = {}
        for device in devices.values():
            for precision, value in device.get(operator, {}).items():
                fitted.setdefault(precision, []).append(value)
        means = {precision: _mean(values) for precision, values in fitted.items()}
        if operator == "varlen" and "bf16" in (known.get("varlen") or {}):
            kept = {key: known["varlen"]["bf16"][key] for key in _MIXED_ONLY if key in known["varlen"]["bf16"]}
            means = {precision: {**value, **kept} for precision, value in means.items()}
        default[operator] = {**(known.get(operator) or {}), **means}
    return default


def _mean(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        # The cost of separate quantisation has no use where an engine fuses it into the previous operator.
        kept = [key for key in first if key != "quantisation" or not first[key]["fused"]]
        return {key: _mean([value.get(key, first[key]) for value in values]) for key in kept}
    if isinstance(first, bool) or not isinstance(first, float):
        return first
    if min(values) <= 0:
        return float(f"{sum(values) / len(values):.4g}")
    return float(f"{math.exp(sum(math.log(value) for value in values) / len(values)):.4g}")


def to_yaml(document: Mapping[str, Any]) -> str:
    """The text of an efficiencies file."""
    head = (
        "# Fitted constants of every operator, by device. Written by calibration; do not edit by hand, but for `like`\n"
        "# (whose constants stand in for a device without tables) and the allowances `step_s` and `sequence_s`, which\n"
        "# no operator table knows: scheduling, launches and sampling that nothing hides.\n"
        "# Forms and units: shared/cost/operators.py. Tables: each device's `sources`.\n"
    )
    return head + str(yaml.safe_dump(dict(document), sort_keys=False, width=118, default_flow_style=None))
