"""What a monitor and its schedulers tell of the past, made up: waves of load, deaths and flips."""

import math
from typing import Any

import msgspec

from shared.domain.instance import Role
from shared.domain.verdict import Count, Level, Link, Problem, Stage, Verdict

STAGES = (
    ("queue", 0.31, 410),
    ("prefill", 0.22, 36),
    ("transfer", 0.05, 4),
    ("decode_queue", 0.4, 344),
    ("decode", 4.1, 980),
)


def verdict(rows: list[dict[str, Any]], now_s: float, level: Level = Level.GOOD) -> dict[str, Any]:
    """Of these instances; with trouble if `level` says so."""
    counts = {}
    for role in Role:
        states = [row["state"] for row in rows if row["role"] == role.value]
        kinds = {kind: states.count(kind) for kind in ("ready", "dead", "unresponsive", "draining", "starting")}
        counts[role] = Count(expected=len(states), **kinds)
    gone = [row["instance_id"] for row in rows if row["state"] in ("dead", "unresponsive")]
    bad = level in (Level.DEGRADED, Level.DOWN)
    problems = trouble(gone, counts[Role.DECODE].expected) if bad else ()
    total = sum(seconds for _, seconds, _ in STAGES)
    chain = tuple(
        Link(
            Stage(name),
            120,
            seconds,
            3.1 * seconds,
            seconds / total,
            jobs if bad else jobs // 40,
            Level.DEGRADED if bad and name == "decode_queue" else Level.GOOD,
        )
        for name, seconds, jobs in STAGES
    )
    named = "; ".join(problem.text for problem in problems[:3])
    headline = f"Degraded: {named}" if bad else "Good: SLO met by 97 %"
    return msgspec.to_builtins(Verdict(now_s, level, headline, problems, chain, counts, 60.0, 120), str_keys=True)  # type: ignore[no-any-return]


def trouble(gone: list[str], of: int) -> tuple[Problem, ...]:
    """What is wrong in a cluster that is too full, of which some are dead."""
    full = "decode KV is full: d0 and d1 hold 98 %, 344 requests wait for room"
    return (
        Problem(
            "tpot_missed",
            Level.DEGRADED,
            "TPOT met by 26 % (target 60 ms)",
            full,
            Stage.DECODE,
            ("d0", "d1"),
            0.26,
            0.9,
        ),
        Problem(
            "kv_full", Level.DEGRADED, "decode KV 98 %, 344 waiting", "", Stage.DECODE_QUEUE, ("d0", "d1"), 0.98, 0.95
        ),
        Problem(
            "instances_dead",
            Level.DEGRADED,
            f"{len(gone)} of {of} decode instances dead",
            "their connections were lost",
            None,
            tuple(gone),
        ),
        Problem("refusals", Level.DEGRADED, "3.1 % of requests refused", "the gateway is full", Stage.QUEUE),
    )


def history(minutes: int, points: int, now_s: float) -> dict[str, Any]:
    """Two waves, with trouble in the second."""
    step_s = minutes * 60.0 / points
    times = [now_s - (points - place) * step_s for place in range(points)]
    wave = [0.5 + 0.4 * math.sin(place / points * 12.0) + 0.08 * math.sin(place * 1.7) for place in range(points)]
    bad = [max(0.0, one - 0.62) * 2.4 for one in wave]

    def along(low: float, high: float, of: list[float] | None = None) -> list[float]:
        return [round(low + (high - low) * one, 5) for one in (of or wave)]

    series = {
        "requests_per_s": along(1, 14),
        "prompt_tokens_per_s": along(900, 21_000),
        "output_tokens_per_s": along(150, 5_200),
        "ttft_p50_s": along(0.12, 0.7),
        "ttft_p99_s": along(0.3, 2.9),
        "tpot_p50_s": along(0.021, 0.048),
        "tpot_p99_s": along(0.03, 0.11),
        "gap_p50_s": along(0.03, 0.08),
        "gap_p90_s": along(0.06, 1.2),
        **{f"{name}_attainment": [round(1.0 - 0.4 * one, 4) for one in bad] for name in ("ttft", "tpot", "itl")},
        "attainment": [round(min(1.0, 0.99 - 0.6 * one), 4) for one in bad],
        "failed_per_s": along(0, 0.3, bad),
        "cancelled_per_s": along(0, 0.2),
        "refused_per_s": along(0, 1.1, bad),
        "running": along(20, 640),
        "waiting": along(0, 344, bad),
        "queued_prefill_tokens": along(0, 90_000),
        "kv_used_prefill": along(0.1, 0.5),
        "kv_used_decode": along(0.3, 0.99),
        **{f"stage_{name}_s": along(0.4 * seconds, 1.4 * seconds) for name, seconds, _ in STAGES},
    }
    kinds = (
        (0.30, "policy_flip", "p1", "became decode: pressure on decode 1.4"),
        (0.55, "death", "d1", "connection lost"),
    )
    marks = [
        {"time_s": now_s - (1 - at) * minutes * 60, "kind": kind, "instance_id": name, "text": text}
        for at, kind, name, text in (*kinds, (0.62, "registered", "d1", "a new process"))
    ]
    gap = slice(int(0.4 * points), int(0.43 * points))  # the monitor was away
    for column in series.values():
        column[gap] = [None] * len(column[gap])  # type: ignore[list-item]
    return {
        "from_s": now_s - minutes * 60,
        "to_s": now_s,
        "step_s": step_s,
        "time_s": times,
        "series": series,
        "targets": {"ttft_s": 2.0, "tpot_s": 0.06, "itl_s": 0.25},
        "classes": {},
        "marks": marks,
    }


def instance_history(rows: list[dict[str, Any]], minutes: int, points: int, now_s: float) -> dict[str, Any]:
    """Each in a wave of its own; every ninth flips, every thirteenth dies for a while."""
    step_s = minutes * 60.0 / points
    made = {}
    for number, row in enumerate(rows):
        wave = [0.5 + 0.45 * math.sin(place / points * 9 + number) for place in range(points)]
        role = [
            row["role"] if number % 9 or place > points // 2 else Role(row["role"]).other.value
            for place in range(points)
        ]
        dead = [number % 13 == 5 and 0.5 < place / points < 0.7 for place in range(points)]
        made[row["instance_id"]] = {
            "role": role,
            "state": ["dead" if one else "ready" for one in dead],
            "kv_used": [None if one else round(value, 3) for one, value in zip(dead, wave, strict=True)],
            "running": [None if one else round(20 * value) for one, value in zip(dead, wave, strict=True)],
            "waiting": [None if one else round(4 * value) for one, value in zip(dead, wave, strict=True)],
            "queued_prefill_tokens": [round(4000 * value) for value in wave],
            "inflight": [None if one else round(24 * value) for one, value in zip(dead, wave, strict=True)],
            "staged_bytes": [round(2e8 * value) for value in wave],
        }
    times = [now_s - (points - place) * step_s for place in range(points)]
    return {"from_s": now_s - minutes * 60, "to_s": now_s, "step_s": step_s, "time_s": times, "instances": made}


def details(instance_id: str) -> dict[str, Any]:
    """What a worker tells of itself: its prefills take as long as expected, its decodes half as long again."""
    form = {"fixed_s": 0.004, "token_s": 0.0001, "position_s": 2e-9, "sequence_s": 0.0002, "context_s": 3e-8}
    return {
        "instance_id": instance_id,
        "uptime_s": 7200.0,
        "restarts": 1,
        "preemptions": 4,
        "versions": {"polyphase": "0.9.0", "vllm": "0.32.0", "torch": "2.10.0"},
        "steps": {"total": 51_230, "newest": [_step(number) for number in range(200)]},
        "rates": {"at_start": {"prefill": form, "mixed": form}, "learned": None},
        "link": {"bandwidth_bytes_per_s": 1.1e9, "latency_s": 0.0004},
        "codecs": {"int8": {"encode_bytes_per_s": 2.1e9, "decode_bytes_per_s": 3.4e9}},
        "prefixes": {"blocks": 412, "block_tokens": 64, "asked_tokens": 910_000, "hit_tokens": 337_000},
        "known": {"instance_id": instance_id, "info": {}},
    }


def _step(number: int) -> dict[str, Any]:
    prefill = number % 5 == 0
    expected_s = 0.02 + 0.0001 * (number % 37) + (0.19 if prefill else 0.0)
    apart = 1.0 + 0.1 * math.sin(number)
    return {
        "ended_s": float(number),
        "seconds": expected_s * apart * (1.0 if prefill else 1.5),
        "prefill_tokens": 2048 if prefill else 0,
        "decodes": 0 if prefill else 64,
        "context_tokens": 0 if prefill else 90_000,
        "expected_s": expected_s,
        "learned_s": None if prefill else expected_s * 1.48,
    }
