"""A planner of one process: what it answers over HTTP, and what it was asked to do."""

import threading
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response

from shared.errors import NotFound, PolyphaseError
from shared.runtime.http import error_response

T0 = 1_790_000_000.0
WAIT_S = 20.0
CLUSTER_FILE = "name: found\ninstances: []\n"


def member(instance_id: str, role: str = "prefill", state: str = "ready", **more: Any) -> dict[str, Any]:
    """An instance of `GET /fleet`."""
    made = {"instance_id": instance_id, "role": role, "state": state, "accelerator": "A40", "tensor_parallel": 2}
    return {**made, "pipeline_parallel": 1, "load": 0.4, **more}


def route(prefill: str | None, decode: str, share: float) -> dict[str, Any]:
    return {"prefill": prefill, "decode": decode, "share": share}


def expected(goodput: float = 6.0, **more: Any) -> dict[str, Any]:
    return {"rate": 4.2, "goodput": goodput, "attainment": 0.97, "ttft_s": 0.41, "tpot_s": 0.062, **more}


def small_fleet() -> dict[str, Any]:
    """Two prefill and two decode instances, of which one computes prompts itself."""
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
        "demand": {"rate": 4.2, "prompt_tokens": 1210.0, "output_tokens": 180.0, "ttft_s": 1.0, "tpot_s": 0.1},
        "expected": expected(),
        "measured": {
            "requests": 252,
            "window_s": 60.0,
            "attainment": 0.81,
            "ttft_p50_s": 0.66,
            "tpot_p50_s": 0.06,
            "rate": 4.3,
        },
        "promise": {"rate": 5.0, "goodput": 6.2, "attainment": 0.95, "ttft_mean_s": 0.5, "tpot_mean_s": 0.07},
    }


def large_fleet(count: int = 64) -> dict[str, Any]:
    """Four kinds of hardware; a few are draining or lost."""
    kinds = ("H100", "A100", "A40", "L4")
    states = {5: "draining", 9: "lost", 41: "lost"}
    members = [
        member(
            f"{'prefill' if at % 3 == 0 else 'decode'}-{kinds[at % 4].lower()}-{at}",
            "prefill" if at % 3 == 0 else "decode",
            states.get(at, "ready"),
            accelerator=kinds[at % 4],
            load=(at * 37 % 100) / 100,
        )
        for at in range(count)
    ]
    sources = [one["instance_id"] for one in members if one["role"] == "prefill"]
    ends = [one["instance_id"] for one in members if one["role"] == "decode"]
    routes = [route(sources[at % len(sources)], end, 1 / len(ends)) for at, end in enumerate(ends)]
    return {**small_fleet(), "instances": members, "routes": routes}


def proposal(proposal_id: str, state: str = "open", **more: Any) -> dict[str, Any]:
    made = {
        "proposal_id": proposal_id,
        "state": state,
        "made_s": T0,
        "noticed_s": 1.5,
        "took_s": 0.31,
        "cause": "shift",
        "why": "Prompts are 2.4 times as long: <i>p0</i> and p1 cannot compute them in time.",
        "flips": [{"instance_id": "d1", "from_role": "decode", "to_role": "prefill"}],
        "routes": [route("p0", "d0", 0.5), route("d1", "d0", 0.5)],
        "changes_routes": True,
        "now": expected(3.1, attainment=0.61),
        "then": expected(5.4, attainment=0.94, ttft_s=0.3, tpot_s=0.081),
        "decided_s": None,
        "who": "",
        "steps": [],
        "error": "",
    }
    return {**made, **more}


def search(plan_id: str, state: str = "done", **more: Any) -> dict[str, Any]:
    result = {
        "method": "best",
        "groups": [
            {
                "name": f"{role}-{at}",
                "role": role,
                "accelerators": "2 × A40 on a40-0",
                "layout": "TP2",
                "tensor_parallel": 2,
                "price_usd_hour": 0.9,
            }
            for role in ("prefill", "decode")
            for at in range(2)
        ],
        "routes": [route("prefill-0", "decode-0", 0.6), route(None, "decode-1", 0.4)],
        "policies": "adaptive",
        "promise": {
            "goodput": 7.4,
            "rate": 6.0,
            "attainment": 0.98,
            "ttft_mean_s": 0.33,
            "tpot_mean_s": 0.05,
            "usd_per_million_tokens": 0.21,
            "usd_per_hour": 3.6,
        },
        "compared": [{"method": "tabu", "goodput": 6.6}, {"method": "coupled", "goodput": 4.1}],
        "cluster_file": CLUSTER_FILE,
    }
    made = {
        "plan_id": plan_id,
        "state": state,
        "who": "anna",
        "submitted_s": T0,
        "ended_s": None if state in ("waiting", "running") else T0 + 42.0,
        "progress": {"what": "judging candidates", "best_goodput": 6.8, "elapsed_s": 12.0},
        "result": result if state in ("done", "cancelled") else None,
        "error": "no deployment fits" if state == "failed" else "",
    }
    return {**made, **more}


@dataclass
class FakePlanner:
    """What it answers, and what it was asked to do. It answers no question while `go` is not set."""

    fleet: dict[str, Any] = field(default_factory=small_fleet)
    proposals: list[dict[str, Any]] = field(default_factory=list)
    plans: list[dict[str, Any]] = field(default_factory=list)
    answer: dict[str, Any] = field(default_factory=dict)
    away: bool = False
    refusal: PolyphaseError | None = None
    done: list[tuple[str, str, Any, str]] = field(default_factory=list)  # what, id, body, actor
    reads: int = 0
    read: threading.Condition = field(default_factory=threading.Condition)
    go: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def __post_init__(self) -> None:
        self.go.set()

    def refreshed(self, times: int) -> None:
        """Wait until the page has read the fleet so many times more."""
        with self.read:
            assert self.read.wait_for(lambda wanted=self.reads + times: self.reads >= wanted, WAIT_S)

    def act(self, what: str, target: str, body: Any, request: Request) -> None:
        """Note it. Raises the refusal, if there is one."""
        self.done.append((what, target, body, request.headers.get("x-polyphase-actor", "")))
        self.go.wait(WAIT_S)
        if self.refusal is not None:
            raise self.refusal

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_exception_handler(PolyphaseError, error_response)

        @app.middleware("http")
        async def gone(request: Request, go_on: Any) -> Any:
            return Response(status_code=503) if self.away else await go_on(request)

        @app.get("/fleet")
        def fleet() -> dict[str, Any]:
            with self.read:
                self.reads += 1
                self.read.notify_all()
            return self.fleet

        @app.put("/mode")
        def mode(body: dict[str, Any], request: Request) -> dict[str, Any]:
            self.act("mode", "", body, request)
            self.fleet["auto"] = body["auto"]
            return self.fleet

        @app.post("/what-if")
        def what_if(body: dict[str, Any], request: Request) -> dict[str, Any]:
            self.act("what-if", "", body, request)
            return self.answer

        self._proposals(app)
        self._plans(app)
        return app

    def _proposals(self, app: FastAPI) -> None:
        @app.get("/proposals")
        def proposals(limit: int) -> list[dict[str, Any]]:
            return self.proposals[:limit]

        @app.post("/proposals/{proposal_id}/{what}")
        def decide(proposal_id: str, what: str, request: Request) -> dict[str, Any]:
            self.act(what, proposal_id, None, request)
            one = _found(self.proposals, "proposal_id", proposal_id)
            state = "applied" if what == "accept" else "refused"
            steps = [{"at_s": T0 + 2, "what": "flip d1", "ok": True, "text": "in 1.4 s"}] if what == "accept" else []
            one.update(state=state, who="dashboard", decided_s=T0 + 1, steps=steps)
            return one

    def _plans(self, app: FastAPI) -> None:
        @app.get("/plans")
        def plans(limit: int) -> list[dict[str, Any]]:
            return [
                {**one, "result": one["result"] and {**one["result"], "cluster_file": ""}} for one in self.plans[:limit]
            ]

        @app.get("/plans/{plan_id}")
        def plan(plan_id: str) -> dict[str, Any]:
            return _found(self.plans, "plan_id", plan_id)

        @app.post("/plans")
        def submit(body: dict[str, Any], request: Request) -> dict[str, Any]:
            self.act("submit", "", body, request)
            self.plans.insert(0, search(f"plan-{len(self.plans)}", "waiting"))
            return self.plans[0]

        @app.post("/plans/{plan_id}/cancel")
        def cancel(plan_id: str, request: Request) -> dict[str, Any]:
            self.act("cancel", plan_id, None, request)
            one = _found(self.plans, "plan_id", plan_id)
            one.update(search(plan_id, "cancelled"))
            return one


def _found(rows: list[dict[str, Any]], key: str, wanted: str) -> dict[str, Any]:
    for row in rows:
        if row[key] == wanted:
            return row
    raise NotFound(f"no {wanted!r}")
