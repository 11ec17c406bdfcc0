"""All scenarios, in the order of the report: those of `bench chaos`, and those of `bench troubles`."""

from benchmarks.chaos.scenario import FAMILIES, VERDICTS, Scenario
from benchmarks.chaos.scenarios import (
    clients,
    database,
    failover,
    kv,
    mobility,
    network,
    operations,
    processes,
    requests,
    verdicts,
)

# Each module adds its scenarios when it is imported.
MODULES = (clients, database, failover, kv, mobility, network, operations, processes, requests, verdicts)
TROUBLES: tuple[Scenario, ...] = tuple(FAMILIES[VERDICTS])
SCENARIOS: tuple[Scenario, ...] = tuple(s for family in FAMILIES.values() for s in family if s not in TROUBLES)
