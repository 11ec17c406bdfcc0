from typing import Any

import numpy as np
import pytest
import yaml

from shared.cost.efficiency import SHIPPED, EfficiencyTable
from shared.cost.library import Library
from shared.files.yaml_file import parse_yaml, read_yaml
from tools.fit.efficiencies import TableFit, constants, fit_tables, recalibrated, to_yaml
from tools.fit.least_squares import AttentionRows, ElementwiseRows
from tools.fit.profilers import Table


@pytest.fixture(scope="module")
def tables(library: Library) -> tuple[Table, ...]:
    card = library.catalogue.get("MI300X")
    moved = np.geomspace(1e4, 1e9, 30)
    slow = ElementwiseRows(5e-6 + moved / 1e12, moved)
    tokens = np.tile([64.0, 256.0, 1024.0, 4096.0], 5)
    ones, none = np.ones(20), np.zeros(20)
    times = 2e-5 + tokens * tokens / 2 * 16384 / 300e12
    chunks = AttentionRows(
        seconds=times,
        sequences=ones,
        tokens=tokens,
        context=none,
        decodes=none,
        decode_context=none,
        heads=32 * ones,
        kv_heads=8 * ones,
        head_dim=128,
        kv_precision="bf16",
        kv_width=2.0,
    )
    empty = chunks.where(np.zeros(20, dtype=np.bool_))
    return (
        Table(card, "elementwise", "vidur", slow),
        Table(card, "prefill", "aiconfigurator kv bfloat16", chunks),
        Table(card, "prefill", "somebody else's", chunks),
        Table(card, "prefill", "aiconfigurator kv fp8", empty, rejected=20),
    )


@pytest.fixture(scope="module")
def fits(tables: tuple[Table, ...], library: Library) -> tuple[TableFit, ...]:
    return fit_tables(tables, library.efficiencies)


def test_every_table_gets_a_fit_but_those_without_a_measurement(fits: tuple[TableFit, ...]) -> None:
    assert [one.fit is None for one in fits] == [False, False, False, True]
    assert all(one.fit.mape < 0.1 for one in fits if one.fit)


def test_preferred_tables_alone_become_constants(fits: tuple[TableFit, ...], library: Library) -> None:
    devices = constants(fits, library.efficiencies)
    assert set(devices) == {"MI300X"}
    assert set(devices["MI300X"]) == {"elementwise", "varlen", "sources"}
    assert devices["MI300X"]["sources"] == [
        "elementwise: vidur, 30 rows",
        "prefill: aiconfigurator kv bfloat16, 20 rows",
    ]


def test_a_prefill_table_leaves_mixed_batches_as_they_were(fits: tuple[TableFit, ...], library: Library) -> None:
    known = library.efficiencies.for_device("MI300X").varlen_for("bf16")
    fresh = constants(fits, library.efficiencies)["MI300X"]["varlen"]["bf16"]
    assert fresh["decode_rows"] == pytest.approx(known.decode_rows, rel=1e-3)
    assert fresh["compute"] != known.compute


def test_a_new_document_keeps_the_rest(fits: tuple[TableFit, ...]) -> None:
    raw = read_yaml(SHIPPED)
    fresh = recalibrated(raw, fits, "2030-01-02")
    table = EfficiencyTable(parse_yaml(to_yaml(fresh), "fresh"))
    old = EfficiencyTable(raw)
    assert table.date == "2030-01-02"
    assert table.for_device("H100-SXM") == old.for_device("H100-SXM")
    assert table.for_device("MI300X").elementwise.overhead_s == pytest.approx(5e-6, rel=0.1)
    assert table.for_device("A10").step_s == old.for_device("A10").step_s


def test_writing_what_was_read_changes_nothing() -> None:
    raw = read_yaml(SHIPPED)
    again: Any = yaml.safe_load(to_yaml(recalibrated(raw, (), str(raw["date"]))))
    assert again["devices"] == raw["devices"]
    assert again["default"]["gemm"] == raw["default"]["gemm"]
