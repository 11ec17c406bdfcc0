"""The monitor's broadcasts over real sockets: who comes late, loses one, or hears nonsense, knows the cluster soon."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import pytest
import zmq

from shared.domain.cluster import ClusterDelta, ClusterState
from shared.domain.instance import InstanceLoad
from shared.domain.policies import PolicySet
from shared.errors import Conflict
from shared.wire.broadcast import CHANGES, POLICIES, WHOLE, ClusterFeed, ClusterPublisher
from shared.wire.sockets import Curve, Sockets
from tests.ports import free_address
from tests.services.control_plane import until
from tests.shared.policy.views import prefill, view
from tests.shared.wire.test_sockets import keys


@dataclass
class Monitor:
    """Says how often `p` has run, and answers who asks."""

    sockets: Sockets
    address: str
    answers: bool = True
    sequence: int = 100
    asked: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.publisher = ClusterPublisher(self.sockets, self.address, self.wanted)

    def wanted(self, topic: bytes) -> None:
        self.asked.append(topic)
        if self.answers and topic == WHOLE:
            load = prefill("p", running=self.sequence)
            self.publisher.whole(ClusterDelta.from_view(view(load, sequence=self.sequence)))
        if self.answers and topic == POLICIES:
            self.publisher.policies(PolicySet(revision=4))

    def step(self) -> None:
        self.sequence += 1
        load = InstanceLoad(running=self.sequence)
        self.publisher.change(ClusterDelta(self.sequence, 0.0, loads={"p": load}))


@dataclass
class Listener:
    state: ClusterState = field(default_factory=ClusterState)
    policies: list[PolicySet] = field(default_factory=list)
    strange: list[int] = field(default_factory=list)

    @property
    def running(self) -> int:
        found = self.state.get("p")
        return found.load.running if found is not None else -1


@contextmanager
def both(curve: Curve | None = None, **options: bool) -> Iterator[tuple[Monitor, ClusterFeed, Listener]]:
    sockets, address, listener = Sockets(curve), free_address(), Listener()
    monitor = Monitor(sockets, address)
    feed = ClusterFeed(
        sockets,
        address,
        listener.state.apply,
        instance_id="me",
        on_policies=listener.policies.append,
        on_stranger=listener.strange.append,
        **options,
    )
    try:
        yield monitor, feed, listener
    finally:
        feed.close()
        monitor.publisher.close()
        sockets.close()


@pytest.mark.parametrize("keyed", [False, True])
async def test_who_comes_late_asks_once_and_hears_changes_from_then_on(keyed: bool) -> None:
    with both(keys() if keyed else None) as (monitor, feed, listener):
        await until(lambda: listener.running == 100, "all of it")
        for _ in range(20):
            monitor.step()
        await until(lambda: listener.running == 120, "the changes")
        assert monitor.asked.count(WHOLE) == 1
        assert not feed.dropped
        assert listener.policies[0].revision == 4


async def test_a_lost_change_is_made_up_for() -> None:
    with both() as (monitor, feed, listener):
        await until(lambda: listener.running == 100, "all of it")
        monitor.sequence += 1  # one that nobody heard
        for _ in range(3):
            monitor.step()
        await until(lambda: listener.running == monitor.sequence, "all of it again")
        assert feed.dropped == {"gap": 1}
        monitor.step()
        await until(lambda: listener.running == monitor.sequence, "changes go on")


async def test_an_answer_that_is_lost_is_asked_for_again() -> None:
    with both() as (monitor, _, listener):
        monitor.answers = False
        await until(lambda: WHOLE in monitor.asked, "asked")
        monitor.answers = True

        def later() -> bool:
            monitor.step()
            return listener.running > 100

        await until(later, "asked again")


async def test_flipped_bits_and_nonsense_are_dropped_and_nothing_of_it_stays() -> None:
    with both() as (monitor, feed, listener):
        await until(lambda: listener.running == 100, "all of it")
        socket = monitor.publisher._socket
        socket.send([CHANGES, b"\x93\x01\x02\x03"])  # not sealed
        monitor.publisher._send(CHANGES, {"sequence": 5})  # sealed nonsense
        monitor.publisher._send(POLICIES, [1, 2, 3])
        socket.send([CHANGES])
        socket.send([CHANGES + b"?", b"a topic that begins alike"])
        monitor.step()
        await until(lambda: listener.running == 101, "the change after it")
        assert feed.dropped == {"garbage": 3, "frame": 2}


async def test_an_instance_hears_what_is_said_to_it_and_follows_only_while_it_wants_to() -> None:
    with both(following=False) as (monitor, feed, listener):
        await until(lambda: listener.policies, "policies")
        monitor.publisher.stranger("other", 1)
        monitor.publisher.stranger("me", 2)
        monitor.step()
        await until(lambda: listener.strange == [2], "the word to us")
        assert not listener.state.known
        assert feed.received_bytes == 0
        feed.follow(True)
        await until(lambda: listener.running == monitor.sequence, "all of it")
        feed.follow(False)
        heard = listener.running

        def silent() -> bool:
            monitor.step()
            monitor.publisher.stranger("me", monitor.sequence)
            return len(listener.strange) > 20

        await until(silent, "words to us")
        await until(lambda: listener.strange[-1] == monitor.sequence, "the last word")
        assert listener.running < monitor.sequence - 10
        assert listener.running - heard < 10


async def test_another_monitor_at_the_same_address_is_followed() -> None:
    with both() as (first, _, listener), ExitStack() as stack:
        await until(lambda: listener.running == 100, "all of it")
        first.publisher.close()
        sockets = Sockets()
        stack.callback(sockets.close)

        def bound() -> Monitor | None:
            with suppress(zmq.ZMQError):  # the former one has not let go of it yet
                return Monitor(sockets, first.address, sequence=7)
            return None

        second = await until(bound, "bound")
        stack.callback(second.publisher.close)

        def later() -> bool:
            second.step()
            return 7 < listener.running < 100

        await until(later, "the other's state")


@contextmanager
def two_monitors(
    fence: Callable[[int], None] = lambda _: None,
) -> Iterator[tuple[Monitor, Monitor, ClusterFeed, Listener, list[int]]]:
    """A feed that follows both; each speaks when it is told to."""
    sockets, listener, epochs = Sockets(), Listener(), list[int]()

    def obey(epoch: int) -> None:
        fence(epoch)
        epochs.append(epoch)

    first, second = Monitor(sockets, free_address()), Monitor(sockets, free_address(), answers=False)
    first.publisher.epoch = 5
    feed = ClusterFeed(
        sockets,
        f"{first.address},{second.address}",
        listener.state.apply,
        on_policies=listener.policies.append,
        on_epoch=obey,
    )
    try:
        yield first, second, feed, listener, epochs
    finally:
        feed.close()
        first.publisher.close()
        second.publisher.close()
        sockets.close()


async def test_of_two_monitors_the_later_one_is_believed_and_the_older_one_no_more() -> None:
    with two_monitors() as (first, second, feed, listener, epochs):
        await until(lambda: listener.running == 100, "all of it, from the first")
        second.answers, second.publisher.epoch, second.sequence = True, 6, 100
        second.step()  # its number is just the next one, by chance; what is before it is another cluster's
        assert second.sequence == first.sequence + 1
        await until(lambda: second.asked.count(WHOLE) >= 2, "the newcomer is asked for all of it")
        second.step()
        await until(lambda: listener.running == 102, "changes of the second")
        for _ in range(3):
            first.step()
        first.publisher.policies(PolicySet(revision=9))  # it was frozen, and does not know yet
        await until(lambda: feed.dropped["old monitor"] >= 4, "what the first says is dropped")
        second.step()
        await until(lambda: listener.running == 103, "the second goes on")
        assert epochs == [5, 6]
        assert all(policies.revision != 9 for policies in listener.policies)


async def test_a_monitor_that_is_refused_by_its_epoch_is_not_listened_to() -> None:
    """The instance was called by the second, and only then hears the first, which has lost its turn."""

    def fence(epoch: int) -> None:
        if epoch < 6:
            raise Conflict("another monitor has taken over")

    with two_monitors(fence) as (first, second, feed, listener, epochs):
        await until(lambda: feed.dropped["old monitor"] >= 2, "what the first answers is dropped")
        first.step()
        first.publisher.policies(PolicySet(revision=9))
        await until(lambda: feed.dropped["old monitor"] >= 4, "what the first says is dropped")
        assert (listener.running, listener.policies, epochs) == (-1, [], [])
        second.answers, second.publisher.epoch = True, 6

        def later() -> bool:
            second.step()
            return listener.running > 100

        await until(later, "the second")
        assert epochs == [6]


async def test_a_monitor_that_is_alone_is_always_believed() -> None:
    """After `monitors: 2` became 1, and a monitor without an epoch speaks."""
    with two_monitors() as (_, second, feed, listener, epochs):
        await until(lambda: listener.running == 100, "all of it, from the first")
        second.answers, second.publisher.epoch, second.sequence = True, 0, 500
        second.step()

        def later() -> bool:
            second.step()
            return listener.running > 501

        await until(later, "the one that is alone")
        assert epochs[-1] == 0
        assert not feed.dropped["old monitor"]
        assert [feed._follows(epoch) for epoch in (5, 0, 4, 5)] == [True, True, False, True]  # it fences off as before
