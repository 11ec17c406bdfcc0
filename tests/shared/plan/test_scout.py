"""Short runs that tell who leads, and a second process that makes runs: the same results, whoever makes them."""

from time import perf_counter

from shared.domain.instance import Role
from shared.plan.group import Group, Part
from shared.plan.judge import Ask, Scout
from shared.plan.methods.best import best
from shared.plan.plan import Plan
from shared.plan.search import Helper, Search, helped, searched
from tests.shared.plan.problems import inventory, problem, search

ASKED = problem(inventory(("a", "A10", 4)))
ONE = Group(Role.DECODE, 1, (Part(0, 32),))
FOUR, THREE, LONE = (Plan((ONE,) * count) for count in (4, 3, 1))


def test_short_runs_find_who_leads() -> None:
    found = search(ASKED)
    scout = Scout(found.judge, found.estimator.of(FOUR.groups).goodput, lambda: False)
    led = scout.led([LONE, THREE, FOUR])
    assert led[0][0] == FOUR
    assert LONE not in [plan for plan, _ in led]
    assert [plan for plan, _ in scout.beside(FOUR, [LONE])] == []
    assert [plan for plan, _ in scout.beside(LONE, [FOUR])] == [FOUR]


def test_a_short_run_has_fewer_requests_than_a_long_one() -> None:
    judge = search(ASKED).judge
    assert len(judge.workload(Ask(FOUR, 4.0, short=True))) < len(judge.workload(Ask(FOUR, 4.0)))


def test_a_helper_finds_what_the_judge_finds_itself() -> None:
    judge, alone = search(ASKED).judge, search(ASKED).judge
    asks = [Ask(FOUR, 3.0), Ask(THREE, 3.0), Ask(LONE, 3.0, short=True)]
    with helped(judge):
        judge.ahead(asks)
        assert judge.runs == 0  # none was needed yet
        shown = [judge.attained(ask.plan, ask.rate, short=ask.short) for ask in asks]
    assert judge.helper is None
    assert shown == [alone.told(ask) for ask in asks]


def test_without_its_helper_the_judge_goes_on_alone() -> None:
    judge = search(ASKED).judge
    judge.helper = gone = Helper(judge)
    gone.close()
    judge.ahead([Ask(FOUR, 3.0), Ask(THREE, 3.0)])
    assert judge.helper is None
    assert judge.attained(FOUR, 3.0) == search(ASKED).judge.attained(FOUR, 3.0)


def test_a_search_is_the_same_with_a_helper_and_without() -> None:
    asked = problem(inventory(("a", "A10", 6), ("b", "L4", 6)))
    plans = []
    for with_helper in (False, True):
        found = searched("best", best, Search(asked, perf_counter, helped=with_helper))
        plans.append((found.plan, found.promise.goodput, found.runs))
    assert plans[0] == plans[1]
