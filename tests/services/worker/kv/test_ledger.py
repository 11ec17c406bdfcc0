"""Room for exports is decided before they are computed, and comes back however they end."""

from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv.port import ExportLedger


def reserve(ledger: ExportLedger, transfer_id: str, size_bytes: int, owner: bytes = b"x") -> bool:
    ledger.announce(transfer_id, size_bytes, owner)
    return ledger.reserve(transfer_id)


def test_exports_are_let_in_while_all_of_them_fit() -> None:
    ledger, room = ExportLedger(100, 1), []
    ledger.when_room = lambda: room.append(ledger.reserved_bytes)
    assert reserve(ledger, "a", 60)
    assert not reserve(ledger, "b", 60)
    assert reserve(ledger, "c", 40, b"y")
    assert not ledger.reserve("b")
    ledger.dropped("a", 0)
    assert room == [40]
    assert ledger.reserve("b")
    assert (ledger.owned_by(b"x"), ledger.owned_by(b"y"), ledger.owned_by(b"z")) == (["b"], ["c"], [])


def test_who_has_room_keeps_it_however_often_it_is_asked_for() -> None:
    ledger = ExportLedger(100, 1)
    assert reserve(ledger, "a", 60)
    assert ledger.reserve("a")
    assert ledger.reserved_bytes == 60


def test_who_only_waits_holds_nothing_and_its_end_is_no_news() -> None:
    ledger, room = ExportLedger(100, 1), []
    ledger.when_room = lambda: room.append(ledger.reserved_bytes)
    ledger.announce("a", 100, b"x")
    assert reserve(ledger, "b", 100)
    ledger.end("a")
    assert (room, ledger.reserved_bytes) == ([], 100)


def test_one_that_has_ended_gets_nothing_though_its_engine_still_asks() -> None:
    ledger = ExportLedger(100, 1)
    assert reserve(ledger, "full", 100)
    ledger.announce("a", 60, b"x")
    assert not ledger.reserve("a")
    ledger.end("a")
    assert ledger.reserve("a")  # it holds up nobody
    assert (ledger.reserved_bytes, len(ledger)) == (100, 1)


def test_an_export_ends_when_its_last_rank_has_dropped_it() -> None:
    ledger = ExportLedger(100, 2)
    reserve(ledger, "a", 60)
    ledger.dropped("a", 1)
    ledger.dropped("a", 1)
    assert ledger.reserved_bytes == 60
    ledger.dropped("a", 0)
    ledger.dropped("a", 0)
    assert (ledger.reserved_bytes, len(ledger)) == (0, 0)


def test_what_can_never_fit_waits_for_nothing_and_takes_nothing() -> None:
    ledger = ExportLedger(100, 1)
    reserve(ledger, "a", 90)
    assert reserve(ledger, "huge", 101, b"y")
    assert ledger.reserved_bytes == 90
    assert ledger.owned_by(b"y") == ["huge"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdef"), st.integers(0, 60), st.sampled_from(["announce", "reserve", "end", "drop"])
        )
    )
)
def test_it_never_promises_more_than_there_is(steps: list[tuple[str, int, str]]) -> None:
    ledger = ExportLedger(100, 1)
    for name, size, what in steps:
        if what == "announce":
            ledger.announce(name, size, b"x")
        elif what == "reserve":
            ledger.reserve(name)
        elif what == "end":
            ledger.end(name)
        else:
            ledger.dropped(name, 0)
        assert 0 <= ledger.reserved_bytes <= 100
    for name in "abcdef":
        ledger.end(name)
    assert (ledger.reserved_bytes, len(ledger)) == (0, 0)
