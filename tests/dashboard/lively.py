"""A cluster as it is on a bad day: many instances, some gone, full KV, requests that miss their targets, events."""

import random
import time
from typing import Any

from shared.domain.instance import InstanceState, Role
from shared.domain.job import Phase
from shared.domain.verdict import Level
from tests.dashboard.cluster import FakeCluster
from tests.dashboard.rows import instance, lengths, report, slo_reports

ACCELERATORS = ("H100", "A40", "RTX-3090Ti")


def lively(instances: int, requests: int = 300) -> FakeCluster:
    """Of that many, the same each time; its times are those of the day."""
    draw, now_s = random.Random(7), time.time()
    rows = [_instance(number, instances, draw, now_s) for number in range(instances)]
    jobs = [_job(number, rows, draw, now_s) for number in range(requests)]
    return FakeCluster(
        rows,
        jobs=jobs,
        slo=_slo(),
        flips=_flips(now_s),
        events=_events(rows, now_s),
        demand=_demand(now_s),
        lengths=_lengths(draw),
        level=Level.DEGRADED,
    )


def _instance(number: int, of: int, draw: random.Random, now_s: float) -> dict[str, Any]:
    role = Role.PREFILL if number < of // 3 else Role.DECODE
    name = f"{role.value[0]}{number if role is Role.PREFILL else number - of // 3}"
    state = InstanceState.READY
    if of > 4 and number % 17 == 16:
        state = InstanceState.DEAD
    elif of > 4 and number % 23 == 22:
        state = InstanceState.DRAINING
    row = instance(name, role, state, accelerator=ACCELERATORS[number % 3], inflight=draw.randint(0, 40))
    row["state_since_s"], row["info"]["generation"] = now_s - draw.randint(60, 90_000), int((now_s - 90_000) * 1e9)
    load = row["load"]
    load.update(free_blocks=draw.randint(0, 900), running=draw.randint(0, 32), waiting=draw.choice((0, 0, 0, 7)))
    load.update(queued_prefill_tokens=draw.randint(0, 9000), staged_bytes=draw.randint(0, 900_000_000))
    return row


def _job(number: int, rows: list[dict[str, Any]], draw: random.Random, now_s: float) -> dict[str, Any]:
    prefills = [row["instance_id"] for row in rows if row["role"] == "prefill"]
    decodes = [row["instance_id"] for row in rows if row["role"] == "decode"]
    phase = Phase.DECODE if number % 20 == 0 else Phase.COMPLETED
    ended = phase.final
    ttft_s = draw.lognormvariate(-1.2, 0.9)
    return {
        **report(f"chatcmpl-{draw.getrandbits(48):012x}", phase),
        "arrived_s": now_s - 3.0 * number - 2,
        "prompt_tokens": draw.randint(30, 6000),
        "output_tokens": draw.randint(1, 900),
        "prefill_instance": draw.choice(prefills),
        "decode_instance": draw.choice(decodes),
        "slo": draw.choice(("default", "interactive", "batch")),
        "outcome": "stop" if ended else "",
        "ttft_s": ttft_s,
        "tpot_s": draw.lognormvariate(-3.1, 0.4) if ended else None,
        "slo_met": ttft_s < 0.5 if ended else None,
        "caller": draw.choice(("team-a", "team-b", "nightly")),
    }


def _slo() -> list[dict[str, Any]]:
    reports = slo_reports()
    for row in reports:
        row["tpot_target_s"], row["tpot_attainment"] = 0.06, 0.26 if row["slo"] == "interactive" else 0.94
        row["attainment"] = row["tpot_attainment"]
    return reports


def _flips(now_s: float) -> list[dict[str, Any]]:
    entry = {
        "kind": "flip",
        "generation": 1,
        "from_role": "prefill",
        "to_role": "decode",
        "drain_s": 1.24,
        "flip_s": 0.0004,
        "total_s": 1.25,
        "error": "",
    }
    who = (("policy:pressure", "pressure on decode 1.4 for 12 s; it was the least loaded (8 %)"), ("anna", None))
    return [
        {
            **entry,
            "operation_id": f"4f1c{number:028x}",
            "instance_id": f"d{number}",
            "who": who[number % 2][0],
            "why": who[number % 2][1],
            "started_s": now_s - 700 * (number + 1),
            "result": "refused" if number == 3 else "succeeded",
        }
        for number in range(6)
    ]


def _events(rows: list[dict[str, Any]], now_s: float) -> list[dict[str, Any]]:
    told = (
        ("death", "connection lost"),
        ("policy_flip", "prefill → decode: pressure on decode 1.4 for 12 s"),
        ("operation_refused", "drain: it is the last ready prefill instance"),
        ("registered", "a new process"),
        ("demand_shift", "prompts went from 400 to 1500 tokens, noticed after 4 s"),
        ("unresponsive", "silent for 3.1 s"),
        ("recovered", "after 4.0 s"),
    )
    return [
        {
            "time_s": now_s - 97.0 * number - 20,
            "kind": told[number % len(told)][0],
            "text": told[number % len(told)][1],
            "instance_id": ""
            if told[number % len(told)][0] == "demand_shift"
            else rows[number % len(rows)]["instance_id"],
            "role": "decode",
            "operation_id": "4f1c" + "0" * 27 + "3" if number % len(told) == 2 else "",
        }
        for number in range(60)
    ]


def _demand(now_s: float) -> dict[str, Any]:
    asked = {
        "rate": 12.5,
        "burstiness": 1.0,
        "prompt_tokens": 1500.0,
        "fresh_tokens": 1500.0,
        "fresh_squares": 1.0,
        "output_tokens": 240.0,
        "ttft_s": 1.0,
        "tpot_s": 0.06,
        "age_s": 30.0,
    }
    seconds = [
        {"second": int(now_s) - ago, "requests": 9 + ago % 7, "prompt_tokens": 400.0 + 9 * ago, "output_tokens": 40.0}
        for ago in range(120, 0, -1)
    ]
    shift = {
        "what": "prompts",
        "before": 400.0,
        "after": 1500.0,
        "noticed_s": 4.0,
        "deviations": 9.0,
        "at_s": now_s - 90,
    }
    roles = {"prefill": 12, "decode": 20, "harm": 0.31, "harm_then": 0.02}
    return {"demand": asked, "seconds": seconds, "shifts": [shift], "roles": roles}


def _lengths(draw: random.Random) -> dict[str, Any]:
    recent = [(true * draw.uniform(0.6, 1.5), true) for true in (draw.uniform(5, 900) for _ in range(200))]
    return {
        **lengths(),
        "source": "classifier",
        "checkpoint": {"path": "/models/lengths", "state": "loaded", "error": None, "metadata": None},
        "reality": {
            "model": "abc",
            "answers": 1234,
            "accuracy": {"classifier": 0.62, "commonest": 0.31, "prompt_length": 0.45},
            "mean_error_tokens": 48.6,
            "believed": True,
            "recent": recent,
        },
        "fallbacks": {"late": 3, "busy": 0},
        "observed": {"observations": 1500, "accuracy": 0.4},
    }
