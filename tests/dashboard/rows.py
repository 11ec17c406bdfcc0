"""What services of a small cluster answer, row by row."""

from typing import Any

import msgspec

from shared.domain.instance import Compatibility, InstanceInfo, InstanceLoad, InstanceState, KvGeometry, Role
from shared.domain.job import Phase
from shared.domain.kv import TransferOutcome, TransferReport
from shared.domain.route import Reason
from shared.timeline import Decision, RequestTimeline, Span, SpanRecord
from shared.wire.messages import JobReport

T0 = 1_790_000_000.0
WAIT_S = 20.0


def instance(
    instance_id: str,
    role: Role = Role.PREFILL,
    state: InstanceState = InstanceState.READY,
    *,
    engine: str = "vllm",
    inflight: int = 3,
    accelerator: str = "Xeon 8480+",
) -> dict[str, Any]:
    """An item of the monitor's list."""
    same = Compatibility("f00d", engine, "0.32.0", 1, KvGeometry(6, 4, 64))
    info = InstanceInfo(
        instance_id,
        1,
        "polyphase-demo",
        same,
        accelerator,
        "bfloat16",
        1,
        16,
        1000,
        2048,
        512,
        "tcp://127.0.0.1:1",
        "http://127.0.0.1:2",
        ("tcp://127.0.0.1:3",),
    )
    load = InstanceLoad(
        time_s=T0,
        queued_prefill=2,
        queued_prefill_tokens=1234,
        running=2,
        waiting=1,
        decoding=inflight,
        free_blocks=600,
        staged_bytes=1_500_000,
        inflight=inflight,
    )
    return {
        "instance_id": instance_id,
        "role": role.value,
        "state": state.value,
        "state_since_s": T0,
        "registered_s": T0,
        "operation": "",
        "connected": True,
        "death": "connection lost" if state is InstanceState.DEAD else "",
        "info": msgspec.to_builtins(info),
        "load": msgspec.structs.asdict(load),
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
    return RequestTimeline(job_id, T0, 310, 42, T0 + 0.061, T0 + 0.4, T0 + 0.401, "stop", spans, decisions, [pulled])


def report(job_id: str, phase: Phase = Phase.COMPLETED) -> dict[str, Any]:
    """A row of the scheduler's status table."""
    row = msgspec.to_builtins(
        JobReport(job_id, "gateway-0", phase, T0, 310, 42, "p0", "d0", 310, "default", "completed", 0.061, 0.008, True)
    )
    del row["timeline"]
    return {**row, "caller": "team-a"}


def slo_reports() -> list[dict[str, Any]]:
    """Two classes over two windows."""
    return [
        {
            "slo": name,
            "window_s": window_s,
            "requests": requests,
            "ttft_attainment": 0.99,
            "tpot_attainment": 0.97,
            "attainment": met,
            "ttft_s": {"p50": 0.06, "p90": 0.11, "p99": 0.9},
            "tpot_s": {"p50": 0.008, "p90": 0.01, "p99": 0.03},
            "ttft_target_s": 2.0,
            "tpot_target_s": 0.2,
            "itl_attainment": 0.95,
            "longest_gap_s": {"p50": 0.05, "p90": 0.3, "p99": 1.1, "max": 2.4},
            "itl_target_s": 0.25,
        }
        for name, met in (("default", 0.96), ("interactive", 0.9))
        for window_s, requests in ((60.0, 100), (300.0, 480))
    ]


def lengths() -> dict[str, Any]:
    """What a predictor says that has no checkpoint, in as few words as an older one."""
    checkpoint = {"path": None, "state": "missing", "error": None, "metadata": None}
    return {"source": "observed", "checkpoint": checkpoint, "observed": {"observations": 12}}
