"""Adapters that operators load: vLLM's API for the whole cluster, and which version a request gets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI

from gateway.adapters import ServedAdapters, routes
from gateway.admission import current_request
from shared.domain.adapters import AdapterSet, LoadedAdapter, version_key
from shared.errors import EngineFailed, InvalidRequest, NotFound, PolyphaseError, Unavailable
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.messages import ADAPTERS, LOAD, UNLOAD, AdaptersRequest, LoadRequest, UnloadRequest
from shared.wire.rpc_client import RpcClients
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Sockets
from tests.gateway.api import Api
from tests.gateway.cluster import until
from tests.ports import free_address

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
ONE, TWO = "1" * 32, "2" * 32


@dataclass
class Monitor:
    """A scheduler that passes calls on to a monitor. `refusal` is raised instead of a load or unload."""

    loaded: AdapterSet = field(default_factory=lambda: AdapterSet(1))
    digest: str = ONE
    refusal: PolyphaseError | None = None
    requests: list[AdaptersRequest] = field(default_factory=list)
    loads: list[LoadRequest] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def set(self, *adapters: LoadedAdapter) -> AdapterSet:
        self.loaded = AdapterSet(self.loaded.revision + 1, adapters)
        self.changed.set()
        self.changed = asyncio.Event()
        return self.loaded

    async def adapters(self, request: AdaptersRequest, _: ServerCall) -> AdapterSet:
        self.requests.append(request)
        if request.revision == self.loaded.revision:
            try:
                async with asyncio.timeout(request.wait_s):
                    await self.changed.wait()
            except TimeoutError:
                pass
        return self.loaded

    async def load(self, request: LoadRequest, _: ServerCall) -> AdapterSet:
        self.loads.append(request)
        if self.refusal is not None:
            raise self.refusal
        others = [each for each in self.loaded.adapters if each.name != request.name]
        return self.set(*others, LoadedAdapter(request.name, request.path, self.digest))

    async def unload(self, request: UnloadRequest, _: ServerCall) -> AdapterSet:
        if self.refusal is not None:
            raise self.refusal
        return self.set(*(each for each in self.loaded.adapters if each.name != request.name))


@dataclass
class Loading:
    """The API with adapters that can be loaded."""

    api: Api
    monitor: Monitor
    adapters: ServedAdapters
    client: httpx.AsyncClient  # of the routes

    async def load(self, name: str = "new", path: str = "/a/new", **more: Any) -> httpx.Response:
        return await self.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})

    async def unload(self, name: str = "new") -> httpx.Response:
        return await self.client.post("/v1/unload_lora_adapter", json={"lora_name": name, "lora_int_id": 7})

    async def names(self) -> dict[str, str]:
        """Of the models, with their paths."""
        cards = (await self.api.client.get("/v1/models")).json()["data"]
        return {card["id"]: card["root"] for card in cards if card["parent"]}

    def keys(self) -> set[str]:
        """Of the adapters of the requests that instances have had."""
        workers = self.api.cluster.workers
        requests = [each for worker in workers for each in (*worker.prefills, *worker.decodes)]
        return {each.generation.adapter for each in requests} | {each.job.adapter for each in requests}


@pytest_asyncio.fixture(loop_scope="session")
async def loading(api: Api, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Loading]:
    monitor, address = Monitor(), free_address()
    models = api.state.openai_serving_models
    monkeypatch.setattr(models, "lora_requests", dict(models.lora_requests))
    async with AsyncExitStack() as stack:
        sockets = Sockets()
        stack.callback(sockets.close)
        handlers = {ADAPTERS: monitor.adapters, LOAD: monitor.load, UNLOAD: monitor.unload}
        await stack.enter_async_context(RpcServer(sockets, address, handlers))
        clients = stack.enter_context(RpcClients(sockets))
        adapters = ServedAdapters(
            api.settings, SchedulerClient(clients, (address,)), models, lambda: api.core.loaded_adapters
        )
        monkeypatch.setattr(api.core, "adapter_key", adapters.key_of)
        app = FastAPI()
        app.include_router(routes(adapters))

        async def with_state(scope: Any, receive: Any, send: Any) -> None:
            with api.admission.for_class("default").admit("anna", "default") as state:
                current_request.set(state)
                await app(scope, receive, send)

        transport = httpx.ASGITransport(with_state)
        client = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://gateway"))
        following = asyncio.create_task(adapters.follow())
        stack.callback(following.cancel)
        await adapters.wait()
        assert not adapters.unknown
        yield Loading(api, monitor, adapters, client)


FILE = {"sql": "/adapters/sql", "org/poems": "/adapters/poems"}


async def test_a_loaded_adapter_is_a_model_until_it_is_unloaded(loading: Loading) -> None:
    assert await loading.names() == FILE
    assert (await loading.api.complete(model="new")).status_code == 404
    response = await loading.load()
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert loading.monitor.loads == [LoadRequest("new", "/a/new", False, "anna")]
    assert await loading.names() == {**FILE, "new": "/a/new"}
    answer = await loading.api.complete(model="new")
    assert (answer.status_code, answer.json()["model"]) == (200, "new")
    assert loading.keys() == {version_key("new", ONE)}
    response = await loading.unload()
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert await loading.names() == FILE
    assert "The model `new` does not exist." in (await loading.api.complete(model="new")).text


async def test_other_gateways_changes_are_followed(loading: Loading) -> None:
    loading.monitor.set(LoadedAdapter("b", "/a/b", ONE), LoadedAdapter("demo", "/a/demo", TWO))
    await until(lambda: loading.monitor.requests[-1].revision == loading.monitor.loaded.revision)
    assert await loading.names() == {**FILE, "b": "/a/b"}  # a base model's name is not given away
    loading.monitor.set()
    await until(lambda: loading.monitor.requests[-1].revision == loading.monitor.loaded.revision)
    assert await loading.names() == FILE


async def test_requests_under_way_keep_the_version_with_which_they_began(loading: Loading) -> None:
    await loading.load()
    first, second = version_key("new", ONE), version_key("new", TWO)
    models, goes = loading.api.state.openai_serving_models, asyncio.Event()
    accepted = models.lora_requests["new"]
    for worker in loading.api.cluster.decodes:
        worker.before_token = lambda _: goes.wait()
    running = asyncio.create_task(loading.api.complete(model="new"))
    await until(lambda: loading.keys() == {first})
    loading.monitor.digest = TWO
    assert (await loading.load(load_inplace=True)).status_code == 200
    await until(lambda: loading.monitor.requests[-1].in_use == (first,))
    assert loading.adapters.key_of(accepted) == first  # also of a request that is not a job yet
    other = asyncio.create_task(loading.api.complete(model="new"))
    await until(lambda: loading.keys() == {first, second})
    goes.set()
    assert [response.status_code for response in await asyncio.gather(running, other)] == [200, 200]
    await until(lambda: loading.monitor.requests[-1].in_use == ())
    await loading.unload()
    assert loading.adapters.key_of(accepted) == first


@pytest.mark.parametrize(
    ("body", "refusal", "status", "kind", "says"),
    [
        ({"lora_name": ""}, None, 400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "demo"}, None, 400, "InvalidUserInput", "'demo' conflicts with a served base model."),
        ({"lora_name": "sql"}, None, 400, "InvalidUserInput", "'sql' has already been loaded."),
        ({"is_3d_lora_weight": True}, None, 400, "InvalidUserInput", "is_3d_lora_weight cannot be served"),
        ({}, InvalidRequest("it is in the file"), 400, "InvalidUserInput", "it is in the file"),
        ({}, NotFound("d0: no adapter found"), 404, "NotFoundError", "d0: no adapter found"),
        ({}, EngineFailed("d0: rank 64"), 500, "InternalServerError", "d0: rank 64"),
        ({}, Unavailable("no instance"), 503, "Service Unavailable", "no instance"),
    ],
)
async def test_refused_loads_have_vllms_statuses_and_types(
    loading: Loading, body: dict[str, Any], refusal: PolyphaseError | None, status: int, kind: str, says: str
) -> None:
    loading.monitor.refusal = refusal
    response = await loading.load(**{"name": body.pop("lora_name", "new"), **body})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (status, status, kind)
    assert says in error["message"]
    assert await loading.names() == FILE


async def test_refused_unloads(loading: Loading) -> None:
    response = await loading.unload("none")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "NotFoundError")
    assert "The lora adapter 'none' cannot be found." in response.text
    loading.monitor.refusal = InvalidRequest("it is in the cluster file")
    response = await loading.unload("sql")
    assert (response.status_code, response.json()["error"]["message"]) == (400, "it is in the cluster file")
    assert await loading.names() == FILE
