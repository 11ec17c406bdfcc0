"""What the services answer, made up: a small cluster, a cluster with problems, their past, and a planner's answers."""

import math
import random
from typing import Any

import msgspec

from shared.domain.demand import Demand
from shared.domain.instance import Compatibility, InstanceInfo, InstanceLoad, InstanceState, KvGeometry, Role
from shared.domain.job import Phase
from shared.domain.kv import TransferOutcome, TransferReport
from shared.domain.route import Reason
from shared.domain.verdict import Count, Level, Link, Problem, Stage, Verdict
from shared.timeline import Decision, RequestTimeline, Span, SpanRecord
from shared.wire.messages import JobReport

T0 = 1_790_000_000.0
WAIT_S = 20.0
CLUSTER_FILE = "name: found\ninstances: []\n"
STAGES = (
    ("queue", 0.31, 410),
    ("prefill", 0.22, 36),
    ("transfer", 0.05, 4),
    ("decode_queue", 0.4, 344),
    ("decode", 4.1, 980),
)


def instance(
    instance_id: str,
    role: Role = Role.PREFILL,
    state: InstanceState = InstanceState.READY,
    *,
    engine: str = "vllm",
    accelerator: str = "Xeon 8480+",
    generation: int = 1,
    since_s: float = T0,
    **load: Any,
) -> dict[str, Any]:
    """An item of the monitor's `GET /instances`."""
    same = Compatibility("f00d", engine, "0.32.0", 1, KvGeometry(6, 4, 64))
    urls = ("tcp://127.0.0.1:1", "http://127.0.0.1:2", ("tcp://127.0.0.1:3",))
    sizes = ("bfloat16", 1, 16, 1000, 2048, 512)
    info = InstanceInfo(instance_id, generation, "polyphase-demo", same, accelerator, *sizes, *urls)
    jobs = {
        "queued_prefill": 2,
        "queued_prefill_tokens": 1234,
        "running": 2,
        "waiting": 1,
        "decoding": 3,
        "inflight": 3,
    }
    usual = {"time_s": T0, **jobs, "free_blocks": 600, "staged_bytes": 1_500_000}
    return {
        "instance_id": instance_id,
        "role": role.value,
        "state": state.value,
        "state_since_s": since_s,
        "registered_s": T0,
        "operation": "",
        "connected": True,
        "death": "connection lost" if state is InstanceState.DEAD else "",
        "info": msgspec.to_builtins(info),
        "load": msgspec.structs.asdict(InstanceLoad(**{**usual, **load})),
    }


def timeline(job_id: str) -> RequestTimeline:
    """A request with one transfer that began before the prefill ended."""
    spans = [
        SpanRecord(Span.PLACEMENT, T0, T0 + 0.001),
        SpanRecord(Span.QUEUE, T0 + 0.002, T0 + 0.012, "p0"),
        SpanRecord(Span.PREFILL, T0 + 0.012, T0 + 0.060, "p0"),
        SpanRecord(Span.TRANSFER, T0 + 0.040, T0 + 0.075, "d0"),
        SpanRecord(Span.DECODE_QUEUE, T0 + 0.075, T0 + 0.078, "d0"),
        SpanRecord(Span.DECODE, T0 + 0.078, T0 + 0.400, "d0"),
    ]
    least = Reason("placement:least_load", {"chosen": "p0", "score": 0.0123, "runner_up": "<i>p1</i>"})
    decisions = [
        Decision(T0 + 0.001, "placement", "p0", (Reason("filter: ready", {"ready_prefill": 2}), least)),
        Decision(T0 + 0.04, "dispatch", "d0", (Reason("dispatch:power_of_two", {"chosen": "d0"}),)),
    ]
    pulled = TransferReport(TransferOutcome.PULLED, 310, 4_761_600, T0 + 0.040, T0 + 0.075)
    return RequestTimeline(
        job_id=job_id,
        arrived_s=T0,
        prompt_tokens=310,
        output_tokens=42,
        first_token_s=T0 + 0.061,
        last_token_s=T0 + 0.4,
        ended_s=T0 + 0.401,
        outcome="stop",
        spans=spans,
        decisions=decisions,
        transfers=[pulled],
    )


def report(job_id: str, phase: Phase = Phase.COMPLETED, **more: Any) -> dict[str, Any]:
    """A row of the scheduler's status table."""
    fields = ("p0", "d0", 310, "default", "completed", 0.061, 0.008, True)
    row = msgspec.to_builtins(JobReport(job_id, "gateway-0", phase, T0, 310, 42, *fields))
    stored = {"scheduler_id": "s0", "final": phase.final, "updated_s": T0}
    return {**row, **stored, "caller": "team-a", **more}


def slo_reports() -> list[dict[str, Any]]:
    """Two classes over two windows."""
    return [
        {
            "slo": name,
            "window_s": window_s,
            "requests": requests,
            "ttft_attainment": 0.99,
            "tpot_attainment": 0.97,
            "itl_attainment": 0.95,
            "attainment": met,
            "ttft_s": {"p50": 0.06, "p90": 0.11, "p99": 0.9},
            "tpot_s": {"p50": 0.008, "p90": 0.01, "p99": 0.03},
            "longest_gap_s": {"p50": 0.05, "p90": 0.3, "p99": 1.1, "max": 2.4},
            "ttft_target_s": 2.0,
            "tpot_target_s": 0.2,
            "itl_target_s": 0.25,
        }
        for name, met in (("default", 0.96), ("interactive", 0.9))
        for window_s, requests in ((60.0, 100), (300.0, 480))
    ]


def lengths(source: str = "observed", *, state: str = "missing", why: str = "", error: str = "") -> dict[str, Any]:
    """The predictor's `GET /v1/model`."""
    path = None if state == "missing" else "/models/lengths"
    checkpoint = {"path": path, "state": state, "error": error or None, "metadata": None}
    if state == "missing":
        return {"source": source, "use": "auto", "why": "", "checkpoint": checkpoint, "observed": {"observations": 12}}
    return {
        "source": source,
        "use": "auto",
        "why": why,
        "checkpoint": checkpoint,
        "reality": {
            "model": "abc",
            "answers": 1234,
            "accuracy": {"classifier": 0.62, "commonest": 0.31, "prompt_length": 0.45},
            "mean_error_tokens": 48.6,
            "believed": not why,
            "recent": [[100.5, 90], [300.0, 450], [20.0, 17]],
        },
        "fallbacks": {"late": 3, "busy": 0},
        "pending": 0,
        "observed": {"observations": 1500, "accuracy": 0.4},
    }


def demand(now_s: float, **more: Any) -> dict[str, Any]:
    """The monitor's `GET /demand`, with a shift half a minute ago."""
    profile = {"rate": 12.5, "burstiness": 1.0, "prompt_tokens": 1500.0, "fresh_tokens": 1500.0, "fresh_squares": 1.0}
    profile |= {"output_tokens": 40.0, "ttft_s": 1.0, "tpot_s": 0.1, "age_s": 30.0}
    seconds = [
        {"second": int(now_s) - ago, "requests": 12, "prompt_tokens": 1500.0, "output_tokens": 40.0}
        for ago in range(20, 0, -1)
    ]
    shift = {"what": "prompts", "before": 400.0, "after": 1500.0, "noticed_s": 4.0, "deviations": 9.0}
    return {"demand": profile, "seconds": seconds, "shifts": [{**shift, "at_s": now_s - 30.0}], "roles": None, **more}


def operation(operation_id: str, kind: str, instance_id: str, who: str, **more: Any) -> dict[str, Any]:
    """An item of the monitor's `GET /flips`."""
    made = {"generation": 1, "from_role": "prefill", "to_role": "decode", "started_s": T0, "result": "succeeded"}
    times = {"drain_s": None if kind == "resume" else 1.24, "flip_s": 0.0004 if kind == "flip" else None}
    ids = {"operation_id": operation_id, "kind": kind, "instance_id": instance_id, "who": who}
    return {**ids, **made, **times, "total_s": 1.25, "error": "", **more}


def event(kind: str, text: str, **more: Any) -> dict[str, Any]:
    return {"event_id": f"{kind} {text}", "time_s": 1.0, "kind": kind, "text": text, "role": "decode", **more}


def verdict(rows: list[dict[str, Any]], now_s: float, level: Level = Level.GOOD) -> dict[str, Any]:
    """The verdict on these instances, with problems at a bad level."""
    counts = {}
    for role in Role:
        states = [row["state"] for row in rows if row["role"] == role.value]
        kinds = {kind: states.count(kind) for kind in ("ready", "dead", "unresponsive", "draining", "starting")}
        counts[role] = Count(expected=len(states), **kinds)
    bad, gone = (
        level is Level.DEGRADED,
        [row["instance_id"] for row in rows if row["state"] in ("dead", "unresponsive")],
    )
    full = "decode KV is full: d0 and d1 hold 98 %, 344 requests wait for room"
    dead = f"{len(gone)} of {counts[Role.DECODE].expected} decode instances dead"
    met, places = "TPOT met by 26 % (target 60 ms)", ("d0", "d1")
    problems = (
        Problem("tpot_missed", level, met, full, Stage.DECODE, places, 0.26, 0.9),
        Problem("kv_full", level, "decode KV 98 %, 344 waiting", "", Stage.DECODE_QUEUE, places, 0.98, 0.95),
        Problem("instances_dead", level, dead, "their connections were lost", None, tuple(gone)),
        Problem("refusals", level, "3.1 % of requests refused", "the gateway is full", Stage.QUEUE),
    )
    total = sum(seconds for _, seconds, _ in STAGES)
    chain = tuple(
        Link(Stage(name), 120, seconds, 3.1 * seconds, seconds / total, jobs if bad else jobs // 40)
        for name, seconds, jobs in STAGES
    )
    headline = f"Degraded: {met}" if bad else "Good: SLO met by 97 %"
    found = Verdict(now_s, level, headline, problems if bad else (), chain, counts, 60.0, 120)
    return msgspec.to_builtins(found, str_keys=True)  # type: ignore[no-any-return]


def history(minutes: int, points: int, now_s: float) -> dict[str, Any]:
    """Waves of load with a gap, a flip, a death and a registration."""
    wave = [0.5 + 0.4 * math.sin(place / points * 12.0) + 0.08 * math.sin(place * 1.7) for place in range(points)]
    ranges = {
        "requests_per_s": (1, 14),
        "prompt_tokens_per_s": (900, 21_000),
        "output_tokens_per_s": (150, 5_200),
        "ttft_p50_s": (0.12, 0.7),
        "ttft_p99_s": (0.3, 2.9),
        "tpot_p50_s": (0.021, 0.048),
        "tpot_p99_s": (0.03, 0.11),
        "gap_p50_s": (0.03, 0.08),
        "gap_p90_s": (0.06, 1.2),
        **{f"{name}attainment": (0.7, 1.0) for name in ("", "ttft_", "tpot_", "itl_")},
        **{f"{name}_per_s": (0, 0.3) for name in ("failed", "cancelled", "refused")},
        "running": (20, 640),
        "waiting": (0, 344),
        "queued_prefill_tokens": (0, 90_000),
        "kv_used_prefill": (0.1, 0.5),
        "kv_used_decode": (0.3, 0.99),
        **{f"stage_{name}_s": (0.4 * seconds, 1.4 * seconds) for name, seconds, _ in STAGES},
    }
    series: dict[str, list[float | None]] = {
        name: [low + (high - low) * value for value in wave] for name, (low, high) in ranges.items()
    }
    gap = slice(int(0.4 * points), int(0.43 * points))
    for column in series.values():
        column[gap] = [None] * len(column[gap])
    events = (
        (0.30, "policy_flip", "p1", "became decode: pressure on decode 1.4"),
        (0.55, "death", "d1", "connection lost"),
        (0.62, "registered", "d1", "a new process"),
    )
    return {
        **_times(minutes, points, now_s),
        "series": series,
        "targets": {"ttft_s": 2.0, "tpot_s": 0.06, "itl_s": 0.25},
        "classes": {},
        "class_targets": {},
        "marks": [
            {"time_s": now_s - (1 - at) * minutes * 60, "kind": kind, "instance_id": name, "text": text}
            for at, kind, name, text in events
        ],
    }


def instance_history(rows: list[dict[str, Any]], minutes: int, points: int, now_s: float) -> dict[str, Any]:
    """Each instance in a wave of its own; every ninth flips, every thirteenth is dead for a while."""
    made = {}
    for number, row in enumerate(rows):
        wave = [0.5 + 0.45 * math.sin(place / points * 9 + number) for place in range(points)]
        dead = [number % 13 == 5 and 0.5 < place / points < 0.7 for place in range(points)]
        other, early = Role(row["role"]).other.value, points // 2 if number % 9 == 0 else -1
        made[row["instance_id"]] = {
            "role": [other if place <= early else row["role"] for place in range(points)],
            "state": ["dead" if each else "ready" for each in dead],
            **{
                name: [None if each else round(most * value, 3) for each, value in zip(dead, wave, strict=True)]
                for name, most in (("kv_used", 1), ("running", 20), ("waiting", 4), ("inflight", 24))
            },
            "queued_prefill_tokens": [round(4000 * value) for value in wave],
            "staged_bytes": [round(2e8 * value) for value in wave],
        }
    return {**_times(minutes, points, now_s), "instances": made}


def _times(minutes: int, points: int, now_s: float) -> dict[str, Any]:
    step_s, to_s = minutes * 60 // points, int(now_s)
    times = [to_s - (points - place) * step_s for place in range(points)]
    return {"from_s": to_s - minutes * 60, "to_s": to_s, "step_s": step_s, "time_s": times}


def details(instance_id: str) -> dict[str, Any]:
    """What a worker reports of itself: prefills take as long as expected, decodes half as long again."""
    form = {"fixed_s": 0.004, "token_s": 0.0001, "position_s": 2e-9, "sequence_s": 0.0002, "context_s": 3e-8}
    return {
        "instance_id": instance_id,
        "started_s": T0,
        "uptime_s": 7200.0,
        "restarts": 1,
        "versions": {"polyphase": "0.9.0", "vllm": "0.32.0", "torch": "2.10.0"},
        "steps": {"total": 51_230, "newest": [_step(number) for number in range(200)]},
        "rates": {"at_start": dict.fromkeys(("prefill", "decode", "mixed"), form), "learned": None},
        "link": {"bytes_s": 1.1e9, "latency_s": 0.0004},
        "codecs": {"int8": {"encode_bytes_s": 2.1e9, "decode_bytes_s": 3.4e9}},
        "prefixes": {"blocks": 412, "block_tokens": 64, "asked_tokens": 910_000, "hit_tokens": 337_000},
        "preemptions": 3,
        "known": instance(instance_id),
    }


def _step(number: int) -> dict[str, Any]:
    prefill = number % 5 == 0
    expected_s = 0.02 + 0.0001 * (number % 37) + (0.19 if prefill else 0.0)
    seconds = expected_s * (1.0 + 0.1 * math.sin(number)) * (1.0 if prefill else 1.5)
    work = {"prefill_tokens": 2048 if prefill else 0, "decodes": 0 if prefill else 64, "context_tokens": 0}
    learned_s = None if prefill else expected_s * 1.48
    return {"ended_s": T0, "seconds": seconds, **work, "expected_s": expected_s, "learned_s": learned_s}


def bad_day(count: int, now_s: float) -> dict[str, Any]:
    """Arguments of a `FakeCluster` of many instances, some gone, with requests that miss their targets and events."""
    draw = random.Random(7)
    states = {16: InstanceState.DEAD, 22: InstanceState.DRAINING}
    rows = []
    for number in range(count):
        prefill = number < count // 3
        rows.append(
            instance(
                f"p{number}" if prefill else f"d{number - count // 3}",
                Role.PREFILL if prefill else Role.DECODE,
                states.get(number % 23, InstanceState.READY),
                accelerator=("H100", "A40", "RTX-3090Ti")[number % 3],
                free_blocks=draw.randint(0, 900),
                waiting=draw.choice((0, 0, 0, 7)),
            )
        )
    jobs = []
    for number in range(240):
        ended = number % 20 != 0
        ttft_s = draw.lognormvariate(-1.2, 0.9)
        jobs.append(
            report(
                f"chatcmpl-{draw.getrandbits(48):012x}",
                Phase.COMPLETED if ended else Phase.DECODE,
                arrived_s=now_s - 3.0 * number - 2,
                outcome="stop" if ended else "",
                ttft_s=ttft_s,
                slo_met=ttft_s < 0.5 if ended else None,
                caller=draw.choice(("team-a", "team-b", "nightly")),
            )
        )
    names = ("policy:pressure", "anna")
    flips = [operation(f"4f{n}", "flip", f"d{n}", names[n % 2], started_s=now_s - 700 * (n + 1)) for n in range(6)]
    kinds = (("death", "connection lost"), ("registered", "a new process"), ("unresponsive", "silent for 3.1 s"))
    events = [
        event(*kinds[n % 3], time_s=now_s - 97.0 * n - 20, instance_id=rows[n % count]["instance_id"])
        for n in range(60)
    ]
    learned = lengths("classifier", state="loaded")
    more = {"demand": demand(now_s), "lengths": learned, "level": Level.DEGRADED}
    return {"instances": rows, "jobs": jobs, "flips": flips, "events": events, **more}


def member(instance_id: str, role: str = "prefill", state: str = "ready", **more: Any) -> dict[str, Any]:
    """An instance of the planner's `GET /fleet`."""
    made = {"instance_id": instance_id, "role": role, "state": state, "accelerator": "A40", "tensor_parallel": 2}
    return {**made, "pipeline_parallel": 1, "load": 0.4, **more}


def route(prefill: str | None, decode: str, share: float) -> dict[str, Any]:
    return {"prefill": prefill, "decode": decode, "share": share}


def expected(goodput: float = 6.0, **more: Any) -> dict[str, Any]:
    return {"rate": 4.2, "goodput": goodput, "attainment": 0.97, "ttft_s": 0.41, "tpot_s": 0.062, **more}


def small_fleet() -> dict[str, Any]:
    """Two prefill and two decode instances, of which one computes prompts itself."""
    measured = {
        "requests": 252,
        "window_s": 60.0,
        "attainment": 0.81,
        "ttft_p50_s": 0.66,
        "tpot_p50_s": 0.06,
        "rate": 4.3,
    }
    return {
        "time_s": T0,
        "trouble": "",
        "auto": False,
        "instances": [
            member("p0", load=0.62),
            member("p1", load=0.58),
            member("d0", "decode", accelerator="RTX-3090Ti", load=0.97),
            member("d1", "decode", accelerator="RTX-3090Ti", pipeline_parallel=2, load=0.35),
        ],
        "routes": [route("p0", "d0", 0.35), route("p1", "d0", 0.15), route("p1", "d1", 0.38), route(None, "d1", 0.12)],
        "routes_in_force": True,
        "placement": "plan",
        "demand": msgspec.to_builtins(Demand(4.2, 1.0, 1210.0, 1210.0, 1.0, 180.0, 1.0, 0.1)),
        "expected": expected(),
        "measured": measured,
        "promise": {"rate": 5.0, "goodput": 6.2, "attainment": 0.95, "ttft_mean_s": 0.5, "tpot_mean_s": 0.07},
    }


def large_fleet(count: int = 64) -> dict[str, Any]:
    """Four kinds of hardware; a few instances are draining or lost."""
    kinds, states = ("H100", "A100", "A40", "L4"), {5: "draining", 9: "lost", 41: "lost"}
    members = []
    for at in range(count):
        role, kind = "decode" if at % 3 else "prefill", kinds[at % 4]
        name = f"{role}-{kind.lower()}-{at}"
        members.append(member(name, role, states.get(at, "ready"), accelerator=kind, load=(at * 37 % 100) / 100))
    sources, ends = ([m["instance_id"] for m in members if m["role"] == role] for role in ("prefill", "decode"))
    routes = [route(sources[at % len(sources)], end, 1 / len(ends)) for at, end in enumerate(ends)]
    return {**small_fleet(), "instances": members, "routes": routes}


def proposal(proposal_id: str, state: str = "open", **more: Any) -> dict[str, Any]:
    made = {
        "proposal_id": proposal_id,
        "state": state,
        "made_s": T0,
        "noticed_s": T0,
        "took_s": 0.31,
        "decided_s": None,
        "who": "",
        "error": "",
        "cause": "shift",
        "why": "Prompts are 2.4 times as long: <i>p0</i> and p1 cannot compute them in time.",
        "flips": [{"instance_id": "d1", "from_role": "decode", "to_role": "prefill"}],
        "routes": [route("p0", "d0", 0.5), route("d1", "d0", 0.5)],
        "changes_routes": True,
        "now": expected(3.1, attainment=0.61),
        "then": expected(5.4, attainment=0.94, ttft_s=0.3, tpot_s=0.081),
        "steps": [],
    }
    return {**made, **more}


def search(plan_id: str, state: str = "done", **more: Any) -> dict[str, Any]:
    group = {"accelerators": "2 × A40 on a40-0", "layout": "TP2", "tensor_parallel": 2, "price_usd_hour": 0.9}
    promise = {"goodput": 7.4, "rate": 6.0, "attainment": 0.98, "ttft_mean_s": 0.33, "tpot_mean_s": 0.05}
    result = {
        "method": "best",
        "workload": "azure-conv",
        "why": "",
        "stopped": False,
        "took_s": 40.0,
        "groups": [{"name": f"{role}-0", "role": role, **group} for role in ("prefill", "decode")],
        "routes": [route("prefill-0", "decode-0", 0.6), route(None, "decode-1", 0.4)],
        "policies": "adaptive",
        "promise": {**promise, "usd_per_million_tokens": 0.21, "usd_per_hour": 3.6},
        "compared": [{"method": "tabu", "goodput": 6.6}, {"method": "coupled", "goodput": 4.1}],
        "cluster_file": CLUSTER_FILE,
        "endurance": {"lost": "decode 2 × A40 on a40-0", "goodput": 5.9, "flips": 1, "given_up": 0.03},
    }
    made = {
        "plan_id": plan_id,
        "request": {},
        "state": state,
        "who": "anna",
        "submitted_s": T0,
        "ended_s": None if state in ("waiting", "running") else T0 + 42.0,
        "progress": {"what": "judging candidates", "best_goodput": 6.8, "elapsed_s": 12.0},
        "result": result if state in ("done", "cancelled") else None,
        "error": "no deployment fits" if state == "failed" else "",
    }
    return {**made, **more}


WHAT_IF = {
    "now": expected(6.0),
    "then": expected(3.0, attainment=0.5),
    "best": {
        "flips": [{"instance_id": "d1", "from_role": "decode", "to_role": "prefill"}],
        "expected": expected(5.0, attainment=0.96),
    },
    "why": "",
}
