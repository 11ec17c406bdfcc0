from collections.abc import Callable

import pytest

from benchmarks import policy as bench
from benchmarks.cli import find_bench
from services.launcher.cli_common import summary
from shared.policy import registry


def once(decide: Callable[[int], object]) -> float:
    decide(0)
    return 1e-6


def test_figures_and_aims_have_the_agreed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SIZES", (6, 1_000))
    monkeypatch.setattr(bench, "cpu_s", once)
    result = bench.run_policy_bench()
    assert summary(result)["ok"] is True
    figures = result["figures"]
    for kind, table in (
        ("placement", registry.PLACEMENT),
        ("coupled", registry.PLACEMENT),
        ("dispatch", registry.DISPATCH),
        ("role_flip", registry.ROLE_FLIP),
    ):
        assert all(figures[f"{kind}_{name}_{size}_us"] == 1.0 for name in table for size in (6, 1_000))
    for kind, table in (
        ("split", registry.SPLIT),
        ("prefill_order", registry.PREFILL_ORDER),
        ("decode_admission", registry.DECODE_ADMISSION),
    ):
        assert all(figures[f"{kind}_{name}_us"] == 1.0 for name in table)
    assert {name: set(aim) for name, aim in result["aims"].items()} == {
        name: {"want", "got", "met"} for name in bench.AIMS
    }


def test_the_median_of_rounds_is_of_one_call() -> None:
    calls: list[int] = []
    seconds = bench.cpu_s(calls.append, rounds=3, round_s=1e-4)
    assert 0 < seconds < 1e-4
    assert calls[:2] == [0, 0]


def test_it_is_a_bench() -> None:
    assert find_bench("policy") is bench.run_policy_bench
