"""The next turn of a session goes where its KV lies, unless that costs more."""

from random import Random
from typing import Any

import msgspec
import pytest

from shared.domain.instance import InstanceView
from shared.domain.job import JobView
from shared.domain.kv import Codec
from shared.domain.route import Affinity, InstanceRef, Route
from shared.explain.reasons import phrase
from shared.policy.adaptive import Adaptive
from shared.policy.index import ClusterIndex
from shared.policy.ledger import WorkloadLedger
from shared.policy.placement import Policies, place
from shared.policy.prefix_index import PrefixIndex
from shared.policy.sessions import UNKNOWN_S, UNREPORTED_S, Sessions, Turn
from tests.shared.policy.views import ALL, TARGETS, asked, busy, d, p, view

FIRST = tuple(range(1, 31))  # hashes of blocks of 64 tokens: 1,920
NEXT = (*FIRST, *range(100, 105))
PROMPT, LATER = 1_950, 2_250
ENDED_S = 100.0
OTHER_PRECISION = InstanceRef("d", 1, "tcp://d:1", "fp8")
WITHOUT = Policies(Adaptive(sessions=False), ALL.split, ALL.dispatch)


def turn(prompt: int, prefix: tuple[int, ...], job_id: str = "j", session: str = "s", **more: Any) -> JobView:
    return msgspec.structs.replace(asked(prompt, prefix=prefix, session=session, **more), job_id=job_id)


def ref(name: str) -> InstanceRef:
    return InstanceRef(name, 1, f"tcp://{name}:1")


def on(decode: str = "", prefill: str = "", split: int = 0) -> Route:
    return Route(ref(prefill) if prefill else None, ref(decode) if decode else None, split, "test")


def after_a_turn(route: Route, *views: InstanceView, prefixes: PrefixIndex | None = None) -> ClusterIndex:
    """A cluster in which a session's first turn was computed on that route, with an answer of 100 tokens."""
    ledger = WorkloadLedger()
    ledger.add(turn(PROMPT, FIRST, "first"), route, ENDED_S - 5.0)
    ledger.complete("first", 100, True, ENDED_S)
    return ClusterIndex(view(*views), rng=Random(0), ledger=ledger, prefixes=prefixes)


def placed(index: ClusterIndex, now: float = ENDED_S + 0.05, policies: Policies = ALL, **more: Any) -> Route:
    return place(turn(LATER, NEXT, **more), index, policies, now, Random(0)).route


def test_the_next_turn_goes_back_before_anything_is_reported() -> None:
    index = after_a_turn(on("d1"), d("d1"), d("d2"), p("p"))
    found = placed(index)
    assert found.decode is not None
    assert (found.prefill, found.decode.instance_id, found.affinity) == (None, "d1", Affinity.BACK)
    assert found.decode_saved == 2_048  # of 2,049 tokens of prompt and answer, in blocks
    said = [phrase(reason) for reason in found.reasons if reason.what.startswith("session:")]
    assert said == ["its session's last turn was computed by d1: it goes back to d1"]


def test_it_yields_to_load() -> None:
    index = after_a_turn(on("d1"), d("d1", **busy(64, max_seqs=64), waiting_tokens=200_000), d("d2"))
    found = placed(index)
    assert found.decode is not None
    assert (found.decode.instance_id, found.affinity) == ("d2", Affinity.ELSEWHERE)
    assert phrase(found.reasons[-1]) == "its session's last turn was computed by d1: elsewhere costs less now"


def test_it_goes_on_without_an_instance_that_is_gone() -> None:
    found = placed(after_a_turn(on("gone"), d("d1"), d("d2")))
    assert found.affinity is Affinity.IMPOSSIBLE
    assert phrase(found.reasons[-1]) == "its session's last turn was computed by gone, which cannot take it now"


def test_in_a_large_cluster_the_last_instance_is_looked_at() -> None:
    views = [d(f"d{number:02}", speed=1.0) for number in range(40)]
    found = placed(after_a_turn(on("d33"), *views))
    assert found.decode is not None
    assert found.decode.instance_id == "d33"


@pytest.mark.parametrize(
    ("what", "later_s", "reports", "back"),
    [
        ("its report is not due yet", UNREPORTED_S, True, True),
        ("it has reported since, and has dropped the blocks", UNREPORTED_S + 0.1, True, False),
        ("it reports nothing", UNREPORTED_S + 0.1, False, True),
        ("nothing is known, and much time has passed", UNKNOWN_S + 0.1, False, False),
    ],
)
def test_what_is_not_reported_counts_for_a_while(what: str, later_s: float, reports: bool, back: bool) -> None:
    prefixes = PrefixIndex()
    if reports:
        prefixes.replace("d1", 1, [])
    index = after_a_turn(on("d1"), d("d1"), d("d2"), prefixes=prefixes)
    last = index.ledger.sessions.held(turn(LATER, NEXT), prefixes, ENDED_S + later_s)
    assert last == {"d1": 2_048 if back else 0}, what


def test_reports_count_beside_it() -> None:
    prefixes = PrefixIndex()
    prefixes.replace("d2", 1, NEXT)
    index = after_a_turn(on("d1"), d("d1"), d("d2"), prefixes=prefixes)
    found = placed(index, ENDED_S + 600.0)
    assert found.decode is not None
    assert (found.decode.instance_id, found.decode_saved) == ("d2", 2_240)


def test_another_chat_of_the_same_session_finds_nothing_held() -> None:
    index = after_a_turn(on("d1"), d("d1"), d("d2"))
    other = turn(LATER, tuple(range(500, 535)))
    assert index.ledger.sessions.held(other, index.prefixes, ENDED_S) == {"d1": 0}
    assert not Turn({"d1": 64}).goes_on_in(other)


def test_without_a_session_or_with_the_parameter_off_nothing_changes() -> None:
    index = after_a_turn(on("d1"), d("d1"), d("d2"))
    expected = placed(index, session="")
    for found in (placed(index, policies=WITHOUT), placed(index, session="of another")):
        assert (found.affinity, found.decode_saved, found.reasons) == (None, 0, expected.reasons)


def test_prefill_and_decode_instance_are_remembered_with_what_each_has() -> None:
    sessions, job = Sessions(), turn(PROMPT, FIRST)
    sessions.placed(job, on("d", "p", 640))
    sessions.placed(msgspec.structs.replace(job, local_only=True), on("e"))  # the decode alone
    sessions.ended("j", 100, 1.0)
    assert sessions.last(job) == Turn({"e": 2_048, "p": 640}, 30, 30, 1.0)


def test_kv_that_later_prompts_do_not_find_is_not_held() -> None:
    lossy = msgspec.structs.replace(TARGETS, lossy_kv=Codec.INT4)
    for job, route, tokens in (
        (turn(PROMPT, FIRST), on("d", "p", PROMPT), 2_048),
        (msgspec.structs.replace(turn(PROMPT, FIRST), slo=lossy), on("d", "p", PROMPT), 0),
        (msgspec.structs.replace(turn(PROMPT, FIRST), slo=lossy), on("d"), 2_048),
        (turn(PROMPT, FIRST), msgspec.structs.replace(on("d", "p", PROMPT), decode=OTHER_PRECISION), 0),
    ):
        sessions = Sessions()
        sessions.placed(job, route)
        sessions.ended("j", 100, 1.0)
        last = sessions.last(job)
        assert last is not None
        assert last.held["d"] == tokens


def test_a_job_that_fails_leaves_the_last_turn() -> None:
    sessions = Sessions()
    sessions.placed(turn(PROMPT, FIRST, "a"), on("d"))
    sessions.ended("a", 10, 1.0)
    sessions.placed(turn(LATER, NEXT, "b"), on("e"))
    sessions.ended("b", 0, 2.0)
    last = sessions.last(turn(LATER, NEXT))
    assert last is not None
    assert list(last.held) == ["d"]


def test_a_continued_job_counts_its_answer_once() -> None:
    sessions = Sessions()
    sessions.placed(turn(PROMPT, FIRST), on("d"))
    sessions.placed(turn(PROMPT + 90, FIRST), on("e"))  # after 90 tokens of its answer
    sessions.ended("j", 100, 1.0)
    last = sessions.last(turn(LATER, NEXT))
    assert last is not None
    assert last.held == {"e": 2_048}


def test_the_oldest_sessions_are_forgotten() -> None:
    sessions = Sessions(kept=2)
    for name in ("a", "b", "c"):
        sessions.placed(turn(PROMPT, FIRST, name, name), on("d"))
        sessions.ended(name, 10, 1.0)
    assert len(sessions) == 2
    assert sessions.last(turn(PROMPT, FIRST, session="a")) is None
