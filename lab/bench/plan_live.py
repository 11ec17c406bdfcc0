"""`bench plan --part live`: plans that are started. They keep what they promise."""

from pathlib import Path

from lab.bench.plan_promise import case_promise
from lab.bench.plan_thunderserve import Part


def case_live(data: Path) -> Part:
    """The promise."""
    return case_promise(data)
