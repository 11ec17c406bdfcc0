"""Which of several servers is asked: by a clock and connections that the test sets."""

from collections.abc import Iterable
from contextlib import suppress

import pytest

from gateway.lengths import ASIDE_S, Replica, Replicas
from shared.errors import Busy, DeadlineExceeded, NotConnected, PolyphaseError


class Those:
    """Replicas `names`, all of them there at first."""

    def __init__(self, names: str) -> None:
        self.there = set(names)
        self.now_s = 0.0
        self.replicas = Replicas(names, self.there.__contains__, lambda: self.now_s)

    def asked(self, count: int) -> str:
        """Who is, one after the other."""
        found = []
        for _ in range(count):
            replica = self.replicas.first()
            with self.replicas.calling(replica):
                found.append(replica.address)
        return "".join(found)

    def fails(self, name: str, error: PolyphaseError) -> Replica:
        """A call to it does."""
        replica = next(one for one in _each(self.replicas, self.there) if one.address == name)
        with suppress(PolyphaseError), self.replicas.calling(replica):
            raise error
        return replica


def _each(replicas: Replicas, there: set[str]) -> Iterable[Replica]:
    """In turn, until all were seen."""
    for _ in there:
        replica = replicas.first()
        with replicas.calling(replica):
            yield replica


def _address(replica: Replica | None) -> str:
    return replica.address if replica else ""


def test_without_a_call_under_way_they_are_asked_in_turn() -> None:
    assert Those("abc").asked(7) == "abcabca"


def test_the_fewest_calls_under_way_come_first() -> None:
    those = Those("ab")
    with those.replicas.calling(those.replicas.first()), those.replicas.calling(those.replicas.first()):
        with those.replicas.calling(those.replicas.first()):  # a has two
            assert those.asked(3) == "bbb"
        assert sorted(those.asked(2)) == ["a", "b"]


@pytest.mark.parametrize("error", [Busy(""), DeadlineExceeded(""), NotConnected(""), PolyphaseError("")])
def test_one_that_failed_is_left_aside_for_a_while(error: PolyphaseError) -> None:
    those = Those("ab")
    those.fails("a", error)
    assert those.asked(3) == "bbb"
    those.now_s = ASIDE_S
    assert set(those.asked(2)) == {"a", "b"}


def test_one_that_is_not_there_is_asked_only_where_nobody_is() -> None:
    those = Those("ab")
    those.there.discard("a")
    assert those.asked(2) == "bb"
    those.there.discard("b")
    assert set(those.asked(4)) == {"a", "b"}


def test_where_all_have_failed_all_are_asked() -> None:
    those = Those("ab")
    for name in "ab":
        those.fails(name, Busy(""))
    assert set(those.asked(2)) == {"a", "b"}


def test_the_other_one_is_one_that_is_there_and_did_not_fail() -> None:
    those = Those("abc")
    failed = those.fails("a", Busy(""))
    assert _address(those.replicas.other(failed)) in {"b", "c"}
    those.there.discard("b")
    assert _address(those.replicas.other(failed)) == "c"
    those.fails("c", Busy(""))
    assert those.replicas.other(failed) is None


def test_a_call_that_was_given_up_is_no_failure() -> None:
    those = Those("ab")
    replica = those.replicas.first()
    with suppress(ValueError), those.replicas.calling(replica):
        raise ValueError
    assert (replica.calls, those.asked(2)) == (0, "ba")


def test_there_may_be_none() -> None:
    assert not Those("").replicas
