"""All scenarios, in the order of the report: those of `bench chaos`, and those of `bench troubles`."""

from benchmarks.chaos.scenario import FAMILIES, VERDICTS, Scenario
from benchmarks.chaos.scenarios import clients, failover, network, operations, processes, requests, verdicts

MODULES = (clients, failover, network, operations, processes, requests, verdicts)  # each adds scenarios when imported
TROUBLES: tuple[Scenario, ...] = tuple(FAMILIES[VERDICTS])
SCENARIOS: tuple[Scenario, ...] = tuple(s for family in FAMILIES.values() for s in family if s not in TROUBLES)
