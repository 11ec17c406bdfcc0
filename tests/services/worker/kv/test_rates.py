"""What `make gpu-check` measures on a GPU runs on a CPU, too, and brings what was sent; its rates say nothing here."""

from tests.gpu.rates import LOSSY, measure, show


def test_everything_is_measured_and_arrives() -> None:
    rates = measure("cpu", 96, rounds=1)
    ways = {"plain copy to the host", "plain copy to the device", "export", "import", "end to end"}
    assert set(rates) == ways | {f"end to end {codec.value}" for codec in LOSSY}
    assert all(rate > 0 for rate in rates.values())
    assert len(show(rates).splitlines()) == len(rates)
