"""`polyphase bench predictor`: how good, how quick, what it costs to ask, and what a prediction is worth."""

from collections.abc import Callable, Sequence
from typing import Any

from lab.bench.predictor_bayes import run_bayes
from lab.bench.predictor_full_size import run_full_size
from lab.bench.predictor_latency import run_latency
from lab.bench.predictor_modes import run_modes
from lab.bench.predictor_worth import run_worth
from shared.errors import InvalidRequest

PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "bayes": run_bayes,
    "latency": run_latency,
    "full_size": run_full_size,
    "modes": run_modes,
    "worth": run_worth,
}


def run_predictor_bench(parts: Sequence[str] = ()) -> dict[str, Any]:
    """The parts that are named, or all. Raises InvalidRequest for one that is unknown."""
    if unknown := set(parts) - set(PARTS):
        raise InvalidRequest(f"unknown part {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    whole: dict[str, Any] = {"figures": {}, "aims": {}, "notes": []}
    for name in parts or PARTS:
        found = PARTS[name]()
        whole["figures"] |= found["figures"]
        whole["aims"] |= found["aims"]
        whole["notes"] += found.get("notes", [])
    return whole
