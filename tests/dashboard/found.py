"""A store of requests that can be searched as a scheduler's can."""

from collections.abc import Sequence
from typing import Any

from shared.domain.job import Phase

ORDERS = {
    "newest": "arrived_s",
    "slowest_ttft": "ttft_s",
    "slowest_tpot": "tpot_s",
    "longest_gap": "longest_gap_s",
    "longest": "output_tokens",
}


def search(jobs: Sequence[dict[str, Any]], asked: dict[str, str]) -> dict[str, Any]:
    """The rows that fit, in the order that was asked for."""
    rows = [job for job in jobs if _fits(job, asked)]
    column = ORDERS[asked.get("order", "newest")]
    rows.sort(key=lambda job: job.get(column) or 0.0, reverse=True)
    first, limit = int(asked.get("offset", 0)), int(asked["limit"])
    return {"rows": rows[first : first + limit], "more": len(rows) > first + limit}


def _fits(job: dict[str, Any], asked: dict[str, str]) -> bool:
    wanted = {"slo": "slo", "outcome": "outcome", "phase": "phase", "caller": "caller", "job": "job_id"}
    if any(asked[name] != job.get(field, "") for name, field in wanted.items() if name in asked):
        return False
    places = (job["prefill_instance"], job["decode_instance"])
    if "instance" in asked and asked["instance"] not in places:
        return False
    if "missed" in asked and job["slo_met"] is not (asked["missed"] == "false"):
        return False
    return float(asked.get("since", 0)) <= job["arrived_s"]


def under_way(job: dict[str, Any]) -> bool:
    """Whether it has not ended."""
    return not Phase(job["phase"]).final
