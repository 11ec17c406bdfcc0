"""A small cluster of one process: what the monitor, scheduler, predictor and gateway answer, on a loopback socket."""

import threading
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from shared.domain.instance import Compatibility, InstanceInfo, InstanceLoad, InstanceState, KvGeometry, Role
from shared.domain.job import Phase
from shared.domain.kv import TransferOutcome, TransferReport
from shared.domain.route import Reason
from shared.errors import NotFound, PolyphaseError
from shared.runtime.http import error_response
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
        "load": msgspec.to_builtins(load),
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
        job_id, T0, 310, 42, T0 + 0.061, T0 + 0.4, T0 + 0.401, "completed", spans, decisions, [pulled]
    )


def report(job_id: str, phase: Phase = Phase.COMPLETED) -> dict[str, Any]:
    """A row of the scheduler's status table."""
    row = msgspec.to_builtins(
        JobReport(job_id, "gateway-0", phase, T0, 310, 42, "p0", "d0", 310, "default", "completed", 0.061, 0.008, True)
    )
    del row["timeline"]
    return dict(row)


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
        }
        for name, met in (("default", 0.96), ("interactive", 0.9))
        for window_s, requests in ((60.0, 100), (300.0, 480))
    ]


def lengths() -> dict[str, Any]:
    """What a predictor says that has no checkpoint, in as few words as an older one."""
    checkpoint = {"path": None, "state": "missing", "error": None, "metadata": None}
    return {"source": "observed", "checkpoint": checkpoint, "observed": {"observations": 12}}


@dataclass
class FakeCluster:
    """What it answers, and what it was asked to do."""

    instances: list[dict[str, Any]]
    jobs: list[dict[str, Any]] = field(default_factory=lambda: [report("job-2", Phase.DECODE), report("job-1")])
    slo: list[dict[str, Any]] = field(default_factory=slo_reports)
    flips: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    demand: dict[str, Any] = field(default_factory=lambda: {"demand": None})
    lengths: dict[str, Any] = field(default_factory=lengths)
    metrics: str = ""
    refusal: PolyphaseError | None = None
    monitor_broken: bool = False
    posts: list[tuple[str, str, dict[str, Any], str]] = field(default_factory=list)  # id, what, body, actor
    phases: list[str] = field(default_factory=list)
    reads: int = 0
    read: threading.Condition = field(default_factory=threading.Condition)
    go: threading.Event = field(default_factory=threading.Event)  # operations end when it is set
    url: str = ""

    def __post_init__(self) -> None:
        self.go.set()

    def add(self, instance_id: str, role: Role, state: InstanceState) -> None:
        self.instances.append(instance(instance_id, role, state))

    def summary(self) -> dict[str, Any]:
        roles: dict[str, dict[str, int]] = {role.value: {} for role in Role}
        for row in self.instances:
            states = roles[row["role"]]
            states[row["state"]] = states.get(row["state"], 0) + 1
        names = ("queued_prefill", "queued_prefill_tokens", "running", "waiting", "decoding", "inflight")
        totals = {name: sum(row["load"][name] for row in self.instances) for name in names}
        return {
            "time_s": T0,
            "sequence": 7,
            "model": "polyphase-demo",
            "compatibility": None,
            "instances": roles,
            "totals": totals,
            "operations": {},
            "slo": self.slo,
        }

    def operate(self, instance_id: str, what: str, body: dict[str, Any], who: str) -> dict[str, Any]:
        self.posts.append((instance_id, what, body, who))
        self.go.wait(WAIT_S)
        if self.refusal is not None:
            raise self.refusal
        row = next(row for row in self.instances if row["instance_id"] == instance_id)
        before = Role(row["role"])
        after = before.other if what == "flip" else before
        row["role"], row["state"] = after.value, "draining" if what == "drain" else "ready"
        entry = {
            "operation_id": f"op{len(self.posts)}",
            "kind": what,
            "instance_id": instance_id,
            "generation": 1,
            "from_role": before.value,
            "to_role": after.value,
            "who": who,
            "started_s": T0,
            "drain_s": None if what == "resume" else 1.24,
            "flip_s": 0.0004 if what == "flip" else None,
            "total_s": 1.25,
            "result": "succeeded",
            "error": "",
        }
        self.flips.insert(0, entry)
        return entry

    def refreshed(self, times: int) -> None:
        """Wait until the page has read the instances so many times more."""
        with self.read:
            assert self.read.wait_for(lambda wanted=self.reads + times: self.reads >= wanted, WAIT_S)

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_exception_handler(PolyphaseError, error_response)
        self._monitor(app)
        self._others(app)
        return app

    def _monitor(self, app: FastAPI) -> None:
        @app.middleware("http")
        async def broken(request: Request, go_on: Any) -> Any:
            if self.monitor_broken and request.url.path.startswith(
                ("/instances", "/cluster", "/flips", "/events", "/demand")
            ):
                return Response(status_code=503)
            return await go_on(request)

        @app.get("/instances")
        def instances() -> list[dict[str, Any]]:
            with self.read:
                self.reads += 1
                self.read.notify_all()
            return self.instances

        app.get("/cluster")(self.summary)

        @app.get("/flips")
        def flips(limit: int) -> list[dict[str, Any]]:
            return self.flips[:limit]

        @app.get("/events")
        def events(limit: int) -> list[dict[str, Any]]:
            return self.events[:limit]

        @app.get("/demand")
        def demand() -> dict[str, Any]:
            return self.demand

        @app.post("/instances/{instance_id}/{what}")
        def operate(instance_id: str, what: str, body: dict[str, Any], request: Request) -> dict[str, Any]:
            return self.operate(instance_id, what, body, request.headers.get("x-polyphase-actor", ""))

    def _others(self, app: FastAPI) -> None:
        @app.get("/requests")
        def requests(limit: int, phase: str = "") -> list[dict[str, Any]]:
            self.phases.append(phase)
            return [job for job in self.jobs if phase in ("", job["phase"])][:limit]

        @app.get("/requests/{job_id}/timeline")
        def get_timeline(job_id: str) -> Response:
            if not any(j["job_id"] == job_id and Phase(j["phase"]).final for j in self.jobs):
                raise NotFound(f"no timeline of job {job_id!r} yet")
            return Response(msgspec.json.encode(timeline(job_id)), media_type="application/json")

        @app.get("/policies")
        def policies() -> dict[str, Any]:
            chosen = {"placement": "least_load", "split": "fraction", "dispatch": "power_of_two", "step_budget": "off"}
            made: dict[str, Any] = {kind: {"name": name, "parameters": {}} for kind, name in chosen.items()}
            made["split"].update(parameters={"fraction": 0.5}, changed={"who": "anna", "since_s": T0})
            told = ({"process": "instance", "name": name, "follows": name == "p0"} for name in ("p0", "d0"))
            return {"revision": 3, "policies": made, "choices": {}, "followers": list(told)}

        @app.get("/v1/model")
        def model() -> dict[str, Any]:
            return self.lengths

        @app.get("/metrics")
        def metrics() -> Response:
            return Response(self.metrics, media_type="text/plain")

        @app.get("/health")
        def health() -> Response:
            return Response()
