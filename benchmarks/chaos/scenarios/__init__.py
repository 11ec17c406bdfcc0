"""All scenarios, in the order of the report. A scenario is a fault and what it may cost clients."""

from benchmarks.chaos.scenario import FAMILIES, Scenario
from benchmarks.chaos.scenarios import clients, failover, kv, network, operations, processes, requests

MODULES = (clients, failover, kv, network, operations, processes, requests)  # each adds its scenarios when imported
SCENARIOS: tuple[Scenario, ...] = tuple(scenario for family in FAMILIES.values() for scenario in family)
