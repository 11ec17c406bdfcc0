"""What a monitor is at the moment, for its routes, its health and its metrics: it acts, or it is a standby."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.ext.asyncio import AsyncEngine

from services.cluster_monitor.adapter_book import AdapterBook
from services.cluster_monitor.broadcaster import Broadcaster
from services.cluster_monitor.events import Events
from services.cluster_monitor.lease import Lease
from services.cluster_monitor.operation_log import OperationLog
from services.cluster_monitor.operations import Operations
from services.cluster_monitor.policy_book import Followers, PolicyBook
from services.cluster_monitor.registry import Memory, Registry
from services.cluster_monitor.roles import RoleController
from services.cluster_monitor.situation import Judge
from services.cluster_monitor.slo import DemandService, SloService
from shared.errors import Standby
from shared.store.write_behind import WriteBehind


@dataclass(frozen=True, slots=True)
class State:
    """The parts of an acting monitor; built when its term begins."""

    registry: Registry
    memory: Memory
    operations: Operations
    operation_log: OperationLog
    events: Events
    slo: SloService
    demand: DemandService
    controller: RoleController
    broadcaster: Broadcaster
    policies: PolicyBook
    followers: Followers
    adapters: AdapterBook
    store: WriteBehind
    engine: AsyncEngine
    judge: Judge


class Leadership(Collector):
    """The monitor's present term, if it has one. Metrics of a term are collected during that term only."""

    def __init__(self, monitor_id: str) -> None:
        self._monitor_id = monitor_id
        self.lease: Lease | None = None
        self.state: State | None = None
        self.metrics = CollectorRegistry()

    def acting(self) -> State:
        """What the routes work on. Raises Standby, naming the monitor that acts."""
        if self.lease is not None:
            self.lease.check()
        if self.state is None:
            raise Standby(f"{self._monitor_id} is taking over: it reads what the monitor before it knew")
        return self.state

    def describe(self) -> Mapping[str, str]:
        """For `/health`."""
        if self.lease is None:
            return {}
        acts = self.lease.acting and self.state is not None
        return {"monitor": "active" if acts else "standby", "who_acts": self.lease.describe()}

    def collect(self) -> Iterator[Metric]:
        acts = self.lease is None or self.lease.acting
        yield GaugeMetricFamily(
            "polyphase_monitor_acting", "Whether this monitor acts (1) or is a standby (0)", float(acts)
        )
        if self.state is not None:
            yield from self.metrics.collect()
