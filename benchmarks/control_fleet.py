"""A process of many instances that compute nothing: each with a heartbeat and a broadcast connection of its own, as a
worker has them, and an RPC address of its own among those of the loopback network.

Commands come as lines on standard input: `busy` has every load change each 100 ms, `idle` none; the end of it ends it.
"""

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import msgspec
import uvloop

from shared.domain.instance import Compatibility, InstanceInfo, InstanceLoad, KvGeometry, Role
from shared.domain.rates import LinkRate, PartialPrefillCost, Rates, StepForm, StepRates
from shared.errors import PolyphaseError
from shared.runtime.wire_version import WIRE_VERSION
from shared.wire.broadcast import ClusterFeed, Publisher
from shared.wire.clients.monitor import MonitorClient
from shared.wire.messages import PREFIXES, Heartbeat, PrefixesRequest
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Sockets

BEAT_S, SAME_S, SLICES = 0.1, 0.3, 20
AT_ONCE = 16  # registrations
RATES = tuple(
    Rates(
        PartialPrefillCost(1e-4 * factor, 0.01),
        step=StepRates(*(StepForm(0.01 * factor, 1e-4 * factor, 1e-8 * factor, 1e-4 * factor, 1e-9 * factor),) * 3),
        link=LinkRate(1e9),
    )
    for factor in (1.0, 1.6, 2.7, 4.0)
)


def make_info(name: str, rpc: str = "") -> InstanceInfo:
    """An instance that computes nothing."""
    return InstanceInfo(
        instance_id=name,
        generation=1,
        model="m",
        compatibility=Compatibility("bench", "emulated", "1", WIRE_VERSION, KvGeometry(32, 8, 128)),
        accelerator="emulated",
        dtype="bfloat16",
        tensor_parallel=1,
        block_size=16,
        total_blocks=10_000,
        max_model_len=8192,
        chunk_size=512,
        rpc=rpc,
        http="http://127.0.0.1:1",
        kv_endpoints=("tcp://127.0.0.1:1",),
        max_seqs=256,
    )


class FleetOptions(msgspec.Struct, frozen=True):
    """instances: half of them prefill. Each listens for RPC at `rpc_port` of another loopback address."""

    instances: int
    rpc_port: int
    heartbeats: str
    broadcasts: str
    monitor_url: str


@dataclass(slots=True)
class _Instance:
    info: InstanceInfo
    role: Role
    publisher: Publisher
    feed: ClusterFeed | None = None
    known: bool = False
    beats: int = 0
    told_mono: float = 0.0
    load: InstanceLoad = field(default_factory=InstanceLoad)

    def beat(self, busy: bool, now_mono: float) -> None:
        """Publish the load, which changes while the fleet is busy."""
        if not busy and now_mono - self.told_mono < SAME_S:
            return
        self.told_mono = now_mono
        self.beats += busy
        n = self.beats
        decodes = self.role is Role.DECODE
        self.load = InstanceLoad(
            time_s=time.time(),
            queued_prefill=0 if decodes else n % 5,
            queued_prefill_tokens=0 if decodes else n * 397 % 9000,
            running=n % 60,
            decoding=n * 7 % 60 if decodes else 0,
            context_tokens=n * 1009 % 60_000 if decodes else 0,
            free_blocks=9_000 - n * 31 % 8_000,
            inflight=n % 60,
        )
        self.publisher.publish(Heartbeat(self.info.instance_id, self.info.generation, self.role, False, self.load))

    def stranger(self, generation: int) -> None:
        self.known = self.known and generation != self.info.generation


async def run_fleet(options: FleetOptions) -> None:
    sockets, busy = Sockets(), [False]
    async with AsyncExitStack() as stack:
        monitor = await stack.enter_async_context(MonitorClient(options.monitor_url))
        fleet = []
        for number in range(options.instances):
            fleet.append(one := _instance(number, options, sockets))
            await stack.enter_async_context(RpcServer(sockets, one.info.rpc, HANDLERS))
            await asyncio.sleep(0)
        tasks = [asyncio.create_task(_beat(fleet, busy)), asyncio.create_task(_register(fleet, monitor))]
        try:
            await _obey(busy)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _instance(number: int, options: FleetOptions, sockets: Sockets) -> _Instance:
    role = Role.DECODE if number % 2 else Role.PREFILL
    info = msgspec.structs.replace(
        make_info(f"{role.value}-{number}", f"tcp://127.1.{number // 250}.{number % 250 + 1}:{options.rpc_port}"),
        generation=time.time_ns(),
        rates=RATES[number // 2 % len(RATES)],
    )
    one = _Instance(info, role, Publisher(sockets, options.heartbeats))
    one.feed = ClusterFeed(
        sockets,
        options.broadcasts,
        lambda delta: True,
        following=False,
        instance_id=info.instance_id,
        on_policies=lambda policies: None,
        on_stranger=one.stranger,
    )
    return one


async def _beat(fleet: list[_Instance], busy: list[bool]) -> None:
    """Spread over the period, as the beats of a real cluster are."""
    due, turn = time.monotonic(), 0
    while True:
        now = time.monotonic()
        for one in fleet[turn % SLICES :: SLICES]:
            one.beat(busy[0], now)
        turn, due = turn + 1, max(due + BEAT_S / SLICES, now)
        await asyncio.sleep(max(0.0, due - time.monotonic()))


async def _register(fleet: list[_Instance], monitor: MonitorClient) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(instance: _Instance) -> None:
        async with gate:
            try:
                await monitor.register(instance.info, instance.role)
                instance.known = True
            except PolyphaseError:
                return  # the next round tries again

    while True:
        await asyncio.gather(*(one(instance) for instance in fleet if not instance.known))
        await asyncio.sleep(BEAT_S)


async def _obey(busy: list[bool]) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        busy[0] = line.strip() == b"busy"


async def _prefixes(_: PrefixesRequest, call: ServerCall) -> None:
    await asyncio.Event().wait()  # it holds no prefixes and never answers


HANDLERS = {PREFIXES: _prefixes}


if __name__ == "__main__":
    uvloop.run(run_fleet(msgspec.json.decode(sys.argv[1], type=FleetOptions)))
