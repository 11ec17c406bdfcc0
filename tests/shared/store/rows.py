"""Makers of rows for tests of the store."""

from typing import Any


def request_row(job_id: str, *, phase: str = "queued", final: bool = False, **changes: Any) -> dict[str, Any]:
    row = {
        "job_id": job_id,
        "scheduler_id": "s0",
        "gateway_id": "g0",
        "caller": "",
        "phase": phase,
        "final": final,
        "arrived_s": 1000.0,
        "updated_s": 1000.0,
        "prompt_tokens": 10,
        "output_tokens": 0,
        "prefill_instance": "",
        "decode_instance": "",
        "split": 10,
        "slo": "default",
        "outcome": "",
        "ttft_s": None,
        "tpot_s": None,
        "longest_gap_s": None,
        "gaps": 0,
        "gaps_over": 0,
        "slo_met": None,
        "predicted_ttft_s": None,
        "predicted_tpot_s": None,
        "timeline": None,
    }
    return {**row, **changes}


def load_row(instance_id: str, time_s: float) -> dict[str, Any]:
    names = (
        "queued_prefill",
        "queued_prefill_tokens",
        "running",
        "waiting",
        "decoding",
        "heavy_decodes",
        "context_tokens",
        "free_blocks",
        "staged_bytes",
        "inflight",
    )
    return {
        "instance_id": instance_id,
        "time_s": time_s,
        "role": "decode",
        "state": "ready",
        **dict.fromkeys(names, 2**31 - 1),
    }
