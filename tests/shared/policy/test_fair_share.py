"""Virtual token counters, and the line that goes by them."""

from hypothesis import given
from hypothesis import strategies as st

from shared.policy.fair_share import (
    ACTIVE_S,
    CREDIT_TOKENS,
    LEDGER_S,
    OUTPUT_COST,
    SLACK_TOKENS,
    CallerQueue,
    LeastFirst,
    TokenCounters,
)


def shares(*callers: str, **weights: float) -> TokenCounters:
    made = TokenCounters(weights)
    for caller in callers:
        made.came(caller, 0.0)
    return made


def test_output_tokens_cost_more_and_a_weight_makes_them_cheaper() -> None:
    made = shares("a", "b", b=2.0)
    made.charge("a", 100, 10)
    made.charge("b", 100, 10)
    assert made.tokens("a") == 100 + OUTPUT_COST * 10
    assert made.tokens("b") == made.tokens("a") / 2.0


class Ledger:
    def __init__(self) -> None:
        self.noted: dict[str, float] = {}
        self.others: dict[str, float] = {}

    def note(self, caller: str, tokens: float) -> None:
        self.noted[caller] = self.noted.get(caller, 0.0) + tokens

    def elsewhere(self, caller: str) -> float:
        return self.others.get(caller, 0.0)


def test_what_a_caller_has_had_elsewhere_counts_from_its_first_request_on() -> None:
    ledger = Ledger()
    ledger.others = {"a": 5000.0}
    made = TokenCounters({"b": 2.0}, ledger)
    made.came("a", 0.0)
    made.came("b", 0.0)
    assert made.tokens("a") == 0.0
    ledger.others = {"a": 5000.0 + SLACK_TOKENS + 10, "b": 10.0}
    assert not made.over("a", LEDGER_S / 2), "it is looked at only so often"
    assert made.over("a", LEDGER_S)
    assert (made.tokens("a"), made.tokens("b")) == (SLACK_TOKENS + 10, 5.0)
    ledger.others = {"a": 0.0, "b": 10.0}  # one of the others was started again
    made.came("a", 2 * LEDGER_S)
    ledger.others = {"a": 7.0, "b": 10.0}
    made.came("a", 3 * LEDGER_S)
    assert made.tokens("a") == SLACK_TOKENS + 17
    made.charge("a", 3, 2)
    assert ledger.noted == {"a": 3 + 2 * OUTPUT_COST}


def test_alone_nobody_is_over_its_share_nor_beside_those_who_ask_no_more() -> None:
    made = shares("a")
    made.charge("a", 10**6, 0)
    assert not made.over("a", 0.0)
    made.came("b", 0.0)
    made.left("b", 0.0)
    made.charge("a", 10**6, 0)
    assert made.over("a", ACTIVE_S)
    assert not made.over("a", ACTIVE_S + 1.0)


def test_idle_callers_gain_no_credit() -> None:
    made = shares("a")
    made.charge("a", 50_000, 0)
    made.came("b", 100.0)
    assert made.tokens("b") == made.tokens("a")
    made.left("b", 101.0)
    made.charge("a", 50_000, 0)
    made.came("b", 200.0)
    assert made.tokens("b") == made.tokens("a") == 100_000


def test_who_asks_for_little_is_not_idle_but_gains_only_so_much() -> None:
    made = shares("a", "b")
    for now in range(1, 6):
        made.left("b", float(now))
        made.charge("a", 3000, 0)
        made.came("b", float(now))
    assert made.tokens("b") == 0.0
    assert made.over("a", 5.0)
    made.left("b", 6.0)
    made.charge("a", 10**6, 0)
    made.came("b", 7.0)
    assert made.tokens("a") - made.tokens("b") == CREDIT_TOKENS


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3000)), min_size=30, max_size=120))
def test_a_line_keeps_those_who_always_wait_close_together(jobs: list[tuple[str, int]]) -> None:
    made = shares("a", "b", "c")
    line = CallerQueue[int](made)
    cost = dict(enumerate(tokens for _, tokens in jobs))
    caller_of = dict(enumerate(caller for caller, _ in jobs))
    left = {name: [number for number, (caller, _) in enumerate(jobs) if caller == name] for name in "abc"}
    for number in cost:
        line.push(number, caller_of[number])
    while all(left.values()):
        head = line.head()
        assert head is not None
        assert head == left[caller_of[head]].pop(0), "within one caller the oldest is first"
        made.charge(caller_of[head], cost[head], 0)
        assert line.remove(head, caller_of[head])
        if all(left.values()):  # the bound of the paper: by at most one request's tokens
            counters = [made.tokens(name) for name in "abc"]
            assert max(counters) - min(counters) <= 3000


def test_the_head_stays_the_head_until_it_leaves() -> None:
    made = shares("a", "b")
    line = CallerQueue[str](made)
    made.charge("a", 10, 0)
    line.push("a1", "a")
    assert line.head() == "a1"
    line.push("b1", "b")
    assert line.head() == "a1"
    assert not line.remove("b1", "a")
    assert line.remove("a1", "a")
    assert line.head() == "b1"
    assert len(line) == 1
    assert line.remove("b1", "b")
    assert line.head() is None


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 9), st.sampled_from("aceg")), max_size=60))
def test_the_least_member_is_that_of_a_search_through_all(steps: list[tuple[str, int, str]]) -> None:
    keys = dict.fromkeys("abcde", 0)
    members = set[str]()
    least = LeastFirst(keys.__getitem__)
    for name, more, without in steps:
        keys[name] += more
        if more == 0:
            members.discard(name)
        else:
            members.add(name)
            least.add(name)
        found = least.first(members.__contains__, without)
        expected = min((keys[other] for other in members if other != without), default=None)
        assert (None if found is None else keys[found]) == expected
        assert found != without
