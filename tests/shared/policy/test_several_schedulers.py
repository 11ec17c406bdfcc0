"""What several schedulers know of each other's placements: at the latest after `BOUND_S`, from loads off the wire."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.monitor_link import HEARTBEAT_S
from shared.domain.cluster import ClusterDelta
from shared.domain.instance import InstanceLoad, InstanceView, Promised, Role
from shared.domain.job import JobView
from shared.domain.policies import PolicySet
from shared.domain.rates import Rates, StepForm, StepRates
from shared.domain.route import PolicySpec, Route
from shared.errors import Delayed
from shared.policy.assignment import assignments, mark_of, promise_of
from shared.policy.decider import Decider
from shared.policy.decode_admission import ahead_of
from tests.shared.policy.views import decode, instance, job, view

BROADCAST_S = 0.1  # `broadcast_period_s` of the monitor
HOP_S = 0.002  # of any message
BOUND_S = HEARTBEAT_S + BROADCAST_S + 4 * HOP_S  # the route, the announcement, the heartbeat, the broadcast
FORM = StepForm(0.05, 0.0, 0.0, 0.0)
RATES = Rates(step=StepRates(FORM, FORM, FORM))
PROMPT, ANSWER = 6, 500  # of a stream; it takes 512 tokens of KV


@dataclass
class Instance:
    """A decode instance as far as its load goes. The jobs on their way to it, and those that decode, which do not end
    meanwhile.
    """

    shape: InstanceView
    promised: dict[str, Promised] = field(default_factory=dict)
    active: list[str] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Streams that it has room for."""
        info = self.shape.info
        return info.total_blocks * info.block_size // 512

    def load(self, now: float) -> InstanceLoad:
        info, jobs = self.shape.info, len(self.active)
        return InstanceLoad(
            time_s=now,
            decoding=jobs,
            context_tokens=PROMPT * jobs,
            free_blocks=info.total_blocks - jobs,
            inflight=jobs,
            kv_ahead=ahead_of([(PROMPT, ANSWER)] * jobs, info.block_size),
            accepted=tuple(mark_of(name) for name in self.active),
            promised=tuple(self.promised.values()),
        )


class Suite:
    """Schedulers, a monitor and decode instances on one simulated clock; messages take `HOP_S` and go through msgpack.

    `computes_s`: the prefill instance has a prompt computed, and the job comes to its decode instance, so long after it
    was placed.
    """

    def __init__(self, *sizes: int, schedulers: int = 2, computes_s: float = 1.0, phase: float = 0.0) -> None:
        self.now, self.computes_s = 1000.0, computes_s
        self.instances = {
            f"d{at}": Instance(decode(f"d{at}", total_blocks=size // 16, rates=RATES)) for at, size in enumerate(sizes)
        }
        self.prefill = instance("p0", Role.PREFILL, rates=RATES, total_blocks=8192 // 16)
        self.schedulers = [Decider(seed) for seed in range(schedulers)]
        self.placed: list[tuple[float, int, str]] = []  # when, by which scheduler, to which instance
        self._events: list[tuple[float, int, object]] = []
        self._number = count()
        self._told: dict[str, InstanceLoad] = {}
        self._sequence = 1
        shapes = [self.prefill, *(one.shape for one in self.instances.values())]
        policies = PolicySet(split=PolicySpec("full"), step_budget=PolicySpec("off"))  # every job comes later
        whole = msgspec.structs.replace(ClusterDelta.of(view(*shapes)), policies=policies)
        for each in self.schedulers:
            assert each.hear(_wired(whole), self.now)
        self._every(phase * HEARTBEAT_S, HEARTBEAT_S, self._beat)
        self._every(0.0, BROADCAST_S, self._broadcast)

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now, _, act = heappop(self._events)
            act()  # type: ignore[operator]
        self.now = until_s

    def place(self, scheduler: int, job_id: str) -> Route:
        one = job(PROMPT, ANSWER, job_id, can_wait=True)
        route = self.schedulers[scheduler].decide(one, (), self.now)
        assert route.decode is not None
        self.placed.append((self.now, scheduler, route.decode.instance_id))
        self._later(2 * HOP_S, lambda: self._announced(one, route))
        return route

    def _announced(self, one: JobView, route: Route) -> None:
        assert route.decode is not None
        there = self.instances[route.decode.instance_id]
        (bound,) = [each for each in assignments(one, route, self.now) if each.decode_tokens]
        if bound.coming:
            there.promised[one.job_id] = msgspec.msgpack.decode(
                msgspec.msgpack.encode(promise_of(bound)), type=Promised
            )
            self._later(self.computes_s, lambda: self._came(one.job_id, there))
        else:
            self._came(one.job_id, there)

    def _came(self, job_id: str, there: Instance) -> None:
        there.promised.pop(job_id, None)
        there.active.append(job_id)

    def _beat(self) -> None:
        for name, one in self.instances.items():
            load = one.load(self.now)
            self._later(HOP_S, lambda name=name, load=load: self._told.__setitem__(name, load))  # type: ignore[misc]

    def _broadcast(self) -> None:
        self._sequence += 1
        delta = ClusterDelta(self._sequence, self.now, loads=dict(self._told))
        self._told.clear()
        for each in self.schedulers:
            self._later(HOP_S, lambda each=each: each.hear(_wired(delta), self.now))  # type: ignore[misc]

    def _every(self, first_s: float, period_s: float, act: object) -> None:
        def again() -> None:
            act()  # type: ignore[operator]
            self._later(period_s, again)

        self._later(first_s, again)

    def _later(self, seconds: float, act: object) -> None:
        heappush(self._events, (self.now + seconds, next(self._number), act))


def _wired(delta: ClusterDelta) -> ClusterDelta:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(delta), type=ClusterDelta)


def _counted(suite: Suite, scheduler: int) -> dict[str, tuple[int, int]]:
    """By instance: decodes that a scheduler counts there, and the most KV that it expects."""
    index = suite.schedulers[scheduler]._live.current
    return {one.instance_id: (one.load.decoding, max(one.load.kv_ahead, default=0)) for one in index.decode.views}


@given(st.floats(0.0, 1.0), st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(0, 2)), min_size=1, max_size=12))
def test_each_counts_what_the_others_placed_within_the_bound(phase: float, steps: list[tuple[float, int]]) -> None:
    """Also while the prompt is computed, and when it has come: no job is forgotten or counted twice on the way."""
    suite = Suite(8192, 8192, schedulers=3, phase=phase)
    for number, (pause_s, scheduler) in enumerate(steps):
        suite.run(suite.now + pause_s)
        suite.place(scheduler, f"j{number}")
        for other in range(3):
            for name, (decoding, ahead) in _counted(suite, other).items():
                own = [one for one in suite.placed if one[2] == name and one[1] == other]
                old = [one for one in suite.placed if one[2] == name and one[0] <= suite.now - BOUND_S]
                everyone = [one for one in suite.placed if one[2] == name]
                assert len({*own, *old}) <= decoding <= len(everyone)
                assert ahead == 512 * decoding
    for _ in range(20):
        suite.run(suite.now + 0.1)
        if suite.now - suite.placed[-1][0] > BOUND_S:
            assert _counted(suite, 0) == _counted(suite, 1) == _counted(suite, 2)
            assert sum(decoding for decoding, _ in _counted(suite, 0).values()) == len(steps)


def _overfull(suite: Suite) -> Iterator[tuple[str, int]]:
    for name, one in suite.instances.items():
        yield name, max(0, len(one.active) + len(one.promised) - one.room)


@pytest.mark.parametrize("sizes", [(8192, 8192), (11_264, 5632)])
@pytest.mark.parametrize("phase", [0.0, 0.3, 0.9])
def test_streams_that_come_slower_than_the_bound_overfill_no_instance(sizes: tuple[int, int], phase: float) -> None:
    """Their prompts wait for two seconds at the prefill instance: no decode instance holds any of them meanwhile."""
    suite = Suite(*sizes, computes_s=2.0, phase=phase)
    fits = sum(one.room for one in suite.instances.values())
    for number in range(fits):
        suite.place(number % 2, f"j{number}")
        suite.run(suite.now + BOUND_S + 0.001)
    suite.run(suite.now + 3.0)
    assert dict(_overfull(suite)) == {"d0": 0, "d1": 0}
    with pytest.raises(Delayed):
        suite.place(0, "one too many")


@pytest.mark.parametrize("gap_s", [0.0, 0.004, 0.02, 0.05])
@pytest.mark.parametrize("sizes", [(8192, 8192), (11_264, 5632)])
def test_a_burst_overfills_by_what_the_others_placed_within_the_bound_at_most(
    gap_s: float, sizes: tuple[int, int]
) -> None:
    suite, rng = Suite(*sizes), Random(3)
    fits = sum(one.room for one in suite.instances.values())
    for number in range(fits):
        try:
            suite.place(number % 2, f"j{number}")
        except Delayed:
            continue  # it waits in its gateway; what matters here is what was placed
        suite.run(suite.now + rng.uniform(0.0, 2.0 * gap_s))
    suite.run(suite.now + 2.0)
    for name, over in _overfull(suite):
        there = [(when, by) for when, by, where in suite.placed if where == name]
        unknown = [sum(by != its and when - BOUND_S < then <= when for then, its in there) for when, by in there]
        assert over <= max(unknown, default=0)
        assert over <= 1, "each spreads what it places, so that little is placed twice"
