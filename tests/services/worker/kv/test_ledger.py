"""Room for exports is decided before they are computed, and comes back however they end."""

from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv.ledger import ExportLedger


def test_exports_are_let_in_while_all_of_them_fit() -> None:
    ledger, room = ExportLedger(100, 1), []
    ledger.when_room(lambda: room.append(ledger.reserved_bytes))
    assert ledger.reserve("a", 60, b"x")
    assert not ledger.reserve("b", 60, b"x")
    assert ledger.reserve("c", 40, b"y")
    ledger.dropped("a", 0)
    assert room == [40]
    assert ledger.reserve("b", 60, b"x")
    assert (ledger.of(b"x"), ledger.of(b"y"), ledger.of(b"z")) == (["b"], ["c"], [])


def test_an_export_ends_when_its_last_rank_has_dropped_it() -> None:
    ledger = ExportLedger(100, 2)
    ledger.reserve("a", 60, b"x")
    ledger.dropped("a", 1)
    ledger.dropped("a", 1)
    assert ledger.reserved_bytes == 60
    ledger.dropped("a", 0)
    ledger.dropped("a", 0)
    assert (ledger.reserved_bytes, len(ledger)) == (0, 0)


def test_what_can_never_fit_waits_for_nothing_and_takes_nothing() -> None:
    ledger = ExportLedger(100, 1)
    ledger.reserve("a", 90, b"x")
    assert ledger.reserve("huge", 101, b"y")
    assert ledger.reserved_bytes == 90
    assert ledger.of(b"y") == ["huge"]


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 60), st.sampled_from(["reserve", "end", "drop"]))))
def test_it_never_promises_more_than_there_is(steps: list[tuple[str, int, str]]) -> None:
    ledger = ExportLedger(100, 1)
    for name, size, what in steps:
        if what == "reserve":
            ledger.reserve(name, size, b"x")
        elif what == "end":
            ledger.end(name)
        else:
            ledger.dropped(name, 0)
        assert 0 <= ledger.reserved_bytes <= 100
    for name in "abcdef":
        ledger.end(name)
    assert (ledger.reserved_bytes, len(ledger)) == (0, 0)
