"""What the gateway counts of each SLO class, read from its metrics."""

from collections import defaultdict

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from shared.errors import Busy, Overloaded

_WAITING, _DELAYED, _REFUSED = "polyphase_gateway_delayed_jobs", "polyphase_delayed_total", "polyphase_refused_total"
_FOR_LOAD = (Busy.code, Overloaded.code)


class ClassLoad(msgspec.Struct, frozen=True):
    """One SLO class at the gateway: jobs that wait there now for heavier classes, and since its processes started those
    that had to and those that were refused for load.
    """

    slo: str
    waiting: int = 0
    delayed: int = 0
    refused: int = 0


def class_loads(*metrics: str) -> list[ClassLoad]:
    """Of the texts of `GET /metrics` of every process, by name; only classes of which something was counted."""
    told = (line for text in metrics for line in text.splitlines())
    lines = (line for line in told if line.startswith((_WAITING, _DELAYED, _REFUSED)))
    counts: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys((_WAITING, _DELAYED, _REFUSED), 0))
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if sample.name != _REFUSED or sample.labels["cause"] in _FOR_LOAD:
                counts[sample.labels["slo"]][sample.name] += int(sample.value)
    return [ClassLoad(slo, *counts[slo].values()) for slo in sorted(counts)]
