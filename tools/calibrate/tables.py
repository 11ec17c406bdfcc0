"""`polyphase calibrate tables`: constants of the cost model from operator tables, with their errors."""

import datetime
from collections.abc import Sequence
from pathlib import Path

from services.launcher.cli_common import Aim, Result
from shared.cost.efficiency import SHIPPED, EfficiencyTable
from shared.cost.library import Library
from shared.files.yaml_file import read_yaml
from tools.fit.efficiencies import TableFit, fit_tables, recalibrated, to_yaml
from tools.fit.profilers import read_tables


def run_tables(folder: Path, out: Path, base: Path = SHIPPED) -> Result:
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
    return _result(fits)


def _result(fits: Sequence[TableFit]) -> Result:
    figures: dict[str, float] = {}
    aims: dict[str, Aim] = {}
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
