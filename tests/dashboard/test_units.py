import pytest

from dashboard import units


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0.0000013, "1.3 µs"),
        (0.000412, "0.412 ms"),
        (0.0853, "85.3 ms"),
        (0.4, "400 ms"),
        (1.24, "1.24 s"),
        (60, "60 s"),
        (300, "5 min"),
        (0, "0 ms"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert units.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (1.0, "100 %"), (0.99999, "99.9 %"), (0.5, "50 %"), (0.0, "0 %")]
)
def test_share_never_rounds_up_to_all(value: float | None, text: str) -> None:
    assert units.share(value) == text


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (7, "7"), (1234, "1 234"), (56_000, "56 k"), (2e6, "2 M")])
def test_count(value: float | None, text: str) -> None:
    assert units.count(value) == text


@pytest.mark.parametrize(("value", "text"), [(12, "12 B"), (1500, "1.5 kB"), (3.3e9, "3.3 GB")])
def test_size(value: float, text: str) -> None:
    assert units.size(value) == text


def test_moments_are_in_the_readers_zone() -> None:
    assert units.moment(1_790_000_000.0, 1_790_000_060.0, "UTC") == "14:13:20 (1 min ago)"
    assert units.moment(1_790_000_000.0, 1_790_100_000.0, "Europe/Zurich") == "21 Sep 16:13 (1 d ago)"


@pytest.mark.parametrize(
    ("past_s", "text"), [(-3, "0 s ago"), (59, "59 s ago"), (60, "1 min ago"), (90_000, "1 d ago")]
)
def test_ago(past_s: float, text: str) -> None:
    assert units.ago(1e9, 1e9 + past_s) == text
