"""A small cluster of one process: what the monitor, scheduler, predictor and gateway answer, on a loopback socket."""

import threading
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Query, Request, Response

from shared.domain.instance import InstanceState, Role
from shared.domain.job import Phase
from shared.domain.verdict import Level
from shared.errors import NotFound, PolyphaseError
from shared.runtime.http import error_response
from shared.timeline import RequestTimeline
from tests.dashboard import found, past, talk
from tests.dashboard.rows import T0, WAIT_S, instance, lengths, report, slo_reports, timeline


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
    level: Level = Level.GOOD
    timelines: dict[str, RequestTimeline] = field(default_factory=dict)
    policy_changes: list[tuple[dict[str, Any], str]] = field(default_factory=list)  # body, actor
    answers: talk.Answers = field(default_factory=talk.Answers)
    searches: list[dict[str, str]] = field(default_factory=list)
    filters: list[dict[str, Any]] = field(default_factory=list)  # with which events were asked for
    now_s: float | None = None  # None: the time of day
    refusal: PolyphaseError | None = None
    monitor_broken: bool = False
    scheduler_broken: bool = False
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
        operation_id = body.get("operation_id") or f"op{len(self.posts)}"
        self.go.wait(WAIT_S)
        if self.refusal is not None:
            raise self.refusal
        row = next(row for row in self.instances if row["instance_id"] == instance_id)
        before = Role(row["role"])
        after = before.other if what == "flip" else before
        row["role"], row["state"] = after.value, "draining" if what == "drain" else "ready"
        entry = {
            "operation_id": operation_id,
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
        self._past(app)
        self._others(app)
        talk.routes(app, self.answers)
        return app

    def _monitor(self, app: FastAPI) -> None:
        @app.middleware("http")
        async def broken(request: Request, go_on: Any) -> Any:
            if self.monitor_broken and request.url.path.startswith(
                ("/instances", "/cluster", "/flips", "/events", "/demand", "/verdict", "/history")
            ):
                return Response(status_code=503)
            if self.scheduler_broken and request.url.path.startswith("/requests"):
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
        def events(limit: int, kind: str = "", instance: str = "", since: float = 0.0) -> list[dict[str, Any]]:
            self.filters.append({"kind": kind, "instance": instance, "since": since})
            fits = [e for e in self.events if kind in ("", e["kind"]) and instance in ("", e["instance_id"])]
            return fits[:limit]

        @app.get("/demand")
        def demand() -> dict[str, Any]:
            return self.demand

        @app.post("/instances/{instance_id}/{what}")
        def operate(instance_id: str, what: str, body: dict[str, Any], request: Request) -> dict[str, Any]:
            return self.operate(instance_id, what, body, request.headers.get("x-polyphase-actor", ""))

    def _past(self, app: FastAPI) -> None:
        Minutes = Annotated[int, Query(ge=5, le=1440)]

        @app.get("/verdict")
        def verdict() -> dict[str, Any]:
            return past.verdict(self.instances, self.time_s, self.level)

        @app.get("/history")
        def history(minutes: Minutes, points: int) -> dict[str, Any]:
            return past.history(minutes, points, self.time_s)

        @app.get("/history/instances")
        def instance_history(minutes: Minutes, points: int, instance: str = "") -> dict[str, Any]:
            rows = [row for row in self.instances if instance in ("", row["instance_id"])]
            return past.instance_history(rows, minutes, points, self.time_s)

        @app.get("/instances/{instance_id}/details")
        def details(instance_id: str) -> dict[str, Any]:
            return past.details(instance_id)

        @app.get("/instances/{instance_id}/log")
        def log(instance_id: str, lines: int) -> dict[str, Any]:
            return {"lines": [f"12:00:{n:02} info  {instance_id} step {n}" for n in range(60)][-lines:]}

        @app.get("/operations/{operation_id}")
        def operation(operation_id: str) -> dict[str, Any]:
            known = next((one for one in self.flips if one["operation_id"] == operation_id), None)
            if known is None:
                raise NotFound(f"no operation {operation_id!r}: it never arrived here, or is forgotten")
            return known

    @property
    def time_s(self) -> float:
        return time.time() if self.now_s is None else self.now_s

    def _others(self, app: FastAPI) -> None:
        @app.get("/requests")
        def requests(limit: int, phase: str = "") -> list[dict[str, Any]]:
            self.phases.append(phase)
            return [job for job in self.jobs if phase in ("", job["phase"])][:limit]

        @app.get("/requests/search")
        def search(request: Request) -> dict[str, Any]:
            self.searches.append(dict(request.query_params))
            return found.search(self.jobs, dict(request.query_params))

        @app.get("/requests/{job_id}")
        def request_row(job_id: str) -> dict[str, Any]:
            job = next((j for j in self.jobs if j["job_id"] == job_id), None)
            if job is None:
                raise NotFound(f"no job {job_id!r}")
            return job

        @app.get("/requests/{job_id}/timeline")
        def get_timeline(job_id: str) -> Response:
            job = next((j for j in self.jobs if j["job_id"] == job_id), None)
            if job is None:
                raise NotFound(f"no timeline of job {job_id!r}")
            told = self.timelines.get(job_id) or timeline(job_id)
            if not Phase(job["phase"]).final:
                told = msgspec.structs.replace(told, ended_s=0.0, outcome="", spans=told.spans[:3])
            return Response(msgspec.json.encode(told), media_type="application/json")

        @app.get("/policies")
        def policies() -> dict[str, Any]:
            chosen = {"placement": "least_load", "split": "fraction", "dispatch": "power_of_two", "step_budget": "off"}
            made: dict[str, Any] = {kind: {"name": name, "parameters": {}} for kind, name in chosen.items()}
            made["split"].update(parameters={"fraction": 0.5}, changed={"who": "anna", "since_s": T0})
            told = ({"process": "instance", "name": name, "follows": name == "p0"} for name in ("p0", "d0"))
            choices = {"split": {"fraction": ["fraction"], "full": []}, "placement": {"adaptive": [], "least_load": []}}
            return {"revision": 3, "policies": made, "choices": choices, "followers": list(told)}

        @app.put("/policies")
        def put_policies(change: dict[str, Any], request: Request) -> dict[str, Any]:
            self.policy_changes.append((change, request.headers.get("x-polyphase-actor", "")))
            if self.refusal is not None:
                raise self.refusal
            return policies()

        @app.get("/v1/model")
        def model() -> dict[str, Any]:
            return self.lengths

        @app.get("/metrics")
        def metrics() -> Response:
            return Response(self.metrics, media_type="text/plain")

        @app.get("/health")
        def health() -> Response:
            return Response()
