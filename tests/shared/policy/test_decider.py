"""What a process goes by, whatever the order and the content of what it hears."""

import msgspec
import pytest

from shared.domain.policies import ENGINE, KINDS, ROUTING, PolicySet
from shared.domain.route import PolicySpec
from shared.policy import registry
from shared.policy.decider import PolicyFollower

BAD = PolicySpec("of tomorrow")


class Maker:
    def __init__(self) -> None:
        self.made: list[PolicySet] = []

    def __call__(self, policies: PolicySet) -> str:
        for kind in ROUTING:
            registry.make(kind, policies.spec(kind))
        self.made.append(policies)
        return policies.split.name


def following() -> tuple[PolicyFollower[str], Maker]:
    maker = Maker()
    return PolicyFollower(ROUTING, maker), maker


def test_it_begins_with_the_suites_defaults() -> None:
    found, _ = following()
    assert (found.policies, found.current, found.problem) == (PolicySet(), "adaptive", "")


@pytest.mark.parametrize(
    ("heard", "follows", "trouble"),
    [
        ([PolicySet(0, split=PolicySpec("none"))], (0, "none"), ""),  # a monitor that knows the file only
        ([PolicySet(5, split=PolicySpec("none")), PolicySet(0)], (5, "none"), ""),  # it was started again
        ([PolicySet(5, split=PolicySpec("none")), PolicySet(4)], (5, "none"), ""),
        ([PolicySet(5, split=PolicySpec("none")), PolicySet(6)], (6, "adaptive"), ""),
        ([PolicySet(5, split=PolicySpec("none")), PolicySet(6, split=BAD)], (5, "none"), "unknown split"),
        ([PolicySet(6, split=BAD), PolicySet(7, split=PolicySpec("full"))], (7, "full"), ""),
        ([PolicySet(5), PolicySet(6, split=BAD), PolicySet(5)], (5, "adaptive"), ""),
        ([PolicySet(6, prefill_order=BAD, role_flip=BAD)], (6, "adaptive"), ""),  # kinds of others
    ],
)
def test_the_newest_that_can_be_made_is_followed(
    heard: list[PolicySet], follows: tuple[int, str], trouble: str
) -> None:
    found, _ = following()
    for policies in heard:
        found.apply(policies)
    assert (found.policies.revision, found.current) == follows
    assert found.problem.startswith(trouble)
    assert bool(found.problem) == bool(trouble)


def test_policies_are_made_only_when_one_of_its_kinds_is_another() -> None:
    found, maker = following()
    for revision in range(1, 4):
        found.apply(PolicySet(revision, prefill_order=PolicySpec("sjf", {"window": revision})))
        found.apply(PolicySet(revision, prefill_order=PolicySpec("sjf", {"window": revision})))
    assert len(maker.made) == 1
    found.apply(PolicySet(9, split=BAD))
    found.apply(PolicySet(10, split=PolicySpec("none")))
    assert len(maker.made) == 2


def test_what_cannot_be_made_is_tried_once() -> None:
    tried: list[int] = []

    def make(policies: PolicySet) -> None:
        tried.append(policies.revision)
        registry.make("split", policies.split)

    found = PolicyFollower(("split",), make)
    for _ in range(3):
        found.apply(PolicySet(5, split=BAD))
    assert tried == [0, 5]


def test_kinds_have_an_owner_each() -> None:
    assert {*ROUTING, *ENGINE, "role_flip"} == set(KINDS)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(PolicySet(3)), type=PolicySet) == PolicySet(3)
