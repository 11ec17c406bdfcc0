"""All scenarios, a file a family of faults. The order is that of the report."""

from lab.chaos.scenario import Scenario
from lab.chaos.scenarios.bodies import BODIES
from lab.chaos.scenarios.clients import CLIENTS
from lab.chaos.scenarios.clocks import CLOCKS
from lab.chaos.scenarios.connections import CONNECTIONS
from lab.chaos.scenarios.control_plane import CONTROL_PLANE
from lab.chaos.scenarios.database import DATABASE
from lab.chaos.scenarios.failover import FAILOVER
from lab.chaos.scenarios.frames import FRAMES
from lab.chaos.scenarios.kv import KV
from lab.chaos.scenarios.links import LINKS
from lab.chaos.scenarios.losses import LOSSES
from lab.chaos.scenarios.one_request import ONE_REQUEST
from lab.chaos.scenarios.processes import PROCESSES
from lab.chaos.scenarios.roles import ROLES
from lab.chaos.scenarios.strangers import STRANGERS
from lab.chaos.scenarios.versions import VERSIONS

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
