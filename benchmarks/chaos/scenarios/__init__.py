"""All scenarios, in the order of the report. A scenario is a fault and what it may cost clients."""

from benchmarks.chaos.scenario import FAMILIES, Scenario
from benchmarks.chaos.scenarios import clients, failover, network, operations, processes

MODULES = (clients, failover, network, operations, processes)  # each adds its scenarios when imported
SCENARIOS: tuple[Scenario, ...] = tuple(scenario for family in FAMILIES.values() for scenario in family)
