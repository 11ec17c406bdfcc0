"""Which instances are at work, lost or back, from broadcasts; reviews and proposals of a real cluster."""

import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from rich.console import Console

from services.launcher import operate
from services.planner import watch
from services.planner.watch import LOST_KEPT, Presence, Watch
from shared.domain.instance import ClusterView, InstanceState, InstanceView, Role
from shared.domain.route import PolicySpec
from shared.errors import Conflict, InvalidRequest, NotFound
from shared.policy.role_flip import FlipContext
from shared.wire.api import SchedulerNews
from shared.wire.api.planner import Promise
from tests.services.control_plane import until
from tests.services.fake_worker import make_info
from tests.services.planner.conftest import LONG, SHORT, Watched, Watching, asked

READY, SILENT, DRAINING = InstanceState.READY, InstanceState.UNRESPONSIVE, InstanceState.DRAINING


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def time(self) -> float:
        return self.now_s

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(watch, "time", made)
    return made


def view(*states: tuple[str, InstanceState], generation: int = 1) -> ClusterView:
    views = [
        InstanceView(make_info(name, "tcp://x", generation=generation), Role.PREFILL, state) for name, state in states
    ]
    return ClusterView(1, 0.0, tuple(views))


Step = tuple[dict[str, InstanceState], float, list[str]]  # a broadcast, seconds after it, and who counts as lost then
BOTH = {"a": READY, "b": READY}
B_SILENT = {"a": READY, "b": SILENT}
ONE = {"a": READY}


@pytest.mark.parametrize(
    ("steps", "lost"),
    [
        ([(BOTH, 0.0, []), (ONE, 0.0, ["b"]), (ONE, 0.0, [])], ["b"]),
        ([(BOTH, 0.0, []), (B_SILENT, 0.0, []), (B_SILENT, watch.SILENT_S + 0.01, ["b"]), (ONE, 0.0, [])], ["b"]),
        ([(BOTH, 0.0, []), (B_SILENT, 0.0, []), (ONE, 0.0, ["b"])], ["b"]),
        ([(BOTH, 0.0, []), ({"a": SILENT, "b": SILENT}, 0.2, []), (BOTH, 10.0, [])], []),
        ([(BOTH, 0.0, []), ({"a": READY, "b": DRAINING}, 0.0, []), (ONE, 0.0, ["b"])], []),
    ],
    ids=["gone", "silent for long", "silent, then gone", "silent for a moment", "gone after its drain"],
)
def test_an_instance_that_is_away_is_lost_once(clock: Clock, steps: list[Step], lost: list[str]) -> None:
    presence = Presence(0.0)
    for states, later_s, lost_now in steps:
        assert presence.update(view(*states.items())) == []
        clock.now_s += later_s
        assert list(presence.pop_lost()) == lost_now
    assert [one.instance_id for one in presence.lost] == lost


def test_an_instance_that_returns_is_not_lost_any_more(clock: Clock) -> None:
    presence = Presence(0.0)
    for states in (BOTH, ONE):
        presence.update(view(*states.items()))
    assert presence.pop_lost() == {"b": 1_000.0}
    assert presence.update(view(*BOTH.items())) == ["b"]
    assert presence.lost == ()


def test_another_life_under_the_same_name_has_come(clock: Clock) -> None:
    watched = Presence(5.0)
    watched.update(view(("a", READY)))
    watched.update(view())
    assert watched.pop_lost() == {}
    assert watched.update(view(("a", READY), generation=2)) == ["a"]


def test_the_lost_are_bounded(clock: Clock) -> None:
    watched = Presence(0.0)
    watched.update(view(*((f"w{at}", READY) for at in range(LOST_KEPT + 9))))
    watched.update(view())
    assert len(watched.pop_lost()) == LOST_KEPT + 9
    assert len(watched.lost) == LOST_KEPT


def test_a_role_that_changes_is_a_change(clock: Clock) -> None:
    watched = Presence(0.0)
    watched.update(view(("a", READY)))
    clock.now_s += 3.0
    watched.update(view(("a", READY)))
    assert watched.changed_mono == 1_000.0
    (one,) = view(("a", READY)).instances
    watched.update(ClusterView(2, 0.0, (msgspec.structs.replace(one, role=Role.DECODE),)))
    assert watched.changed_mono == 1_003.0


ROUTES = [["p0", "d2", 0.5], ["p1", "d3", 0.5]]


async def lost_prefill(watching: Watching, **settings: Any) -> Watched:
    """Two prefill and two decode instances with long prompts, of which one prefill instance dies."""
    found: Watched = await watching(**settings)
    await found.start_all("ppdd")
    await found.ask(20, 8, LONG)
    assert not await found.client.proposals()
    await found.kill("p1")
    return found


async def test_a_loss_is_proposed_for_and_carried_out_when_accepted(watching: Watching) -> None:
    cluster = await lost_prefill(watching)
    one = await cluster.proposal("open")
    assert one.cause == "loss"
    assert "p1 gone: " in one.why  # beside those who came just before
    assert [flip.to_role for flip in one.flips] == ["prefill"]
    assert one.then.goodput > 1.1 * one.now.goodput
    assert one.made_s - one.noticed_s < 60.0  # a bound of sanity; the bench measures
    flipped = one.flips[0].instance_id
    assert cluster.workers[flipped].role is Role.DECODE, "nothing is done unasked"
    accepted = await cluster.client.accept(one.proposal_id, who="Jörg Müller")  # need not be ASCII
    assert accepted.state == "applying"
    done = await cluster.proposal("applied")
    assert (done.who, [step.ok for step in done.steps]) == ("Jörg Müller", [True])
    assert cluster.workers[flipped].role is Role.PREFILL
    assert cluster.workers[flipped].calls == ["drain", "flip", "resume"]
    (entry,) = await cluster.monitor.flips()
    assert entry.who == f"planner: proposal {one.proposal_id}, Jörg Müller"
    assert entry.why == one.why


def test_data_parallel_ranks_keep_their_roles_in_a_review() -> None:
    """They flip only together, and a review weighs the flip of one."""
    infos = [
        make_info(name, "tcp://127.0.0.1:1", rank_of=whole) for name, whole in (("p", ""), ("d.0", "d"), ("e", ""))
    ]
    views = tuple(InstanceView(info, Role.DECODE, InstanceState.READY) for info in infos)
    people = FlipContext(kept=frozenset({"e"}))
    fixed = Watch.fixed(cast(Any, SimpleNamespace(_flip_context=people)), cast(Any, SimpleNamespace(views=views)))
    assert fixed == ["d.0", "e"]


async def test_auto_does_it_by_itself(watching: Watching) -> None:
    cluster = await lost_prefill(watching, auto=True)
    done = await cluster.proposal("applied")
    assert done.who == "auto"
    assert sum(worker.role is Role.PREFILL for name, worker in cluster.workers.items() if name != "p1") == 2


async def test_auto_leaves_it_where_a_policy_flips_roles_itself(watching: Watching) -> None:
    cluster: Watched = await watching(auto=True)
    await cluster.monitor.set_policies({"role_flip": PolicySpec("predictive")})
    await cluster.start_all("ppdd")
    await cluster.ask(20, 8, LONG)
    await until(lambda: cluster.state.decider.why_not_auto, "the planner knows of the policy")
    await cluster.kill("p1")
    one = await cluster.proposal("open")
    fleet = await cluster.client.fleet()
    assert fleet.auto
    assert "predictive" in fleet.why_not_auto
    with pytest.raises(NotFound):
        await cluster.client.accept("nothing")
    assert (await cluster.client.accept(one.proposal_id)).state == "applying", "people still may"


async def test_what_was_refused_is_not_proposed_again_by_a_mere_review(watching: Watching) -> None:
    cluster = await lost_prefill(watching, review_s=0.1)
    one = await cluster.proposal("open")
    refused = await cluster.client.refuse(one.proposal_id, who="ann")
    assert (refused.state, refused.who) == ("refused", "ann")
    with pytest.raises(Conflict, match="is refused"):
        await cluster.client.accept(one.proposal_id)
    before = cluster.state.watch.reviews
    await until(lambda: cluster.state.watch.reviews >= before + 3, "three more reviews", 20.0)
    assert len(await cluster.client.proposals()) == 1
    again = await cluster.client.propose(who="bob")  # who asks hears it again
    assert again.proposal.why.startswith("bob asked")
    assert again.proposal.flips == one.flips


async def test_a_return_withdraws_what_the_loss_had_proposed(watching: Watching) -> None:
    cluster = await lost_prefill(watching)
    await cluster.proposal("open")
    await cluster.start("p1", Role.PREFILL)
    gone = await cluster.proposal("withdrawn")
    assert "the roles serve this" in gone.error


async def test_a_flip_that_fails_is_told_and_the_routes_stay(watching: Watching) -> None:
    cluster: Watched = await watching()
    await cluster.monitor.set_policies({"placement": PolicySpec("plan", {"routes": ROUTES})})
    await cluster.start_all("ppdd")
    await cluster.ask(20, 8, LONG)
    for name in ("d2", "d3"):
        cluster.workers[name].fail_flip = True
    await cluster.kill("p1")
    one = await cluster.proposal("open")
    assert one.changes_routes
    await cluster.client.accept(one.proposal_id)
    failed = await cluster.proposal("failed")
    assert "the engine is stuck" in failed.error
    placement = (await cluster.monitor.policies()).policies["placement"]
    assert placement.parameters["routes"] == ROUTES


async def test_under_placement_plan_routes_follow(watching: Watching) -> None:
    cluster: Watched = await watching(auto=True)
    await cluster.monitor.set_policies({"placement": PolicySpec("plan", {"routes": ROUTES})})
    await cluster.start_all("ppdd")
    await cluster.ask(20, 8, LONG)
    await cluster.kill("p1")
    done = await cluster.proposal("applied")
    routes = (await cluster.monitor.policies()).policies["placement"].parameters["routes"]
    assert [[route.prefill or "", route.decode] for route in done.routes] == [row[:2] for row in routes]
    assert sum(row[2] for row in routes) == pytest.approx(1.0, abs=0.01)
    assert all("p1" not in row for row in routes)
    fleet = await until(lambda: routed(cluster), "the planner knows of the new routes")
    assert fleet.routes_in_force


async def routed(cluster: Watched) -> Any:
    fleet = await cluster.client.fleet()
    return fleet if fleet.expected and all(route.prefill != "p1" for route in fleet.routes) else None


async def test_what_a_person_set_stays(watching: Watching) -> None:
    cluster: Watched = await watching()
    await cluster.start_all("ppddd")
    await cluster.monitor.flip("p1", who="ann")  # no reasons: a person's
    await cluster.ask(20, 8, LONG)
    answer = await cluster.client.propose()
    assert answer.proposal is None
    assert "kept as they are" in answer.why


async def test_a_shift_is_noticed_and_proposed_for(watching: Watching) -> None:
    cluster: Watched = await watching()
    await cluster.start_all("pddd")
    rows = [msgspec.structs.replace(row, second=row.second - 8) for row in asked(25, 10, SHORT)]
    await cluster.monitor.scheduler_news("s0", SchedulerNews(0, demand=rows))
    await until(lambda: cluster.state.watch.demand is not None, "a profile", 20.0)
    await cluster.ask(8, 10, LONG)
    one = await cluster.proposal("open")
    assert one.cause == "shift"
    assert "prompts went from" in one.why
    assert {flip.to_role for flip in one.flips} == {"prefill"}


async def test_what_if_tells_of_losses_and_of_more(watching: Watching) -> None:
    cluster: Watched = await watching()
    await cluster.start_all("ppdd")
    await cluster.ask(20, 8, LONG)
    less = await cluster.client.what_if({"lost": ["p1"]})
    assert less.then.goodput < 0.7 * less.now.goodput
    assert less.best.expected.goodput > less.then.goodput
    more = await cluster.client.what_if({"added": [{"like": "p1", "count": 2}], "rate_factor": 1.5})
    assert more.then.goodput > more.now.goodput
    assert more.then.rate == pytest.approx(1.5 * more.now.rate)
    with pytest.raises(InvalidRequest, match="no instance 'x' is ready; there are d2, d3, p0, p1"):
        await cluster.client.what_if({"lost": ["x"]})
    with pytest.raises(InvalidRequest, match="rate_factor"):
        await cluster.client.what_if({"rate_factor": 0})
    with pytest.raises(InvalidRequest, match=r"added: .*512 instances in all; at most 256"):
        await cluster.client.what_if({"added": [{"like": "p0", "count": 256}, {"like": "d2", "count": 256}]})
    with pytest.raises(InvalidRequest, match="no instance would be left"):
        await cluster.client.what_if({"lost": ["p0", "p1", "d2", "d3"]})


async def test_the_page_and_the_command_understand_all_of_it(watching: Watching) -> None:
    cluster = await lost_prefill(watching, promise={"rate": 5.0, "goodput": 6.0, "attainment": 0.9})
    one = await cluster.proposal("open")
    fleet, proposed = await cluster.client.fleet(), await cluster.client.proposals()
    assert {row.instance_id: row.state for row in fleet.instances}["p1"] == "lost"
    assert fleet.promise == Promise(rate=5.0, goodput=6.0, attainment=0.9)
    assert fleet.expected is not None
    assert fleet.expected.goodput == pytest.approx(one.now.goodput, rel=0.05)
    shown = io.StringIO()
    answer = operate.ProposalsAnswer(failed=False, said="", fleet=fleet, proposals=proposed)
    operate.show_proposals(Console(file=shown, width=160), answer)
    assert "p1 gone: " in shown.getvalue()
    assert f"polyphase proposals --accept {one.proposal_id}" in shown.getvalue()


async def test_the_next_life_knows_what_was_proposed(watching: Watching) -> None:
    cluster = await lost_prefill(watching)
    one = await cluster.proposal("open")
    await cluster.kill("planner")
    again: Watched = await watching()
    (known,) = await until(again.client.proposals, "what was proposed is recalled")
    assert (known.proposal_id, known.state) == (one.proposal_id, "withdrawn")
    assert known.error == "the planner was restarted"


async def test_the_monitor_away_is_said_and_nothing_dies(watching: Watching) -> None:
    cluster: Watched = await watching(monitor_url="http://127.0.0.1:9")
    await until(lambda: "does not report" in cluster.state.watch.problem, "the trouble is known")
    fleet = await cluster.client.fleet()
    assert "does not report the demand" in fleet.trouble
    assert fleet.measured is None


async def test_with_nobody_ready_it_waits_and_says_so(watching: Watching) -> None:
    cluster: Watched = await watching(review_s=0.1)
    await cluster.start_all("ppdd")
    await cluster.ask(20, 8, LONG)
    for name in ("p0", "p1", "d2", "d3"):
        await cluster.kill(name)
    await until(lambda: cluster.state.watch.problem == "no instance is ready", "the trouble is known", 20.0)
    fleet = await cluster.client.fleet()
    assert {row.state for row in fleet.instances} == {"lost"}
    assert not cluster.state.proposals.open
    reviews = cluster.state.watch.reviews
    for name, role in (("p0", Role.PREFILL), ("d2", Role.DECODE)):
        await cluster.start(name, role)
    await until(lambda: cluster.state.watch.reviews > reviews, "it thinks about those who have come", 20.0)
    assert cluster.state.watch.problem == ""


async def test_a_proposal_that_does_not_fit_any_more_is_not_carried_out(watching: Watching) -> None:
    cluster = await lost_prefill(watching)
    one = await cluster.proposal("open")
    flipped = one.flips[0].instance_id
    await cluster.monitor.flip(flipped, who="bob")
    await until(lambda: role_of(cluster, flipped) is Role.PREFILL, "the planner knows of bob's flip")
    with pytest.raises(
        Conflict, match=f"(does not fit any more: {flipped} is (ready|draining) as a prefill|is withdrawn)"
    ):
        await cluster.client.accept(one.proposal_id)
    assert cluster.workers[flipped].role is Role.PREFILL
    assert (await cluster.proposal("withdrawn")).proposal_id == one.proposal_id


def role_of(cluster: Watched, name: str) -> Role | None:
    view = cluster.state.watch.view
    found = view.get(name) if view is not None else None
    return found.role if found is not None else None


async def test_what_failed_is_not_tried_again_by_a_mere_review(watching: Watching) -> None:
    cluster: Watched = await watching(review_s=0.1, auto=True)
    await cluster.start_all("ppdd")
    for name in ("d2", "d3"):
        cluster.workers[name].fail_flip = True
    await cluster.ask(20, 8, LONG)
    await cluster.kill("p1")
    await cluster.proposal("failed")
    before = cluster.state.watch.reviews
    await until(lambda: cluster.state.watch.reviews >= before + 3, "three more reviews", 20.0)
    assert [one.state for one in await cluster.client.proposals()] == ["failed"]


async def test_where_nobody_decodes_somebody_is_to(watching: Watching) -> None:
    cluster: Watched = await watching(auto=True, review_s=0.1)
    await cluster.start_all("pp")
    await cluster.ask(20, 4, SHORT)
    done = await cluster.proposal("applied", "failed")
    assert (done.state, done.error) == ("applied", "")
    assert {worker.role for worker in cluster.workers.values()} >= {Role.DECODE}
