"""`bench plan --part live`: started plans keep what they promise, and the planner follows what changes."""

from pathlib import Path

from lab.bench.plan_follow import case_follow
from lab.bench.plan_promise import case_promise
from lab.bench.plan_thunderserve import Part


def case_live(data: Path) -> Part:
    """The promise, then the following."""
    kept, followed = case_promise(data), case_follow(data)
    notes = list(dict.fromkeys(kept[2] + followed[2]))  # that a trace is missing is told once
    return kept[0] | followed[0], kept[1] | followed[1], notes
