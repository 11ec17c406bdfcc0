"""All scenarios by family, in the order of the report."""

from benchmarks.chaos.scenario import Scenario
from benchmarks.chaos.scenarios.clients import BODIES, CLIENTS, CONNECTIONS
from benchmarks.chaos.scenarios.database import DATABASE
from benchmarks.chaos.scenarios.failover import FAILOVER
from benchmarks.chaos.scenarios.kv import KV
from benchmarks.chaos.scenarios.network import FRAMES, LINKS, STRANGERS
from benchmarks.chaos.scenarios.operations import ROLES, VERSIONS
from benchmarks.chaos.scenarios.processes import CLOCKS, CONTROL_PLANE, PROCESSES
from benchmarks.chaos.scenarios.requests import LOSSES, ONE_REQUEST

FAMILIES: dict[str, tuple[Scenario, ...]] = {
    "processes": PROCESSES,
    "roles": ROLES,
    "links": LINKS,
    "frames": FRAMES,
    "clients": CLIENTS,
    "bodies": BODIES,
    "connections": CONNECTIONS,
    "database": DATABASE,
    "control plane": CONTROL_PLANE,
    "failover": FAILOVER,
    "losses": LOSSES,
    "clocks": CLOCKS,
    "versions": VERSIONS,
    "strangers": STRANGERS,
    "KV": KV,
    "one request": ONE_REQUEST,
}
SCENARIOS: tuple[Scenario, ...] = tuple(scenario for family in FAMILIES.values() for scenario in family)
