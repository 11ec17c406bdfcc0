"""Adapters that are loaded while the cluster serves: all or nothing, for instances that come later, for gateways that
follow, and over restarts of the monitor.
"""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from services.cluster_monitor import adapter_book
from shared.domain.adapters import AdapterSet, version_key
from shared.domain.instance import Role
from shared.errors import Conflict, EngineFailed, InvalidRequest, NotFound, PolyphaseError, Unavailable
from shared.wire.messages import AdaptersRequest, LoadRequest, UnloadRequest
from tests.ports import free_address
from tests.services.cluster_monitor.conftest import Cluster, Start
from tests.services.control_plane import until
from tests.services.fake_worker import FakeWorker, make_info

PATH, OTHER = "/adapters/sql", "/adapters/other"
DIGEST, SECOND = "a" * 32, "b" * 32
KEY, SECOND_KEY = version_key("sql", DIGEST), version_key("sql", SECOND)
SQL = LoadRequest("sql", PATH, who="anna")
LORA = {"allow_runtime_updating": True, "adapters": {"poems": "/adapters/poems"}, "max_adapters": 4}


async def monitored(start: Start, **changes: Any) -> Cluster:
    cluster: Cluster = await start(**{"lora": LORA, "served_model_name": "demo", "adapter_linger_s": 0.0, **changes})
    await until(lambda: cluster.state.adapters._recalled.is_set(), "the database has answered")
    return cluster


async def worker(cluster: Cluster, name: str, role: Role = Role.PREFILL, **info: Any) -> FakeWorker:
    """One that is ready, and can load what lies at PATH."""
    fields = {"loads_adapters": True, "adapters": {"poems": "c" * 32}, **info}
    found = await cluster.worker(name, role, info=make_info(name, free_address(), **fields))
    found.digests = {PATH: DIGEST}
    await cluster.wait_ready(name, role)
    return found


class Gateway:
    """Follows the adapters as a gateway does."""

    def __init__(self, cluster: Cluster, name: str = "gateway-0") -> None:
        self.cluster, self.name = cluster, name
        self.served = AdapterSet()
        self.in_use: tuple[str, ...] = ()

    async def look(self, wait_s: float = 0.0) -> set[str]:
        """Names, as of one request."""
        request = AdaptersRequest(self.name, self.served.revision, self.in_use, wait_s)
        self.served = await self.cluster.client.follow_adapters(request)
        return {each.name for each in self.served.adapters}

    async def follow(self) -> None:
        while True:
            await self.look(0.05)


async def test_an_adapter_is_served_by_all_instances_and_gateways_when_a_load_returns(start: Start) -> None:
    cluster = await monitored(start)
    workers = [await worker(cluster, "p0"), await worker(cluster, "d0", Role.DECODE)]
    gateway = Gateway(cluster)
    following = asyncio.create_task(gateway.follow())
    await until(lambda: gateway.served.revision, "the gateway follows")
    found = await cluster.client.load_adapter(SQL)
    assert gateway.served == found
    assert [(each.name, each.path, each.digest, each.who) for each in found.adapters] == [("sql", PATH, DIGEST, "anna")]
    assert all(KEY in each.adapters for each in workers)
    await until(lambda: all(KEY in cluster.seen(name).info.adapters for name in ("p0", "d0")), "broadcast")
    page = await cluster.client.adapters()
    assert (page.revision, page.trouble, page.adapters[0].instances) == (found.revision, "", ["d0", "p0"])
    assert [(each.gateway_id, each.follows) for each in page.gateways] == [("gateway-0", True)]
    assert (await cluster.client.load_adapter(LoadRequest("sql", PATH, True))).revision == found.revision

    gone = await cluster.client.unload_adapter(UnloadRequest("sql", "bert"))
    assert (gateway.served, gone.adapters) == (gone, ())
    await until(lambda: all(each.adapters == {"poems": "c" * 32} for each in workers), "the instances forget it")
    events = [event.text for event in await cluster.client.events(kinds=["adapters_changed"])]
    assert events == ["by bert: adapter sql unloaded", f"by anna: adapter sql loaded from {PATH}"]
    following.cancel()


async def test_what_one_instance_cannot_load_is_loaded_by_none(start: Start) -> None:
    cluster = await monitored(start)
    good, bad = await worker(cluster, "p0"), await worker(cluster, "d0", Role.DECODE)
    bad.digests = {}
    with pytest.raises(EngineFailed, match=r"^d0: LoRA rank 64 is greater than max_lora_rank 16\.$"):
        await cluster.client.load_adapter(SQL)
    assert good.calls == ["load sql", f"unload {KEY}"]
    bad.unloadable = NotFound(f"Loading lora sql failed: No adapter found for {PATH}")
    with pytest.raises(NotFound, match=f"^d0: Loading lora sql failed: No adapter found for {PATH}$"):
        await cluster.client.load_adapter(SQL)
    bad.digests = {PATH: SECOND}
    with pytest.raises(Conflict, match=f"hosts have other files at {PATH}: digests p0 {DIGEST}, d0 {SECOND}"):
        await cluster.client.load_adapter(SQL)
    assert [each.adapters for each in (good, bad)] == [{"poems": "c" * 32}] * 2
    assert await Gateway(cluster).look() == set()


async def test_an_instance_that_dies_meanwhile_is_named(start: Start) -> None:
    cluster = await monitored(start)
    good = await worker(cluster, "p0")
    async with cluster.mortal("d0", Role.DECODE, loads_adapters=True) as dying:
        dying.load_gate = asyncio.Event()
        await cluster.wait_ready("d0", Role.DECODE)
        loading = asyncio.create_task(cluster.client.load_adapter(SQL))
        await until(lambda: dying.calls == ["load sql"] and KEY in good.adapters, "one has it, and one loads it")
    with pytest.raises(PolyphaseError, match=r"^d0: "):
        await loading
    await until(lambda: KEY not in good.adapters, "the other forgets it")


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (LoadRequest("demo", PATH), r"^The lora adapter 'demo' conflicts with a served base model\.$"),
        (SQL, r"^The lora adapter 'sql' has already been loaded\. If you want to load the adapter in place, set 'loa"),
        (LoadRequest("poems", PATH), "^The lora adapter 'poems' has already been loaded"),
        (LoadRequest("poems", PATH, True), "^The lora adapter 'poems' is in the cluster file: change it there"),
        (LoadRequest("new", "adapters/new"), "adapter new: the path must be absolute, .* got 'adapters/new'"),
        (LoadRequest(KEY, PATH), "a name must not end in @ and 32 hexadecimal digits"),
        (LoadRequest("a b", PATH), "name"),
    ],
)
async def test_names_and_paths_that_are_refused(start: Start, request_: LoadRequest, says: str) -> None:
    cluster = await monitored(start)
    instance = await worker(cluster, "p0")
    before = await cluster.client.load_adapter(SQL)
    with pytest.raises(InvalidRequest, match=says):
        await cluster.client.load_adapter(request_)
    assert instance.calls == ["load sql"]
    gateway = Gateway(cluster)
    await gateway.look()
    assert gateway.served == before


async def test_unloads_that_are_refused(start: Start) -> None:
    cluster = await monitored(start)
    with pytest.raises(NotFound, match=r"^The lora adapter 'sql' cannot be found\.$"):
        await cluster.client.unload_adapter(UnloadRequest("sql"))
    with pytest.raises(InvalidRequest, match=r"^The lora adapter 'poems' is in the cluster file"):
        await cluster.client.unload_adapter(UnloadRequest("poems"))


async def test_there_is_room_for_so_many(start: Start) -> None:
    cluster = await monitored(start, lora={**LORA, "max_adapters": 2})
    await worker(cluster, "p0")
    await cluster.client.load_adapter(SQL)
    with pytest.raises(InvalidRequest, match=r"adapter more: 2 adapters are loaded, and `lora.max_adapters` allows 2"):
        await cluster.client.load_adapter(LoadRequest("more", PATH))


async def test_without_the_setting_or_an_instance_nothing_is_loaded(start: Start) -> None:
    cluster = await monitored(start, lora={"adapters": {"poems": "/adapters/poems"}})
    await worker(cluster, "p0")
    with pytest.raises(InvalidRequest, match="allow_runtime_updating: true"):
        await cluster.client.load_adapter(SQL)
    await cluster.stop()
    cluster = await monitored(start)
    await worker(cluster, "old", loads_adapters=False)
    with pytest.raises(Unavailable, match="adapter sql: no instance that could load it is ready"):
        await cluster.client.load_adapter(SQL)


async def test_an_instance_that_starts_later_gets_the_loaded_adapters(start: Start) -> None:
    cluster = await monitored(start)
    await worker(cluster, "p0")
    await cluster.client.load_adapter(SQL)
    late = await worker(cluster, "late")
    await until(lambda: KEY in late.adapters, "it is loaded there, too")
    changed = await cluster.worker(
        "changed", Role.DECODE, info=make_info("changed", free_address(), loads_adapters=True)
    )
    changed.digests = {PATH: SECOND}  # its host has other files by now
    await until(lambda: "load sql" in changed.calls, "it tries")

    async def trouble() -> dict[str, str]:
        return (await cluster.client.adapters()).adapters[0].trouble

    await until(trouble, "the trouble is shown")
    assert await trouble() == {"changed": "changed: other files"}
    assert changed.adapters == {}


async def test_instances_keep_former_weights_while_a_gateway_may_have_requests_for_them(start: Start) -> None:
    cluster = await monitored(start)
    instance = await worker(cluster, "p0")
    gateway = Gateway(cluster)
    await cluster.client.load_adapter(SQL)
    await gateway.look()
    gateway.in_use = (KEY,)
    instance.digests = {PATH: SECOND}
    loading = asyncio.create_task(cluster.client.load_adapter(LoadRequest("sql", PATH, True)))
    await until(lambda: SECOND_KEY in instance.adapters, "both versions are there")
    await until(lambda: cluster.state.adapters._set.keys == {SECOND_KEY}, "the new one is in force")
    assert not loading.done()  # the gateway has not followed yet
    await cluster.state.adapters.reconcile()
    assert set(instance.adapters) == {"poems", KEY, SECOND_KEY}
    await gateway.look()
    await gateway.look()
    await loading
    await cluster.state.adapters.reconcile()
    assert set(instance.adapters) == {"poems", KEY, SECOND_KEY}  # a request has it
    gateway.in_use = ()
    await gateway.look()
    await until(lambda: set(instance.adapters) == {"poems", SECOND_KEY}, "no request has it")


async def test_a_load_that_the_database_does_not_take_is_undone(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await monitored(start)
    instance = await worker(cluster, "p0")
    locked = sqlite3.connect(tmp_path / "polyphase.db", isolation_level=None, timeout=30.0, check_same_thread=False)
    await asyncio.to_thread(locked.execute, "BEGIN EXCLUSIVE")
    with monkeypatch.context() as patch:
        patch.setattr(adapter_book, "KEEP_S", 0.3)
        with pytest.raises(Unavailable, match=r"nothing is changed: the database did not take it within 0.3 s"):
            await cluster.client.load_adapter(SQL)
    assert instance.calls == ["load sql", f"unload {KEY}"]
    assert await Gateway(cluster).look() == set()
    locked.execute("COMMIT")
    locked.close()
    await until(lambda: not cluster.store.queued, "written")
    await cluster.stop()
    again = await monitored(start)
    assert await Gateway(again).look() == set()


async def test_a_restarted_monitor_knows_what_was_loaded(start: Start) -> None:
    first = await monitored(start)
    await worker(first, "p0")
    await first.client.load_adapter(SQL)
    loaded = await first.client.load_adapter(LoadRequest("two", PATH))
    await first.stop()
    second = await monitored(start)
    gateway = Gateway(second)
    assert await gateway.look() == {"sql", "two"}
    assert gateway.served == loaded
    again = await worker(second, "p1")
    await until(lambda: {KEY, version_key("two", DIGEST)} <= set(again.adapters), "a new instance gets them")
    await second.stop()
    renamed = await monitored(start, lora={**LORA, "adapters": {"sql": "/adapters/mine"}})
    gateway = Gateway(renamed)
    assert await gateway.look() == {"two"}  # the file has the other name
    assert gateway.served.revision > loaded.revision
