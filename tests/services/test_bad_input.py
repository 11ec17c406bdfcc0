"""Every route that changes something, of every service, is given what it should refuse: a clear 4xx that names what is
wrong, and nothing changes.

The routes are walked, so that a new one has to be added to `ROUTES` here, with a body that it would take.
"""

import copy
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from predictor.app import build_app as predictor_app
from predictor.settings import PredictorSettings
from services.cluster_monitor.app import create_app as monitor_app
from services.cluster_monitor.settings import MonitorSettings
from services.planner.app import create_app as planner_app
from services.planner.settings import PlannerSettings
from shared.domain.demand import DemandSecond
from shared.domain.instance import Role
from shared.runtime.keys import READING, new_token
from shared.wire.clients.monitor import MonitorClient
from tests.ports import free_address, free_port
from tests.services.all_apps import all_apps
from tests.services.control_plane import running, sqlite, until
from tests.services.fake_worker import FakeWorker, fake_worker, make_info
from tests.services.live_suite import serving

TOKEN = new_token()
OURS = {"Authorization": f"Bearer {TOKEN}"}
Call = tuple[str, str, str]  # service, method, path as its route has it

NEWCOMER = {**msgspec.to_builtins(make_info("x0", "tcp://127.0.0.1:9")), "role": "decode"}
COUNTED = {"source": "s", "second": 1, "requests": 1, "ended": 0}
SECOND = {name: COUNTED.get(name, 0.0) for name in DemandSecond.__struct_fields__}
OPERATION = {"operation_id": "op", "deadline_s": 4e9, "why": "w"}
MOVE = ("monitor", "POST", "/requests/{job_id}/move")
# A body that each would take, with every field that it knows; None: it takes none.
ROUTES: dict[Call, Any] = {
    ("monitor", "POST", "/instances"): NEWCOMER,
    ("monitor", "DELETE", "/instances/{instance_id}"): None,
    ("monitor", "POST", "/instances/{instance_id}/leave"): {"generation": 1},
    ("monitor", "POST", "/instances/{instance_id}/drain"): {**OPERATION, "force": False, "timeout_s": 1.0},
    ("monitor", "POST", "/instances/{instance_id}/resume"): OPERATION,
    ("monitor", "POST", "/instances/{instance_id}/flip"): {
        **OPERATION,
        "force": False,
        "to_role": "decode",
        "drain_timeout_s": 1.0,
    },
    MOVE: {"operation_id": "op", "deadline_s": 4e9, "to": "d1"},
    ("monitor", "POST", "/schedulers/{scheduler_id}/news"): {
        "revision": 1,
        "trouble": "",
        "demand": [SECOND],
        "outcomes": [{"slo": "", "ended_s": 1.0, "ttft_target_s": 1.0, "tpot_target_s": 1.0, "phase": "completed"}],
    },
    ("monitor", "POST", "/events"): {"event_id": "e", "kind": "plan_accepted", "text": "t", "subject": "s"},
    ("monitor", "PUT", "/policies"): {"split": {"name": "none", "parameters": {}}},
    ("monitor", "POST", "/adapters/load"): {"name": "a", "path": "/a", "in_place": False},
    ("monitor", "POST", "/adapters/unload"): {"name": "a"},
    ("monitor", "POST", "/adapters/follow"): {"gateway_id": "g", "revision": 1, "in_use": ["a"], "wait_s": 0.0},
    ("planner", "PUT", "/mode"): {"auto": True},
    ("planner", "POST", "/what-if"): {
        "lost": ["d0"],
        "added": [{"like": "d0", "count": 1, "role": "decode"}],
        "rate_factor": 1.0,
        "prompt_factor": 1.0,
        "output_factor": 1.0,
    },
    ("planner", "POST", "/proposals"): None,
    ("planner", "POST", "/proposals/{proposal_id}/accept"): None,
    ("planner", "POST", "/proposals/{proposal_id}/refuse"): None,
    ("planner", "POST", "/plans"): {
        "inventory": "nodes: []",
        "model": "Llama-3-8B",
        "workload": "azure-conv",
        "slo": {"ttft_s": 1.0, "tpot_s": 1.0},
        "rate": 1.0,
        "target": 0.9,
        "budget": 1.0,
        "cheapest": False,
        "method": "best",
        "compare": True,
        "seconds": 1.0,
        "requests": 10,
        "codec": "raw",
        "engine": "emulated",
        "one_node": False,
        "max_model_len": 100,
        "chunk_size": 100,
        "seed": 1,
    },
    ("planner", "POST", "/plans/{plan_id}/cancel"): None,
    ("predictor", "POST", "/v1/predict"): {"prompt": "hello", "max_tokens": 3, "timeout_ms": 5.0},
    ("predictor", "POST", "/v1/observations"): [{"prompt_tokens": 5, "output_tokens": 9}],
    ("predictor", "POST", "/v1/model/reload"): None,
    ("predictor", "POST", "/v1/model/use"): {"use": "auto"},
}
PATHS = {"instance_id": "d0", "scheduler_id": "s0", "job_id": "job-1", "proposal_id": "nobody", "plan_id": "nobody"}


@dataclass(frozen=True)
class Bad:
    """What is refused, and a word of why. body: bytes go as they are, None: no body at all."""

    call: Call
    body: Any
    word: str
    status: int = 400
    path: str = ""

    def __str__(self) -> str:
        return f"{self.call[1]} {self.path or self.call[2]} {json.dumps(self.body, default=repr)[:60]} [{self.word}]"


def _op(instance: str, what: str, body: Any, word: str, status: int = 400) -> Bad:
    call = ("monitor", "POST", f"/instances/{{instance_id}}/{what}")
    return Bad(call, body, word, status, f"/instances/{instance}/{what}")


def _policies(body: Any, *words: str) -> list[Bad]:
    return [Bad(("monitor", "PUT", "/policies"), body, word) for word in words]


# Of the state of the cluster: p0 is the only prefill instance, d0 and d1 decode; all three are ready.
CASES = [
    *(_op("ghost", what, {}, "'ghost'", 404) for what in ("drain", "resume", "flip")),
    _op("ghost", "leave", {"generation": 1}, "'ghost'", 404),
    _op("d0", "leave", {"generation": 7}, "generation 1, not 7", 409),
    _op("p0", "drain", {}, "p0 is the last ready prefill", 409),
    _op("p0", "flip", {}, "p0 is the last ready prefill", 409),
    _op("d0", "flip", {"to_role": "decode"}, "d0 has the role decode already", 409),
    _op("d0", "flip", {"to_role": "both"}, "to_role"),
    _op("d0", "flip", {"force": "yes"}, "force"),
    _op("d0", "flip", {"force": 1}, "force"),
    _op("d0", "drain", {"timeout_s": "5"}, "timeout_s"),
    _op("d0", "drain", {"timeout_s": -1.0}, "timeout_s"),
    _op("d0", "drain", {"timeout_s": 1e9}, "timeout_s"),
    _op("d0", "drain", b'{"timeout_s": NaN}', "timeout_s"),
    _op("d0", "drain", {"operation_id": "no blanks"}, "operation_id"),
    Bad(MOVE, {}, "'ghost'", 404, "/requests/ghost/move"),
    Bad(MOVE, {"to": "d9"}, "'d9'", 404),
    Bad(MOVE, {"to": "p0"}, "p0 cannot take job-1 over: it is a prefill instance", 409),
    Bad(MOVE, {"to": "no blanks"}, "to"),
    Bad(("monitor", "DELETE", "/instances/{instance_id}"), None, "'ghost'", 404, "/instances/ghost"),
    Bad(("monitor", "DELETE", "/instances/{instance_id}"), None, "only dead instances", 409, "/instances/d0"),
    Bad(("monitor", "POST", "/instances"), {**NEWCOMER, "instance_id": "d0"}, "d0 is ready at", 409),
    Bad(("monitor", "POST", "/instances"), {**NEWCOMER, "instance_id": "../x"}, "instance_id"),
    Bad(("monitor", "POST", "/instances"), {**NEWCOMER, "rpc": "tcp://x:99999"}, "99999"),
    Bad(("monitor", "POST", "/schedulers/{scheduler_id}/news"), {"revision": 1}, "id", 400, "/schedulers/a b/news"),
    *_policies({"colour": {"name": "red"}}, "colour", "placement"),
    *_policies({"split": {"name": "sometimes"}}, "sometimes", "split"),
    *_policies({"split": {"name": "fraction", "parameters": {"fraction": 7}}}, "fraction"),
    *_policies({"split": {"name": "fraction", "parameters": {"share": 0.5}}}, "share"),
    *_policies({"split": "none"}, "split"),
    *_policies({"split": {"name": "none"}, "placement": {"name": "nowhere"}}, "nowhere"),
    Bad(("monitor", "POST", "/adapters/load"), {"name": "a", "path": "/a"}, "allow_runtime_updating"),
    Bad(("monitor", "POST", "/adapters/unload"), {"name": "a"}, "allow_runtime_updating"),
    Bad(("monitor", "POST", "/adapters/follow"), {"gateway_id": "g", "wait_s": 1e9}, "wait_s"),
    *(
        Bad(("planner", "POST", f"/proposals/{{proposal_id}}/{what}"), None, "'ghost'", 404, f"/proposals/ghost/{what}")
        for what in ("accept", "refuse")
    ),
    Bad(("planner", "POST", "/plans/{plan_id}/cancel"), None, "'ghost'", 404, "/plans/ghost/cancel"),
    Bad(("planner", "PUT", "/mode"), {"auto": "yes"}, "auto"),
    Bad(("planner", "POST", "/what-if"), {"lost": ["ghost"]}, "ghost"),
    Bad(("planner", "POST", "/what-if"), {"added": [{"like": "ghost"}]}, "ghost"),
    Bad(("planner", "POST", "/plans"), {"inventory": "nodes: []", "model": "NoSuch"}, "NoSuch"),
    Bad(("predictor", "POST", "/v1/model/use"), {"use": "sometimes"}, "use"),
    Bad(("predictor", "POST", "/v1/observations"), [{"prompt_tokens": -1, "output_tokens": 9}], "prompt_tokens"),
    Bad(("predictor", "POST", "/v1/predict"), {}, "prompt"),
]


# Sent by services alone, whose wire versions are compared: an unknown field is an optional one of a later release.
OF_SERVICES = (
    ("monitor", "POST", "/instances"),
    ("monitor", "POST", "/instances/{instance_id}/leave"),
    ("monitor", "POST", "/schedulers/{scheduler_id}/news"),
    ("monitor", "POST", "/events"),
    ("monitor", "POST", "/adapters/follow"),
)


def spoilt() -> Iterator[Bad]:
    """Of each route: what is no JSON, no object, has an unknown field anywhere, or a field of another type."""
    for call, body in ROUTES.items():
        if body is None:
            yield Bad(call, {"surprise": 1}, "body")
            continue
        yield Bad(call, b"{", "")
        yield Bad(call, "text", "body")
        yield Bad(call, 5, "body")
        yield Bad(call, {"surprise": 1} if isinstance(body, list) else [7], "body")
        if call[2] == "/policies":  # its fields are the kinds, of which there are cases above
            yield Bad(call, {"split": {"name": "none", "surprise": 1}}, "surprise")
            yield Bad(call, {"split": {"name": 5}}, "name")
            continue
        for where in places(body) if call not in OF_SERVICES else ():
            yield Bad(call, changed(body, (*where, "surprise"), 1), "surprise")
        for where in fields(body):
            wrong = {"wrong": 1} if not isinstance(at(body, where), dict) else "wrong"
            yield Bad(call, changed(body, where, wrong), str(where[-1]))


def places(body: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every object in it."""
    if isinstance(body, dict):
        yield where
    for key, value in body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ():
        if key not in ("coded", "slow", "codecs"):  # which are mappings of names
            yield from places(value, (*where, key))


def fields(body: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every field in it, at any depth."""
    for key, value in body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ():
        if isinstance(key, str):
            yield (*where, key)
        yield from fields(value, (*where, key))


def at(body: Any, where: tuple[Any, ...]) -> Any:
    for key in where:
        body = body[key]
    return body


def changed(body: Any, where: tuple[Any, ...], value: Any) -> Any:
    copied = copy.deepcopy(body)
    at(copied, where[:-1])[where[-1]] = value
    return copied


@dataclass
class Services:
    """Those that have something to change, running; and the instances of their cluster."""

    apps: dict[str, FastAPI]
    http: dict[str, httpx.AsyncClient]
    workers: list[FakeWorker]

    async def send(self, bad: Bad, headers: dict[str, str], query: str = "") -> httpx.Response:
        service, method, path = bad.call
        body = None if bad.body is None else bad.body if isinstance(bad.body, bytes) else json.dumps(bad.body).encode()
        said = {**headers, **({"content-type": "application/json"} if body is not None else {})}
        url = (bad.path or path.format(**PATHS)) + query
        return await self.http[service].request(method, url, content=body, headers=said)

    async def state(self) -> dict[str, Any]:
        """All that the routes could have changed."""
        monitor, planner, predictor = (self.http[name] for name in ("monitor", "planner", "predictor"))
        instances = (await monitor.get("/instances")).json()
        model = (await predictor.get("/v1/model")).json()
        kept = ("instance_id", "role", "state", "operation", "death", "info", "registered_s")
        policies = (await monitor.get("/policies")).json()
        return {
            "instances": [{key: one[key] for key in kept} for one in instances],
            "policies": {key: policies[key] for key in ("revision", "policies")},
            "schedulers": [one["name"] for one in policies["followers"] if one["process"] == "scheduler"],
            "adapters": (await monitor.get("/adapters")).json(),
            "slo": (await monitor.get("/slo")).json(),
            "demand": (await monitor.get("/demand")).json()["demand"],
            "auto": (await planner.get("/fleet")).json()["auto"],
            "proposals": (await planner.get("/proposals")).json(),
            "plans": (await planner.get("/plans")).json(),
            "model": {key: model[key] for key in ("use", "observed", "checkpoint")},
            "calls": [list(worker.calls) for worker in self.workers],
        }


@pytest.fixture(scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    folder: Path = tmp_path_factory.mktemp("bad_input")
    async with AsyncExitStack() as stack:
        common: dict[str, Any] = {"database_url": sqlite(folder), "cluster_token": TOKEN}
        settings = MonitorSettings(heartbeat_address=free_address(), broadcast_address=free_address(), **common)
        port = free_port()
        apps = {"monitor": monitor_app(settings), "predictor": predictor_app(PredictorSettings(cluster_token=TOKEN))}
        await stack.enter_async_context(serving(apps["monitor"], port))
        url = f"http://127.0.0.1:{port}"
        apps["planner"] = planner_app(
            PlannerSettings(monitor_url=url, broadcast_address=settings.broadcast_address, **common)
        )
        http = {"monitor": await stack.enter_async_context(httpx.AsyncClient(base_url=url, trust_env=False))}
        for name in ("predictor", "planner"):
            transport = await stack.enter_async_context(running(apps[name]))
            client = httpx.AsyncClient(transport=transport, base_url="http://service")
            http[name] = await stack.enter_async_context(client)
        monitor = await stack.enter_async_context(MonitorClient(url, token=TOKEN))
        workers = []
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
            worker = fake_worker(make_info(name, free_address()), role, settings.heartbeat_address, monitor)
            workers.append(await stack.enter_async_context(worker))

        async def ready() -> bool:
            recalled = (await monitor.policies()).revision > 0
            return recalled and [one.state for one in await monitor.instances()] == ["ready"] * 3

        await until(ready, "all are ready", timeout_s=20)
        yield Services(apps, http, workers)


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_every_route_that_changes_something_is_here() -> None:
    found = {
        (name, method, route.path)
        for name, app in all_apps(cluster_token=TOKEN).items()
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods - READING
    }
    assert found == set(ROUTES)
    assert {case.call for case in CASES} >= {call for call in ROUTES if "{" in call[2] and call[0] == "monitor"}


@pytest.mark.parametrize("bad", [*CASES, *spoilt()], ids=str)
async def test_it_is_refused_names_the_culprit_and_changes_nothing(services: Services, bad: Bad) -> None:
    before = await services.state()
    answer = await services.send(bad, OURS)
    assert answer.status_code == bad.status, answer.text
    message = answer.json()["error"]["message"]
    assert bad.word in message
    assert await services.state() == before


@pytest.mark.parametrize("call", ROUTES, ids=lambda call: f"{call[1]} {call[2]}")
async def test_without_the_key_or_with_another_nothing_is_done(services: Services, call: Call) -> None:
    """Not even what would be right otherwise."""
    before = await services.state()
    good = Bad(call, ROUTES[call], "")
    for headers, status in (({}, 401), ({"Authorization": f"Bearer {new_token()}"}, 403)):
        answer = await services.send(good, headers)
        assert answer.status_code == status
        assert f"{call[1]} " in answer.json()["error"]["message"]
    assert await services.state() == before


@pytest.mark.parametrize("call", ROUTES, ids=lambda call: f"{call[1]} {call[2]}")
async def test_a_parameter_that_nobody_knows_is_named(services: Services, call: Call) -> None:
    """`?force=true` beside a body would else be taken for granted."""
    before = await services.state()
    answer = await services.send(Bad(call, ROUTES[call], ""), OURS, "?force=true")
    assert answer.status_code == 400
    assert "query.force" in answer.json()["error"]["message"]
    assert await services.state() == before
