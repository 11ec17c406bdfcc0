"""Monitor, scheduler, predictor, gateway and planner of a small cluster as one application on a loopback socket."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import StreamingResponse

from shared.domain.instance import InstanceState, Role
from shared.domain.job import Phase
from shared.domain.verdict import Level
from shared.errors import NotFound, PolyphaseError
from shared.runtime.http import error_response
from shared.timeline import RequestTimeline
from tests.dashboard import sample_data
from tests.dashboard.sample_data import T0, WAIT_S, instance, lengths, report, slo_reports, timeline

WORDS = ("Prefill ", "and ", "decode ", "part ", "ways.")  # of each chat's answer; it waits for `chat_go` after two
ROUTES = {
    "monitor": ("/instances", "/cluster", "/flips", "/events", "/demand", "/verdict", "/history"),
    "scheduler": ("/requests", "/predictions"),
    "planner": ("/fleet", "/proposals", "/plans", "/what-if", "/mode"),
}
ORDERS = {
    "newest": "arrived_s",
    "slowest_ttft": "ttft_s",
    "slowest_tpot": "tpot_s",
    "longest_gap": "longest_gap_s",
    "longest": "output_tokens",
}
Minutes = Annotated[int, Query(ge=5, le=1440)]
Row = dict[str, Any]


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass
class FakeServices:
    """The answers, and the calls that came. broken: services that answer 503. go, chat_go: while not set, changes and
    chats wait.
    """

    instances: list[Row]
    jobs: list[Row] = field(default_factory=lambda: [report("job-2", Phase.DECODE), report("job-1")])
    slo: list[Row] = field(default_factory=slo_reports)
    flips: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    demand: Row = field(default_factory=lambda: {"demand": None})
    lengths: Row = field(default_factory=lengths)
    predictions: Row = field(default_factory=lambda: {"instances": [], "kinds": []})
    metrics: str = ""
    level: Level = Level.GOOD
    timelines: dict[str, RequestTimeline] = field(default_factory=dict)
    chat_key: str = ""  # that the gateway requires
    fleet: Row = field(default_factory=sample_data.small_fleet)
    proposals: list[Row] = field(default_factory=list)
    plans: list[Row] = field(default_factory=list)
    what_if_answer: Row = field(default_factory=lambda: sample_data.WHAT_IF)
    refusal: PolyphaseError | None = None
    broken: set[str] = field(default_factory=set)
    posts: list[tuple[str, str, Row, str]] = field(default_factory=list)  # instance, operation, body, actor
    policy_changes: list[tuple[Row, str]] = field(default_factory=list)  # body, actor
    planned: list[tuple[str, str, Any, str]] = field(default_factory=list)  # call to the planner, id, body, actor
    chats: list[tuple[Row, dict[str, str]]] = field(default_factory=list)  # body, headers
    searches: list[dict[str, str]] = field(default_factory=list)
    filters: list[Row] = field(default_factory=list)
    reads: int = 0  # of instances or of the fleet
    read: threading.Condition = field(default_factory=threading.Condition)
    go: threading.Event = field(default_factory=_set_event)
    chat_go: threading.Event = field(default_factory=_set_event)
    url: str = ""

    def add(self, instance_id: str, role: Role, state: InstanceState) -> None:
        self.instances.append(instance(instance_id, role, state))

    def refreshed(self, times: int) -> None:
        """Wait until a page has read so many times more."""
        with self.read:
            assert self.read.wait_for(lambda wanted=self.reads + times: self.reads >= wanted, WAIT_S)

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_exception_handler(PolyphaseError, error_response)

        @app.middleware("http")
        async def outage(request: Request, go_on: Any) -> Any:
            away = any(request.url.path.startswith(ROUTES[service]) for service in self.broken)
            return Response(status_code=503) if away else await go_on(request)

        answers = {
            "/verdict": lambda: sample_data.verdict(self.instances, time.time(), self.level),
            "/demand": lambda: self.demand,
            "/cluster": self._cluster,
            "/instances": lambda: self._counted(self.instances),
            "/instances/{instance_id}/details": sample_data.details,
            "/instances/{instance_id}/log": self._log,
            "/history": lambda minutes, points: sample_data.history(int(minutes), int(points), time.time()),
            "/history/instances": self._instance_history,
            "/flips": self._flips,
            "/operations/{operation_id}": lambda operation_id: _found(self.flips, "operation_id", operation_id),
            "/events": self._events,
            "/policies": self._policies,
            "/predictions": lambda: self.predictions,
            "/requests": self._requests,
            "/requests/search": self._search,
            "/requests/{job_id}": lambda job_id: _found(self.jobs, "job_id", job_id),
            "/requests/{job_id}/timeline": self._timeline,
            "/v1/model": lambda: self.lengths,
            "/metrics": lambda: Response(self.metrics, media_type="text/plain"),
            "/health": lambda: {"status": "ok"},
            "/fleet": lambda: self._counted(self.fleet),
            "/proposals": self._proposals,
            "/plans": self._plans,
            "/plans/{plan_id}": lambda plan_id: _found(self.plans, "plan_id", plan_id),
        }
        for path, answer in answers.items():
            app.get(path, response_model=None)(answer)
        app.post("/instances/{instance_id}/{what}")(self._operate)
        app.post("/requests/{job_id}/move")(self._move)
        app.put("/policies")(self._set_policies)
        app.post("/v1/chat/completions", response_model=None)(self._chat)
        app.put("/mode")(self._mode)
        app.post("/what-if")(self._what_if)
        app.post("/proposals/{proposal_id}/{what}")(self._decide)
        app.post("/plans")(self._submit)
        app.post("/plans/{plan_id}/cancel")(self._cancel)
        return app

    def _counted(self, answer: Any) -> Any:
        with self.read:
            self.reads += 1
            self.read.notify_all()
        return answer

    def _change(self) -> None:
        self.go.wait(WAIT_S)
        if self.refusal is not None:
            raise self.refusal

    def _cluster(self) -> Row:
        roles: dict[str, dict[str, int]] = {role.value: {} for role in Role}
        for row in self.instances:
            states = roles[row["role"]]
            states[row["state"]] = states.get(row["state"], 0) + 1
        names = ("queued_prefill", "queued_prefill_tokens", "running", "waiting", "decoding", "inflight")
        totals = {name: sum(row["load"][name] for row in self.instances) for name in names}
        known = {role: sum(states.values()) for role, states in roles.items()}
        head = {"time_s": time.time(), "sequence": 1, "model": "polyphase-demo", "compatibility": None}
        return {**head, "instances": roles, "known": known, "totals": totals, "operations": {}, "slo": self.slo}

    def _log(self, instance_id: str, lines: int) -> Row:
        return {"lines": [f"12:00:{n:02} info  {instance_id} step {n}" for n in range(60)][-lines:]}

    def _instance_history(self, minutes: Minutes, points: int, instance: str = "") -> Row:
        rows = [row for row in self.instances if instance in ("", row["instance_id"])]
        return sample_data.instance_history(rows, minutes, points, time.time())

    def _flips(self, limit: int) -> list[Row]:
        return self.flips[:limit]

    def _events(self, limit: int, kind: str = "", instance: str = "", since: float = 0.0) -> list[Row]:
        self.filters.append({"kind": kind, "instance": instance, "since": since})
        return [e for e in self.events if kind in ("", e["kind"]) and instance in ("", e["instance_id"])][:limit]

    def operate(self, instance_id: str, what: str, body: Row, who: str) -> Row:
        self.posts.append((instance_id, what, body, who))
        self._change()
        row = _found(self.instances, "instance_id", instance_id)
        before = Role(row["role"])
        after = before.other if what == "flip" else before
        row["role"], row["state"] = after.value, "draining" if what == "drain" else "ready"
        operation_id, roles = body["operation_id"], {"from_role": before.value, "to_role": after.value}
        self.flips.insert(0, sample_data.operation(operation_id, what, instance_id, who, **roles))
        return self.flips[0]

    def _operate(self, instance_id: str, what: str, body: Row, request: Request) -> Row:
        return self.operate(instance_id, what, body, _actor(request))

    def _move(self, job_id: str, body: Row, request: Request) -> Row:
        self.posts.append((job_id, "move", body, who := _actor(request)))
        self._change()
        job, move = _found(self.jobs, "job_id", job_id), {"job_id": job_id, "to_instance": body["to"] or ""}
        times = {"drain_s": None, "total_s": 0.01}
        made = sample_data.operation(body["operation_id"], "move", job["decode_instance"], who, **move, **times)
        self.flips.insert(0, made)
        return self.flips[0]

    def _policies(self) -> Row:
        chosen = {"placement": "least_load", "split": "fraction", "dispatch": "power_of_two", "step_budget": "off"}
        policies: Row = {kind: {"name": name, "parameters": {}} for kind, name in chosen.items()}
        policies["split"].update(parameters={"fraction": 0.5}, changed={"who": "anna", "since_s": T0})
        followers = [
            {"process": "instance", "name": name, "revision": 3, "follows": name == "p0"} for name in ("p0", "d0")
        ]
        choices = {"split": {"fraction": ["fraction"], "full": []}, "placement": {"adaptive": [], "least_load": []}}
        return {"revision": 3, "trouble": "", "policies": policies, "choices": choices, "followers": followers}

    def _set_policies(self, change: Row, request: Request) -> Row:
        self.policy_changes.append((change, _actor(request)))
        self._change()
        return self._policies()

    def _requests(self, limit: int) -> list[Row]:
        return self.jobs[:limit]

    def _search(self, request: Request) -> Row:
        params = dict(request.query_params)
        self.searches.append(params)
        rows = [job for job in self.jobs if _fits(job, params)]
        rows.sort(key=lambda job: job.get(ORDERS[params.get("order", "newest")]) or 0.0, reverse=True)
        first, limit = int(params.get("offset", 0)), int(params["limit"])
        return {"rows": rows[first : first + limit], "more": len(rows) > first + limit}

    def _timeline(self, job_id: str) -> Response:
        job = _found(self.jobs, "job_id", job_id)
        known = self.timelines.get(job_id) or timeline(job_id)
        if not Phase(job["phase"]).final:
            known = msgspec.structs.replace(known, ended_s=0.0, outcome="", spans=known.spans[:3])
        return Response(msgspec.json.encode(known), media_type="application/json")

    def _chat(self, body: Row, request: Request) -> Response:
        headers = dict(request.headers)
        if self.chat_key and headers.get("authorization") != f"Bearer {self.chat_key}":
            error = {"error": {"message": "this server needs an API key", "code": "invalid_api_key"}}
            return Response(json.dumps(error), status_code=401, media_type="application/json")
        self.chats.append((body, headers))
        return StreamingResponse(self._words(), media_type="text/event-stream")

    def _words(self) -> Iterator[str]:
        for place, word in enumerate(WORDS):
            if place == 2:
                self.chat_go.wait(WAIT_S)
            yield f"data: {json.dumps({'id': 'chatcmpl-x', 'choices': [{'delta': {'content': word}}]})}\n\n"
        yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': len(WORDS)}})}\n\n"
        yield "data: [DONE]\n\n"

    def _plan(self, what: str, target: str, body: Any, request: Request) -> None:
        self.planned.append((what, target, body, _actor(request)))
        self._change()

    def _mode(self, body: Row, request: Request) -> Row:
        self._plan("mode", "", body, request)
        self.fleet["auto"] = body["auto"]
        return self.fleet

    def _what_if(self, body: Row, request: Request) -> Row:
        self._plan("what-if", "", body, request)
        return self.what_if_answer

    def _proposals(self, limit: int) -> list[Row]:
        return self.proposals[:limit]

    def _decide(self, proposal_id: str, what: str, request: Request) -> Row:
        self._plan(what, proposal_id, None, request)
        proposal = _found(self.proposals, "proposal_id", proposal_id)
        steps = [{"at_s": T0 + 2, "what": "flip d1", "ok": True, "text": "in 1.4 s"}] if what == "accept" else []
        proposal.update(state="applied" if steps else "refused", who="dashboard", decided_s=T0 + 1, steps=steps)
        return proposal

    def _plans(self, limit: int) -> list[Row]:
        return [
            {**each, "result": each["result"] and {**each["result"], "cluster_file": ""}} for each in self.plans[:limit]
        ]

    def _submit(self, body: Row, request: Request) -> Row:
        self._plan("submit", "", body, request)
        self.plans.insert(0, sample_data.search(f"plan-{len(self.plans)}", "waiting"))
        return self.plans[0]

    def _cancel(self, plan_id: str, request: Request) -> Row:
        self._plan("cancel", plan_id, None, request)
        search = _found(self.plans, "plan_id", plan_id)
        search.update(sample_data.search(plan_id, "cancelled"))
        return search


def _actor(request: Request) -> str:
    return request.headers.get("x-polyphase-actor", "")


def _found(rows: Sequence[Row], key: str, wanted: str) -> Row:
    for row in rows:
        if row[key] == wanted:
            return row
    raise NotFound(f"no {key} {wanted!r}")


def _fits(job: Row, params: dict[str, str]) -> bool:
    wanted = {"slo": "slo", "outcome": "outcome", "phase": "phase", "caller": "caller", "job": "job_id"}
    if any(params[name] != job.get(column, "") for name, column in wanted.items() if name in params):
        return False
    if "instance" in params and params["instance"] not in (job["prefill_instance"], job["decode_instance"]):
        return False
    if "missed" in params and job["slo_met"] is not (params["missed"] == "false"):
        return False
    return float(params.get("since", 0)) <= job["arrived_s"]
