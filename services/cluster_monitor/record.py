"""What the monitor knows of one instance at the moment."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shared.domain.instance import InstanceInfo, InstanceLoad, InstanceState, InstanceView, Role
from shared.wire.messages import Heartbeat
from shared.wire.rpc_client import RpcClient

UNDER_WAY_S = 0.5  # of a heartbeat, at most


@dataclass(slots=True)
class Record:
    """One registered instance. `…_mono` are readings of the loop's clock, `…_s` unix seconds."""

    info: InstanceInfo
    role: Role
    client: RpcClient
    registered_s: float
    registered_mono: float
    state: InstanceState = InstanceState.STARTING
    state_since_s: float = 0.0
    load: InstanceLoad = field(default_factory=InstanceLoad)
    told_load: InstanceLoad | None = None  # that was broadcast last, and when
    told_mono: float = 0.0
    draining: bool = False
    resumed_mono: float = -math.inf  # when it was resumed, unless it drains again
    policies_revision: int = 0  # that its engine goes by, as it said last
    policies_trouble: str = ""
    connected_once: bool = False
    heard_mono: float | None = None
    arrival: str = "registered"  # or "restarted" or "returned": how it came to be known
    operation: str = ""  # the flip, drain or resume under way
    death: str = ""
    died_mono: float = 0.0
    waiters: list[tuple[Callable[[Heartbeat], bool], asyncio.Future[None]]] = field(default_factory=list)

    @property
    def instance_id(self) -> str:
        """Short for `info.instance_id`."""
        return self.info.instance_id

    @property
    def alive(self) -> bool:
        """Not dead; perhaps silent."""
        return self.state is not InstanceState.DEAD

    def view(self) -> InstanceView:
        """As policies see it."""
        return InstanceView(self.info, self.role, self.state, self.load)

    def describe(self) -> dict[str, Any]:
        """As JSON for people and dashboards."""
        return {
            "instance_id": self.instance_id,
            "role": self.role.value,
            "state": self.state.value,
            "state_since_s": self.state_since_s,
            "registered_s": self.registered_s,
            "operation": self.operation,
            "death": self.death,
            "connected": self.client.connected,
            "info": msgspec.to_builtins(self.info),
            "load": self.load.by_name(),
        }

    def heard(self, beat: Heartbeat, now_mono: float) -> bool:
        """Take a heartbeat in and wake those who wait for one like it. Whether it has other rates, or steps."""
        info = self.info
        self.heard_mono = now_mono
        self.connected_once = self.connected_once or self.client.connected
        self.role = beat.role
        # A heartbeat comes over a socket of its own: one from before the resume may come after it.
        self.draining = beat.draining and now_mono - self.resumed_mono >= UNDER_WAY_S
        self.load = beat.load
        self.policies_revision, self.policies_trouble = beat.policies_revision, beat.policies_trouble
        if beat.rates is not None and beat.rates != self.info.rates:
            self.info = msgspec.structs.replace(self.info, rates=beat.rates)
        if beat.chunk_size not in (0, self.info.chunk_size):
            self.info = msgspec.structs.replace(self.info, chunk_size=beat.chunk_size)
        for accepts, future in tuple(self.waiters):
            if not future.done() and accepts(beat):
                future.set_result(None)
        return info is not self.info

    async def next_heartbeat(self, accepts: Callable[[Heartbeat], bool], timeout_s: float) -> None:
        """Wait for a heartbeat that `accepts` likes. Raises TimeoutError."""
        entry = (accepts, asyncio.get_running_loop().create_future())
        self.waiters.append(entry)
        try:
            async with asyncio.timeout(timeout_s):
                await entry[1]
        finally:
            self.waiters.remove(entry)
