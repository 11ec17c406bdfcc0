"""Requests of several SLO classes and callers in one workload."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shared.domain.job import Slo
from shared.errors import InvalidRequest
from shared.sim.workload import Lengths, Mix, Workload


def of_class(workload: Workload, slo: Slo, caller: str = "") -> Workload:
    """The same requests, all of one class and one caller."""
    rows = np.zeros(len(workload), dtype=np.int64)
    return replace(workload, mix=Mix((slo,), rows, (caller,), rows))


def together(workloads: Sequence[Workload]) -> Workload:
    """All requests of several workloads, each with its mix, in order of arrival; their prefixes are left out.

    Raises InvalidRequest where there is no mix.
    """
    mixes = [one.mix for one in workloads]
    classes: list[Slo] = []
    callers: list[str] = []
    class_of, caller_of = [], []
    for one, mix in zip(workloads, mixes, strict=True):
        if mix is None:
            raise InvalidRequest(f"{one.name}: requests without a class cannot be mixed with others")
        class_of.append(mix.class_of + len(classes))
        caller_of.append(mix.caller_of + len(callers))
        classes += mix.classes
        callers += mix.callers
    order = np.argsort(np.concatenate([one.arrival_s for one in workloads]), kind="stable")

    def joined(parts: Sequence[Lengths]) -> Lengths:
        found: Lengths = np.concatenate(parts)[order]
        return found

    return Workload(
        " + ".join(one.name for one in workloads),
        np.concatenate([one.arrival_s for one in workloads])[order],
        joined([one.prompt_tokens for one in workloads]),
        joined([one.output_tokens for one in workloads]),
        mix=Mix(tuple(classes), joined(class_of), tuple(callers), joined(caller_of)),
    )
