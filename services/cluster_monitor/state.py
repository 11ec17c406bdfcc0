"""What the monitor's routes work on."""

from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncEngine

from services.cluster_monitor.audit import Audit
from services.cluster_monitor.auto_flips import AutoFlips
from services.cluster_monitor.broadcaster import Broadcaster
from services.cluster_monitor.demand import DemandService
from services.cluster_monitor.events import Events
from services.cluster_monitor.flips import Operations
from services.cluster_monitor.followers import Followers
from services.cluster_monitor.memory import Memory
from services.cluster_monitor.policy_book import PolicyBook
from services.cluster_monitor.registry import Registry
from services.cluster_monitor.situation import Judge
from services.cluster_monitor.slo import SloService
from shared.store.write_behind import WriteBehind


@dataclass(frozen=True, slots=True)
class State:
    """All of one turn; built when it begins."""

    registry: Registry
    memory: Memory
    operations: Operations
    audit: Audit
    events: Events
    slo: SloService
    demand: DemandService
    flips: AutoFlips
    broadcaster: Broadcaster
    policies: PolicyBook
    followers: Followers
    store: WriteBehind
    engine: AsyncEngine
    judge: Judge
