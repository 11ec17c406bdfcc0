import pytest

from benchmarks import policy as bench
from services.launcher.cli_common import summary
from shared.policy import registry


def test_every_policy_is_measured_and_each_cost_has_its_aim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SIZES", (6, 1_000))
    monkeypatch.setattr(bench, "cpu_s", lambda decide: (decide(0), 1e-6)[1])
    result = bench.run_policy_bench()
    assert summary(result)["ok"] is True
    assert result["aims"].keys() == bench.MAX_COSTS.keys()
    sized = {"placement": registry.PLACEMENT, "dispatch": registry.DISPATCH, "role_flip": registry.ROLE_FLIP}
    wanted = {f"{kind}_{name}_{size}_us" for kind, table in sized.items() for name in table for size in (6, 1_000)}
    for kind in ("split", "prefill_order", "decode_admission"):
        wanted |= {f"{kind}_{name}_us" for name in getattr(registry, kind.upper())}
    assert all(result["figures"][name] == 1.0 for name in wanted)


def test_the_median_of_rounds_is_of_one_call() -> None:
    calls: list[int] = []
    assert 0 < bench.cpu_s(calls.append, rounds=3, round_s=1e-4) < 1e-4
    assert calls[:2] == [0, 0]
