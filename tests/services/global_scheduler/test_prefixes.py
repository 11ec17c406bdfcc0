"""From a worker's account into a scheduler's index over real sockets: lost messages, restarts, several schedulers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest
import zmq

from services.global_scheduler import prefixes
from services.global_scheduler.prefixes import PrefixWatch
from shared.domain.instance import ClusterView, InstanceInfo, InstanceView, Role
from shared.domain.job import JobView
from shared.domain.prompt import BLOCK_TOKENS, PrefixDelta, block_hashes
from shared.domain.route import PolicySpec
from shared.policy.prefix_index import PrefixIndex
from shared.wire.messages import PREFIXES, PrefixesRequest
from shared.wire.rpc_client import RpcClients
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Curve, Sockets
from tests.ports import free_address
from tests.services.control_plane import until
from tests.services.fake_worker import make_info
from tests.services.global_scheduler.conftest import Start

PREFIX = block_hashes(range(10 * BLOCK_TOKENS))


class Sink:
    """An index as a scheduler's decisions have it."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def apply_prefixes(self, instance_id: str, delta: PrefixDelta) -> bool:
        return self._index.apply(instance_id, delta)

    def forget_prefixes(self, instance_id: str) -> None:
        self._index.forget(instance_id)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "RETRY_S", 0.05)


class Teller:
    """A worker's side, by hand: what it says, and what of it is lost."""

    def __init__(self, info: InstanceInfo) -> None:
        self.info = info
        self.blocks = 0
        self.calls: list[tuple[ServerCall, list[int]]] = []
        self.asked = 0

    async def prefixes(self, _: PrefixesRequest, call: ServerCall) -> None:
        self.asked += 1
        mine = (call, [0])
        self._say(mine, PrefixDelta(self.info.generation, 0, list(PREFIX[: self.blocks]), starts=True))
        self.calls.append(mine)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.calls.remove(mine)

    def hold(self, blocks: int, *, lost: bool = False) -> None:
        added, removed = list(PREFIX[self.blocks : blocks]), list(PREFIX[blocks : self.blocks])
        self.blocks = blocks
        for mine in self.calls:
            mine[1][0] += 1
            if not lost:
                self._say(mine, PrefixDelta(self.info.generation, mine[1][0], added, removed))

    def _say(self, mine: tuple[ServerCall, list[int]], delta: PrefixDelta) -> None:
        mine[0].send(delta)


@asynccontextmanager
async def telling(info: InstanceInfo, curve: Curve | None = None) -> AsyncIterator[Teller]:
    """Leaving the block is its sudden death."""
    sockets, teller = Sockets(curve), Teller(info)
    try:
        async with asyncio.timeout(5):
            while True:
                try:
                    server = await RpcServer(sockets, info.rpc, {PREFIXES: teller.prefixes}).__aenter__()
                    break
                except zmq.ZMQError:  # libzmq frees the address of a closed socket a little later
                    await asyncio.sleep(0.02)
        try:
            yield teller
        finally:
            await server.__aexit__(None, None, None)
    finally:
        sockets.close()


@asynccontextmanager
async def watching(curve: Curve | None = None) -> AsyncIterator[tuple[PrefixWatch, PrefixIndex]]:
    sockets, index = Sockets(curve), PrefixIndex()
    try:
        with RpcClients(sockets) as clients:
            watch = PrefixWatch(clients, cast(Any, Sink(index)))
            try:
                yield watch, index
            finally:
                await watch.close()
    finally:
        sockets.close()


def view(*infos: InstanceInfo) -> ClusterView:
    return ClusterView(1, 0.0, tuple(InstanceView(info, Role.PREFILL, cast(Any, "ready")) for info in infos))


def held(index: PrefixIndex, info: InstanceInfo) -> int:
    return index.held_tokens(info.instance_id, PREFIX) // BLOCK_TOKENS


def knows(index: PrefixIndex, info: InstanceInfo, blocks: int) -> Callable[[], bool]:
    return lambda: held(index, info) == blocks and info.instance_id in index.known


def new_keys() -> Curve:
    public, secret = zmq.curve_keypair()
    return Curve(public.decode(), secret.decode())


async def test_two_schedulers_follow_over_encrypted_sockets_and_one_comes_late() -> None:
    curve, info = new_keys(), make_info("p0", free_address())
    async with telling(info, curve) as teller, watching(curve) as (early, one), watching(curve) as (late, other):
        teller.hold(3)
        early.update(view(info), wanted=True)
        await until(knows(one, info, 3), "the whole")
        teller.hold(5)
        await until(knows(one, info, 5), "more")
        late.update(view(info), wanted=True)
        await until(knows(other, info, 5), "the whole, later")
        teller.hold(2)
        await until(lambda: held(one, info) == held(other, info) == 2, "less")
        assert teller.asked == 2


async def test_after_a_lost_message_it_knows_nothing_wrong_and_asks_anew() -> None:
    info = make_info("p0", free_address())
    async with telling(info) as teller, watching() as (watch, index):
        teller.hold(8)
        watch.update(view(info), wanted=True)
        await until(knows(index, info, 8), "the whole")
        teller.hold(1, lost=True)  # seven removals that nobody hears of
        assert held(index, info) == 8  # until something tells of the loss, as with any news that is late
        teller.hold(2)
        seen = set()
        await until(lambda: seen.add(held(index, info)) or teller.asked == 2, "it asks again")
        await until(knows(index, info, 2), "the whole again")
        assert seen <= {8, 0, 2}


async def test_a_worker_that_dies_and_comes_back_is_another_one() -> None:
    address = free_address()
    old, new = make_info("p0", address), make_info("p0", address, generation=2)
    async with watching() as (watch, index):
        async with telling(old) as teller:
            teller.hold(6)
            watch.update(view(old), wanted=True)
            await until(knows(index, old, 6), "the whole")
        await until(lambda: not index.known, "nothing is known of the dead")
        async with telling(new) as teller:
            teller.hold(4)
            await until(lambda: teller.asked >= 2, "the old one's scheduler asks")
            assert not index.known  # by its broadcast it is still the old one that it asks
            watch.update(view(new), wanted=True)
            await until(knows(index, new, 4), "the new one")
            watch.update(view(), wanted=True)
            assert not index.known
            assert watch.calls == 0
            await until(lambda: not teller.calls, "the call is given up")


async def test_nobody_is_asked_while_no_policy_wants_to_know() -> None:
    info = make_info("p0", free_address())
    async with telling(info) as teller, watching() as (watch, index):
        teller.hold(1)
        watch.update(view(info), wanted=False)
        assert watch.calls == 0
        watch.update(view(info), wanted=True)
        await until(knows(index, info, 1), "the whole")
        watch.update(view(info), wanted=False)
        assert not index.known
        await until(lambda: not teller.calls, "the call is given up")


async def test_one_that_does_not_tell_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As any worker that knows no such method, or that is not there."""
    info = make_info("p0", free_address())
    sockets = Sockets()
    try:
        async with RpcServer(sockets, info.rpc, {}) as server, watching() as (watch, index):
            watch.update(view(info), wanted=True)
            await until(lambda: server.dropped["request"] >= 2, "it asks again")
            assert not index.known
            assert watch.calls == 1
    finally:
        sockets.close()


async def test_placement_uses_it_and_routes_say_so(start: Start) -> None:
    scheduler = await start(placement="adaptive")
    infos = {name: make_info(name, free_address()) for name in ("p0", "p1", "p2")}
    decode = InstanceView(make_info("d0", free_address()), Role.DECODE, cast(Any, "ready"))
    job = JobView("j", 700, 50, prefix=PREFIX)
    async with telling(infos["p0"]), telling(infos["p1"]), telling(infos["p2"]) as teller:
        teller.hold(10)
        placer = scheduler.state.placer

        def told() -> bool:
            instances = (*view(*infos.values()).instances, decode)
            scheduler.publisher.publish(ClusterView(2, 0.0, instances, scheduler.policies))
            return held(placer.decider.prefixes, infos["p2"]) == 10

        await until(told, "the scheduler knows")
        route = await scheduler.client.place(job, timeout_s=5)
        assert route.prefill is not None
        assert (route.prefill.instance_id, route.wants_prefix) == ("p2", True)
        other = await scheduler.client.place(msgspec.structs.replace(job, job_id="k", prefix=()), timeout_s=5)
        assert other.prefill is not None
        assert other.prefill.instance_id != "p2"
        scheduler.instances = (*view(*infos.values()).instances, decode)
        await scheduler.follow(placement=PolicySpec("least_load"))
        route = await scheduler.client.place(msgspec.structs.replace(job, job_id="l"), timeout_s=5)
        assert not route.wants_prefix

        def untold() -> bool:
            scheduler.publisher.publish(ClusterView(3, 0.0, view(*infos.values()).instances, scheduler.policies))
            return not placer.decider.prefixes.known and not teller.calls

        await until(untold, "nobody wants to know any more")
