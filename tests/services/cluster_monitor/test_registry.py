"""What heartbeats make of a record."""

import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from pydantic import ValidationError

from services.cluster_monitor.edge import Registration
from services.cluster_monitor.registry import UNDER_WAY_S, Record, check
from shared.domain.instance import InstanceInfo, InstanceLoad, InstanceState, KvComponent, KvKind, Promised, Role
from shared.domain.rates import UNKNOWN_STEPS, LinkRate, Rates
from shared.errors import Conflict, Incompatible, InvalidRequest, NotFound, WireVersionMismatch
from shared.runtime.wire_version import OURS, WireVersions
from shared.store.reading import read_instances
from shared.wire.api import SchedulerNews
from shared.wire.messages import Heartbeat
from tests.ports import free_address
from tests.services.cluster_monitor.conftest import Cluster, Start
from tests.services.control_plane import request, text, until
from tests.services.fake_worker import FIT, GEOMETRY, fake_worker, make_info

OTHER = msgspec.structs.replace(FIT, fingerprint="fp-2")
WINDOWS = KvComponent(KvKind.HEADS, (0, 2, 4), sides=2, heads=4, head_dim=64, window=127)
FULL = KvComponent(KvKind.HEADS, (1, 3, 5), sides=2, heads=4, head_dim=64)
STATE = KvComponent(KvKind.STATE, (6,), 1, 8, 128, window=1, part="state 1", dtype="float32")


def fit_with(*components: KvComponent, **changes: Any) -> Any:
    geometry = msgspec.structs.replace(GEOMETRY, components=components, **changes)
    return msgspec.structs.replace(FIT, geometry=geometry)


def registration(**changes: Any) -> dict[str, Any]:
    """A body as JSON has it."""
    body = {**msgspec.to_builtins(make_info("p0", free_address())), "role": "prefill", **changes}
    return cast(dict[str, Any], json.loads(json.dumps(body)))


def test_the_edge_mirrors_the_domain() -> None:
    assert set(Registration.model_fields) == {*InstanceInfo.__struct_fields__, "role"}


def test_a_body_brings_what_the_instance_is() -> None:
    info = make_info("p0", "tcp://127.0.0.1:2", adapters={"a": "1"}, media=("image", "video"), kv_dtype="float16")
    body = json.loads(json.dumps({**msgspec.to_builtins(info), "role": "prefill"}))
    assert Registration.model_validate(body).to_info() == info


async def test_an_instance_joins_and_is_broadcast_as_ready(cluster: Cluster) -> None:
    await cluster.workers(p0=Role.PREFILL, d0=Role.DECODE)
    sequences = [view.sequence for view in cluster.views]
    assert sequences == sorted(set(sequences))
    listed = await cluster.client.instances()
    assert [(i.instance_id, i.role, i.state) for i in listed] == [("d0", "decode", "ready"), ("p0", "prefill", "ready")]
    assert listed[0].load.free_blocks == 900
    assert (await cluster.client.instance("p0")).connected
    with pytest.raises(NotFound):
        await cluster.client.instance("nobody")


async def test_the_first_sets_the_model_until_the_last_has_left(cluster: Cluster) -> None:
    async with cluster.mortal("p0", Role.PREFILL):
        with pytest.raises(Incompatible, match="'fp-2', the cluster has 'fp-1'"):
            await cluster.client.register(make_info("x", free_address(), compatibility=OTHER), Role.DECODE)
        await cluster.wait_ready("p0", Role.PREFILL)
    await cluster.wait_state("p0", InstanceState.DEAD)
    await cluster.client.register(make_info("x", free_address(), compatibility=OTHER), Role.DECODE)


async def test_registering_again_changes_nothing_but_measured_rates(cluster: Cluster) -> None:
    (worker,) = await cluster.workers(p0=Role.PREFILL)
    record = cluster.state.registry.get("p0")
    rates = Rates(UNKNOWN_STEPS)
    faster = msgspec.structs.replace(worker.info, rates=rates)
    await cluster.client.register(faster, Role.PREFILL)
    assert cluster.state.registry.get("p0") is record
    assert record.info.rates == rates
    assert record.state is InstanceState.READY


async def test_generations_and_addresses_tell_processes_apart(cluster: Cluster) -> None:
    address = free_address()
    await cluster.worker("p0", Role.PREFILL, info=make_info("p0", address, generation=5))
    await cluster.wait_ready("p0", Role.PREFILL)
    with pytest.raises(Conflict, match="older than 5"):
        await cluster.client.register(make_info("p0", address, generation=4), Role.PREFILL)
    with pytest.raises(Conflict, match=f"ready at {address}"):
        await cluster.client.register(make_info("p0", free_address(), generation=6), Role.PREFILL)
    await cluster.client.register(make_info("p0", address, generation=6), Role.DECODE)
    record = cluster.state.registry.get("p0")
    assert (record.info.generation, record.role) == (6, Role.DECODE)
    # The predecessor's heartbeats no longer count.
    counted = 'polyphase_wire_dropped_total{cause="generation",socket="heartbeat"}'

    async def ignored() -> bool:
        return counted in await text(cluster.transport, "/metrics")

    await until(ignored, "stale heartbeats ignored")
    assert record.heard_mono is None


async def test_a_clock_that_went_back_keeps_nobody_out(cluster: Cluster) -> None:
    address = free_address()
    newer = make_info("p0", address, generation=5)
    async with fake_worker(newer, Role.PREFILL, cluster.settings.heartbeat_address, cluster.client):
        await cluster.wait_ready("p0", Role.PREFILL)
    await until(lambda: not cluster.state.registry.get("p0").alive, "dead")
    await cluster.client.register(make_info("p0", address, generation=4), Role.PREFILL)
    assert cluster.state.registry.get("p0").info.generation == 4


async def test_a_lost_connection_is_death(cluster: Cluster) -> None:
    await cluster.workers(p0=Role.PREFILL)
    async with cluster.mortal("d0", Role.DECODE):
        await cluster.wait_ready("d0", Role.DECODE)
    await until(lambda: cluster.views[-1].get("d0") is None, "d0 gone from the broadcast")
    assert cluster.seen("p0").state is InstanceState.READY
    gone = await cluster.client.instance("d0")
    assert (gone.state, gone.death) == ("dead", "connection lost")


async def test_silence_is_unresponsive_and_the_next_heartbeat_ends_it(start: Start) -> None:
    cluster: Cluster = await start(silence_s=0.4)
    (worker,) = await cluster.workers(p0=Role.PREFILL)
    worker.beating = False
    await until(lambda: cluster.seen("p0").state is InstanceState.UNRESPONSIVE, "unresponsive")
    worker.beating = True
    await cluster.wait_ready("p0", Role.PREFILL)


async def test_the_dead_come_back_by_registering_and_can_be_forgotten(cluster: Cluster) -> None:
    async with cluster.mortal("d0", Role.DECODE):
        await cluster.wait_ready("d0", Role.DECODE)
        with pytest.raises(Conflict, match="only dead"):
            await cluster.client.forget("d0")
    await cluster.wait_state("d0", InstanceState.DEAD)
    await cluster.worker("d0", Role.DECODE, info=make_info("d0", free_address(), generation=2))
    await cluster.wait_ready("d0", Role.DECODE)
    await cluster.stack.aclose()
    await cluster.wait_state("d0", InstanceState.DEAD)
    await cluster.client.forget("d0")
    assert await cluster.client.instances() == []


async def test_an_address_where_nobody_listens_ends_as_dead(start: Start) -> None:
    cluster: Cluster = await start(connect_timeout_s=0.3)
    await cluster.client.register(make_info("p0", free_address()), Role.PREFILL)
    await cluster.wait_state("p0", InstanceState.DEAD)
    assert "no connection" in cluster.state.registry.get("p0").death


@pytest.mark.parametrize(
    "changes",
    [
        {"rpc": "udp://nowhere"},
        {"rpc": "tcp://127.0.0.1:99999"},
        {"block_size": 0},
        {"instance_id": "a b"},
        {"kv_endpoints": ["nonsense"]},
        {"rates": {"step": {"prefill": {"fixed_s": -1}, "decode": {"fixed_s": 1}, "mixed": {"fixed_s": 1}}}},
        {"rates": {"link": {"bytes_s": 0}}},
        {"compatibility": {**msgspec.to_builtins(FIT), "wire_version": 300}},
        {"compatibility": {**msgspec.to_builtins(FIT), "geometry": {"layers": 0, "kv_heads": 1, "head_dim": 1}}},
        {"role": "boss"},
    ],
    ids=str,
)
async def test_nonsense_is_a_400(cluster: Cluster, changes: dict[str, object]) -> None:
    body = registration(**changes)
    answer = await request(cluster.transport, "POST", "/instances", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == InvalidRequest.code
    assert await cluster.client.instances() == []


@pytest.mark.parametrize(
    ("component", "says"),
    [
        ({"layers": []}, "one without layers"),
        ({"layers": [*range(4097)]}, "with more than 4096"),
        ({"layers": [-1]}, "window and layers at least 0"),
        ({"layers": [2**31]}, "numbers must be below 2^31"),
        ({"sides": 0}, "sides, heads and head_dim must be at least 1"),
        ({"heads": 0}, "sides, heads and head_dim must be at least 1"),
        ({"head_dim": 0}, "sides, heads and head_dim must be at least 1"),
        ({"head_dim": 2**64}, "numbers must be below 2^31"),
        ({"window": -1}, "window and layers at least 0"),
        ({"part": "x" * 65}, "part and dtype must have at most 64 characters"),
        ({"kind": "other"}, "Invalid enum value 'other'"),
    ],
    ids=lambda case: str(case)[:40],
)
def test_components_have_bounds(component: dict[str, Any], says: str) -> None:
    wrong = {**msgspec.to_builtins(FULL), **component}
    geometry = {**msgspec.to_builtins(GEOMETRY), "components": [msgspec.to_builtins(WINDOWS), wrong]}
    with pytest.raises(ValidationError) as refused:
        Registration.model_validate(registration(compatibility={**msgspec.to_builtins(FIT), "geometry": geometry}))
    assert says in str(refused.value)


def test_components_have_a_number() -> None:
    for count, fits in ((256, True), (257, False)):
        body = registration(compatibility=msgspec.to_builtins(fit_with(*[FULL] * count)))
        if fits:
            assert Registration.model_validate(body).to_info().compatibility.geometry.components == (FULL,) * 256
        else:
            with pytest.raises(ValidationError, match="more than 256"):
                Registration.model_validate(body)


def test_a_model_of_states_alone_has_no_heads() -> None:
    body = registration(compatibility=msgspec.to_builtins(fit_with(STATE, kv_heads=0, head_dim=0)))
    assert Registration.model_validate(body).to_info().compatibility.geometry.kv_heads == 0
    with pytest.raises(ValidationError, match=r"geometry\.kv_heads must be at least 1"):
        Registration.model_validate(registration(compatibility=msgspec.to_builtins(fit_with(kv_heads=0))))


async def test_components_are_kept_as_they_are_registered(cluster: Cluster) -> None:
    fits = fit_with(WINDOWS, FULL, STATE)
    await cluster.client.register(make_info("p0", free_address(), compatibility=fits), Role.PREFILL)
    assert cluster.state.registry.get("p0").info.compatibility == fits
    (instance,) = await cluster.client.instances()
    assert instance.info.compatibility == fits


async def test_a_restarted_monitor_recovers_its_instances_without_registrations(start: Start) -> None:
    first: Cluster = await start()
    heartbeats, broadcast = first.settings.heartbeat_address, first.settings.broadcast_address
    async with (
        fake_worker(make_info("p0", free_address()), Role.PREFILL, heartbeats, first.client),
        fake_worker(make_info("d0", free_address()), Role.DECODE, heartbeats, first.client),
    ):
        await first.wait_ready("p0", Role.PREFILL)
        await first.wait_ready("d0", Role.DECODE)
        await until(lambda: not first.store.queued, "instances in the database")
        await first.stop()
        last = first.views[-1].sequence
        second: Cluster = await start(heartbeat_address=heartbeats, broadcast_address=broadcast)
        await until(lambda: second.views and all(second.views[-1].ready(role) for role in Role), "both ready again")
        assert second.views[-1].sequence > last


async def test_who_does_not_come_back_is_buried_in_the_database(start: Start) -> None:
    first: Cluster = await start()
    await first.workers(p0=Role.PREFILL)
    await until(lambda: not first.store.queued, "p0 in the database")
    await first.stop()
    await first.stack.aclose()
    second: Cluster = await start(connect_timeout_s=0.2)
    await until(lambda: second.views, "broadcasting")

    async def states() -> bool:
        return [row.state for row in await read_instances(second.store._engine)] == ["dead"]

    await until(states, "p0 marked as dead")
    (gone,) = await second.client.instances()
    assert (gone.state, gone.role) == ("dead", "prefill")
    assert gone.death == "did not return when the monitor was restarted"


async def test_learned_rates_and_a_chunk_size_that_an_instance_sets_are_broadcast(cluster: Cluster) -> None:
    (worker,) = await cluster.workers(p0=Role.PREFILL)
    learned = Rates(step=UNKNOWN_STEPS, link=LinkRate(1e9, 0.001, {"slow": 1e6}))
    worker.rates, worker.chunk_size = learned, 640

    def broadcast() -> bool:
        info = cluster.seen("p0").info
        return bool((info.rates, info.chunk_size) == (learned, 640))

    await until(broadcast, "both are broadcast")
    worker.rates, worker.chunk_size = None, 0  # as of a worker that does not report them
    sequence = cluster.views[-1].sequence
    await until(lambda: cluster.views[-1].sequence > sequence + 5, "broadcasts go on")
    assert broadcast()


async def test_fields_of_other_releases_are_ignored(cluster: Cluster) -> None:
    body = {**msgspec.to_builtins(make_info("p0", free_address())), "role": "prefill", "added_later": 1}
    body["compatibility"]["added_later"] = {"too": True}
    body["rates"] = {"prefill": {"k_p": 1e-4, "b_p": 0.01}, "chunked": None, "price_per_hour": 2.0}  # of an earlier one
    assert (await request(cluster.transport, "POST", "/instances", body)).status_code == 200
    assert cluster.state.registry.get("p0").info.rates == Rates(price_per_hour=2.0)
    assert [each.instance_id for each in await cluster.client.instances()] == ["p0"]


async def test_services_of_an_incompatible_wire_version_are_refused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = WireVersions(OURS.version + 1, OURS.version + 1)
    monkeypatch.setattr("shared.wire.clients.http.OURS", other)
    for call in (
        cluster.client.register(make_info("p0", free_address()), Role.PREFILL),
        cluster.client.scheduler_news("s0", SchedulerNews(0)),
    ):
        with pytest.raises(WireVersionMismatch, match=f"wire_version {other.version} .* wire_version {OURS.version} "):
            await call
    assert await cluster.client.instances() == []
    monkeypatch.setattr("shared.wire.clients.http.OURS", WireVersions(OURS.version + 1, OURS.version))
    await cluster.client.register(make_info("p0", free_address()), Role.PREFILL)
    await cluster.client.scheduler_news("s0", SchedulerNews(0))


MEMBER = make_info("old", "tcp://127.0.0.1:1")


def newcomer(**changes: Any) -> Any:
    return make_info("new", "tcp://127.0.0.1:2", compatibility=msgspec.structs.replace(FIT, **changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fingerprint": "fp-2"}, "fingerprint is 'fp-2', the cluster has 'fp-1'"),
        ({"engine_version": "0.2"}, "engine_version is '0.2', the cluster has '0.1.0'"),
        ({"wire_version": 2}, "wire_version is 2, the cluster has 1"),
        ({"geometry": msgspec.structs.replace(GEOMETRY, layers=7)}, "geometry.layers is 7, the cluster has 6"),
        ({"geometry": msgspec.structs.replace(GEOMETRY, kv_heads=8)}, "geometry.kv_heads is 8"),
        ({"geometry": msgspec.structs.replace(GEOMETRY, head_dim=8)}, "geometry.head_dim is 8"),
        ({"engine": "vllm", "fingerprint": "fp-2"}, "fingerprint is 'fp-2'"),
    ],
)
def test_a_refusal_names_the_field_and_both_values(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Incompatible, match="new does not fit this cluster") as caught:
        check(newcomer(**changes), [MEMBER])
    assert says in caught.value.message
    assert "as old has it" in caught.value.message


def test_components_that_differ_are_named_with_both_texts() -> None:
    member = make_info("old", "tcp://127.0.0.1:1", compatibility=fit_with(WINDOWS, FULL))
    narrow = msgspec.structs.replace(WINDOWS, window=63)
    with pytest.raises(Incompatible, match="new does not fit this cluster") as caught:
        check(newcomer(geometry=fit_with(narrow, FULL).geometry), [member])
    assert f"geometry.components is '{narrow}', the cluster has '{WINDOWS}'" in caught.value.message
    assert str(FULL) not in caught.value.message
    with pytest.raises(Incompatible) as caught:
        check(newcomer(geometry=fit_with(WINDOWS).geometry), [member])
    assert f"geometry.components is 'None', the cluster has '{FULL}'" in caught.value.message
    check(newcomer(geometry=fit_with(WINDOWS, FULL).geometry), [member])


def test_an_engine_without_components_fits_one_with_some() -> None:
    """An emulated one; a real one without would take windows for the whole context."""
    real = msgspec.structs.replace(fit_with(WINDOWS, FULL), engine="vllm")
    member = make_info("old", "tcp://127.0.0.1:1", compatibility=real)
    check(newcomer(), [member])
    check(make_info("new", "tcp://127.0.0.1:2", compatibility=real), [MEMBER])
    with pytest.raises(Incompatible, match=r"geometry\.components"):
        check(newcomer(engine="vllm", engine_version=real.engine_version), [member])


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("0.31.2", True),
        ("0.32.1.post1", True),
        ("0.33.0rc1", True),
        ("0.30.0", False),
        ("1.32.0", False),
        ("dev", False),
    ],
)
def test_adjacent_releases_serve_together_where_their_components_agree(version: str, fits: bool) -> None:
    def compatibility(version: str, *components: KvComponent) -> Any:
        return msgspec.structs.replace(fit_with(*components), engine="vllm", engine_version=version)

    member = make_info("old", "tcp://127.0.0.1:1", compatibility=compatibility("0.32.0", WINDOWS, FULL))
    joins = make_info("new", "tcp://127.0.0.1:2", compatibility=compatibility(version, WINDOWS, FULL))
    if fits:
        check(joins, [member])
    else:
        with pytest.raises(Incompatible, match=f"engine_version is '{version}', the cluster has '0.32.0'"):
            check(joins, [member])
    with pytest.raises(Incompatible, match=r"geometry\.components"):
        check(make_info("new", "tcp://127.0.0.1:2", compatibility=compatibility("0.31.0", FULL)), [member])


def test_wire_versions_that_speak_with_each_other_are_let_in() -> None:
    check(newcomer(wire_version=2, min_wire_version=1), [MEMBER])
    with pytest.raises(Incompatible, match="min_wire_version is 2, the cluster has 0"):
        check(newcomer(wire_version=3, min_wire_version=2), [MEMBER])


def test_all_differences_are_named_at_once() -> None:
    with pytest.raises(Incompatible) as caught:
        check(newcomer(fingerprint="fp-2", wire_version=9), [MEMBER])
    assert "fingerprint" in caught.value.message
    assert "wire_version" in caught.value.message


def test_engines_may_mix_where_the_model_agrees() -> None:
    check(newcomer(engine="vllm", engine_version="0.32.0"), [MEMBER])


def test_layout_and_precision_may_differ() -> None:
    other = make_info("new", "tcp://127.0.0.1:2", dtype="float32", block_size=128, tensor_parallel=2, max_model_len=99)
    check(other, [MEMBER])


def test_precisions_may_differ_where_the_operator_says_so() -> None:
    quantised = make_info("new", "tcp://127.0.0.1:2", precision="fp8")
    with pytest.raises(
        Incompatible, match=r"its precision is 'fp8', the cluster has '' \(as old.*mixed_precision: true"
    ):
        check(quantised, [MEMBER])
    check(quantised, [MEMBER], mixed_precision=True)
    check(quantised, [msgspec.structs.replace(MEMBER, precision="fp8")])


def test_adapters_of_one_name_must_be_the_same() -> None:
    def serving(**adapters: str) -> InstanceInfo:
        return make_info("new", "tcp://127.0.0.1:2", adapters=adapters)

    members = [MEMBER, msgspec.structs.replace(MEMBER, instance_id="old-2", adapters={"a": "1", "b": "2"})]
    for adapters in ({}, {"a": "1"}, {"a": "1", "b": "2", "c": "3"}):
        check(serving(**adapters), members)
    with pytest.raises(Incompatible, match=r"adapter b is 'x', the cluster has '2' \(as old-2 has it\)"):
        check(serving(a="1", b="x"), members)


def test_the_first_may_be_anything_but_what_the_settings_exclude() -> None:
    check(newcomer(fingerprint="other"), [])
    with pytest.raises(Incompatible, match="the settings pin 'fp-1'"):
        check(newcomer(fingerprint="other"), [], fingerprint="fp-1")


def record(**more: Any) -> Record:
    return Record(
        info=make_info("p0", "tcp://a:1"),
        role=Role.PREFILL,
        connection=cast(Any, SimpleNamespace(connected=True)),
        registered_s=0.0,
        registered_mono=0.0,
        **more,
    )


def beat(draining: bool) -> Heartbeat:
    return Heartbeat("p0", 1, Role.PREFILL, draining, InstanceLoad())


@pytest.mark.parametrize(("later_s", "draining"), [(0.01, False), (UNDER_WAY_S, True)])
def test_a_heartbeat_from_before_a_resume_does_not_undo_it(later_s: float, draining: bool) -> None:
    resumed = record(resumed_mono=10.0)
    resumed.apply(beat(draining=True), 10.0 + later_s)
    assert resumed.draining is draining


def test_one_that_was_not_resumed_drains_at_once() -> None:
    one = record()
    one.apply(beat(draining=True), 0.0)
    assert one.draining
    one.apply(beat(draining=False), 0.0)
    assert not one.draining


def test_decodes_that_are_promised_to_an_instance_are_part_of_what_http_shows() -> None:
    one = record()
    one.load = InstanceLoad(time_s=1.0, promised=(Promised(7, 100, 20),))
    (promised,) = json.loads(msgspec.json.encode(one.row()))["load"]["promised"]
    assert (promised["mark"], promised["decode_tokens"], promised["answer_tokens"]) == (7, 100, 20)
