"""The policies in force: who may change them, what survives a restart, and who is seen to follow."""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from services.cluster_monitor import policy_book
from services.cluster_monitor.events import EventKind
from shared.domain.cluster import ClusterDelta
from shared.domain.instance import Role
from shared.domain.policies import KINDS, PolicySet
from shared.domain.route import PolicySpec
from shared.errors import InvalidRequest, Unavailable
from shared.wire.api import SchedulerNews
from shared.wire.api.monitor import PolicyChoice, PolicyFollower
from shared.wire.messages import Heartbeat
from tests.services.cluster_monitor.conftest import Cluster, Start
from tests.services.control_plane import request, sqlite, text, until

HALF = PolicySpec("fraction", {"fraction": 0.5})
FILE = {"placement": "least_load", "prefill_order": {"name": "sjf", "window": 4}}


async def recalled(start: Start, **changes: Any) -> Cluster:
    cluster: Cluster = await start(**changes)
    await answered(cluster)
    return cluster


async def answered(cluster: Cluster) -> None:
    await until(lambda: cluster.policies.revision > 0, "the database has answered", timeout_s=20)


def named(policies: PolicySet) -> dict[str, str]:
    return {kind: policies.spec(kind).name for kind in KINDS}


async def test_the_files_hold_over_the_suites_defaults_and_are_broadcast(start: Start) -> None:
    cluster = await recalled(start, policies=FILE)
    wanted = {**named(PolicySet()), "placement": "least_load", "prefill_order": "sjf"}
    await until(lambda: cluster.views and cluster.views[-1].policies == cluster.policies, "broadcast")
    assert named(cluster.views[-1].policies) == wanted
    answer = await cluster.client.policies()
    assert {kind: one.name for kind, one in answer.policies.items()} == wanted
    window = {"window": 4}
    assert answer.policies["prefill_order"] == PolicyChoice("sjf", window, file=PolicySpec("sjf", window), changed=None)
    assert answer.choices["split"]["fraction"] == ("fraction",)
    assert answer.choices["role_flip"].keys() == {"off", "idle", "predictive"}
    assert answer.trouble == ""


async def test_a_change_is_broadcast_at_once_kept_and_told_as_an_event(start: Start) -> None:
    cluster = await recalled(start, policies=FILE, broadcast_period_s=30.0)
    before = cluster.policies
    answer = await cluster.client.set_policies({"split": HALF, "step_budget": PolicySpec("off")}, who="anna")
    await until(lambda: cluster.views and cluster.views[-1].policies.split == HALF, "broadcast before its period ends")
    now = cluster.views[-1].policies
    assert (now.revision, answer.revision) == (cluster.policies.revision, now.revision)
    assert now.revision > before.revision
    assert now == msgspec.structs.replace(before, revision=now.revision, split=HALF, step_budget=PolicySpec("off"))
    assert answer.policies["split"].changed.who == "anna"
    assert answer.policies["split"].file.name == "adaptive"
    (event,) = await cluster.client.events(kinds=["policies_changed"])
    assert event.text == "by anna: split: adaptive → fraction:fraction=0.5, step_budget: on → off"


async def test_the_same_again_is_no_change_and_null_goes_back_to_the_files(start: Start) -> None:
    cluster = await recalled(start, policies=FILE)
    first = await cluster.client.set_policies({"split": HALF, "placement": PolicySpec("least_load")}, who="anna")
    again = await cluster.client.set_policies({"split": HALF}, who="bert")
    assert again.revision == first.revision
    assert again.policies == first.policies
    back = await cluster.client.set_policies({"placement": None}, who="bert")
    assert back.revision > first.revision
    assert (back.policies["placement"].name, back.policies["placement"].changed) == ("least_load", None)
    assert back.policies["split"].changed.who == "anna"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"split": {"name": "best"}},
            "split: unknown split policy 'best'; known: adaptive, balanced, cronus, fraction, full",
        ),
        ({"split": {"name": "full", "parameters": {"x": 1}}}, "split: split policy 'full' has no parameter 'x'"),
        ({"split": {"name": "fraction", "parameters": {"fraction": "x"}}}, "fraction.fraction must be of type float"),
        ({"role_flip": {"name": "idle", "parameters": {"for_s": -1}}}, "role_flip: idle: "),
        ({"splitt": {"name": "full"}}, "no kind of policy 'splitt'; known: placement, split"),
        ({"splitt": None}, "no kind of policy 'splitt'; known: placement, split"),
        ({"placement": {"name": "round_robin"}, "split": {"name": "best"}}, "split: unknown split"),
        (
            {"prefill_order": {"name": "sjf", "parameters": {"window": 10**30}}},
            "prefill_order: sjf: a parameter cannot",
        ),
        ({"split": "none"}, "split"),
        ([], "dictionary"),
    ],
)
async def test_a_bad_change_changes_nothing(start: Start, change: Any, says: str) -> None:
    cluster = await recalled(start)
    before = await cluster.client.policies()
    response = await request(cluster.transport, "PUT", "/policies", change)
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]
    assert await cluster.client.policies() == before


async def test_characters_that_are_none_are_refused(start: Start) -> None:
    """JSON can name half of one; no broadcast could hold it."""
    cluster = await recalled(start)
    body = b'{"placement": {"name": "single", "parameters": {"instance": "\\ud800"}}}'
    async with httpx.AsyncClient(transport=cluster.transport, base_url="http://test") as client:
        response = await client.put("/policies", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "placement: single: a parameter cannot be sent" in response.json()["error"]["message"]


async def test_a_restarted_monitor_recalls_what_people_changed_and_no_more(start: Start) -> None:
    first = await recalled(start, policies=FILE)
    await first.client.set_policies({"split": HALF}, who="anna")
    kept = (await first.client.policies()).policies
    revision = first.policies.revision
    await first.stop()
    same = await recalled(start, policies=FILE)
    assert (await same.client.policies()).policies == kept
    assert same.policies.revision == revision
    await same.stop()
    other = await recalled(start, policies={"placement": "round_robin", "split": "none"})
    now = other.policies
    assert now.revision > revision
    assert (now.placement.name, now.split, now.prefill_order.name) == ("round_robin", HALF, "fcfs")
    await until(lambda: len(other.state.events.newest(9, kinds=(EventKind.POLICIES_CHANGED,))) == 2, "events recalled")
    (event, _) = await other.client.events(kinds=["policies_changed"])
    assert event.text.startswith(
        "by the cluster file: placement: least_load → round_robin, prefill_order: sjf:window=4"
    )


async def test_changes_during_restarts_are_kept_or_refused(start: Start) -> None:
    """Whatever was answered with "done" is there after the last restart."""
    done = 0
    for number in range(3):
        cluster: Cluster = await start()
        answers = await asyncio.gather(
            *(
                cluster.client.set_policies({"split": PolicySpec("fraction", {"fraction": (10 * number + one) / 100})})
                for one in range(5)
            ),
            return_exceptions=True,
        )
        taken = [one for one in answers if not isinstance(one, BaseException)]
        assert all(isinstance(one, Unavailable) for one in answers if isinstance(one, BaseException))
        await answered(cluster)
        if not taken:
            await cluster.client.set_policies({"split": PolicySpec("fraction", {"fraction": number / 10})})
        now = cluster.policies
        assert now.revision > done
        done = now.revision
        await cluster.stop()
    last = await recalled(start)
    assert last.policies == now


async def test_while_the_database_is_away_nothing_is_changed_and_what_is_followed_stays(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_book, "KEEP_S", 0.2)
    folder = tmp_path / "later"
    folder.write_text("no folder")
    cluster: Cluster = await start(policies=FILE, database_url=sqlite(folder))
    await until(lambda: cluster.views, "broadcast")
    assert cluster.views[-1].policies.revision == 0  # whoever follows another one keeps to it
    assert cluster.views[-1].policies.placement.name == "least_load"
    with pytest.raises(Unavailable, match="nothing is changed: the database has not answered"):
        await cluster.client.set_policies({"split": HALF})
    assert (await cluster.client.policies()).trouble.startswith("the database has not answered")
    with pytest.raises(InvalidRequest, match="unknown split"):
        await cluster.client.set_policies({"split": PolicySpec("best")})
    folder.unlink()
    monkeypatch.setattr(policy_book, "KEEP_S", 20.0)
    await answered(cluster)
    await cluster.client.set_policies({"split": HALF})


async def test_a_change_that_the_database_does_not_take_is_refused_and_forgotten(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await recalled(start)
    before = await cluster.client.policies()
    file = tmp_path / "polyphase.db"
    locked = sqlite3.connect(file, isolation_level=None, timeout=30.0, check_same_thread=False)
    await asyncio.to_thread(locked.execute, "BEGIN EXCLUSIVE")  # the monitor ends what it is writing by this loop
    with monkeypatch.context() as patch:
        patch.setattr(policy_book, "KEEP_S", 0.3)
        with pytest.raises(Unavailable, match=r"nothing is changed: the database did not take it within 0.3 s"):
            await cluster.client.set_policies({"split": HALF})
    assert await cluster.client.policies() == before
    locked.execute("COMMIT")
    locked.close()
    await until(lambda: not cluster.store.queued, "written", timeout_s=20)
    await cluster.stop()
    again = await recalled(start)
    assert (await again.client.policies()).policies == before.policies


async def test_a_removed_database_is_told_again(start: Start, tmp_path: Path) -> None:
    cluster = await recalled(start, prune_period_s=0.1)
    await cluster.client.set_policies({"split": HALF}, who="anna")
    for file in tmp_path.glob("polyphase.db*"):
        file.unlink()

    def there() -> bool:
        try:
            with sqlite3.connect(f"file:{tmp_path}/polyphase.db?mode=ro", uri=True) as database:
                return database.execute("SELECT who FROM policies").fetchall() == [("anna",)]
        except sqlite3.Error:
            return False

    await until(there, "the row is there again", timeout_s=20)
    revision = cluster.policies.revision
    await cluster.stop()
    again = await recalled(start)
    assert (again.policies.split, again.policies.revision) == (HALF, revision)


async def test_what_another_version_wrote_is_left_out_and_the_revision_still_rises(
    start: Start, tmp_path: Path
) -> None:
    first = await recalled(start)
    await first.client.set_policies({"split": HALF, "placement": PolicySpec("least_load")}, who="anna")
    revision = first.policies.revision
    await first.stop()
    _rewrite(tmp_path, lambda content: content.replace('"fraction"', '"of tomorrow"'))
    second = await recalled(start)
    now = second.policies
    assert (now.split.name, now.placement.name) == ("adaptive", "least_load")
    assert now.revision > revision
    await second.stop()
    _rewrite(tmp_path, lambda _: "[]")
    third = await recalled(start)
    assert third.policies.placement.name == "adaptive"
    assert third.policies.revision > now.revision


def _rewrite(folder: Path, change: Any) -> None:
    with sqlite3.connect(folder / "polyphase.db") as database:
        (content,) = database.execute("SELECT content FROM policies").fetchone()
        database.execute("UPDATE policies SET content = ?", (change(content),))


async def test_the_revision_rises_also_where_the_database_was_lost(start: Start, tmp_path: Path) -> None:
    first = await recalled(start)
    await first.client.set_policies({"split": HALF})
    revision = first.policies.revision
    await first.stop()
    second = await recalled(start, database_url=sqlite(tmp_path / "another"))
    assert second.policies.revision > revision


async def test_who_follows(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await recalled(start)
    worker, _ = await cluster.workers(p0=Role.PREFILL, d0=Role.DECODE)
    revision = cluster.policies.revision
    await cluster.client.scheduler_news("s0", SchedulerNews(revision))
    await cluster.client.scheduler_news("s1", SchedulerNews(revision - 1, "unknown split policy"))
    await cluster.client.scheduler_news("s2", SchedulerNews(revision, "a newer one is not known"))
    worker.policies = (revision, "")
    await until(lambda: cluster.state.registry.get("p0").policies_revision == revision, "heard")
    told = {one.name: one for one in (await cluster.client.policies()).followers}
    assert {name for name, one in told.items() if one.follows} == {"s0", "p0"}
    assert told.keys() == {"s0", "s1", "s2", "p0", "d0"}
    assert told["s1"].trouble == "unknown split policy"
    assert told["d0"] == PolicyFollower("instance", "d0", 0, follows=False, trouble="")
    monkeypatch.setattr(policy_book, "SILENT_S", 0.0)
    assert {one.name for one in (await cluster.client.policies()).followers} == {"p0", "d0"}


async def test_what_a_former_process_of_an_instance_says_does_not_count(start: Start) -> None:
    cluster = await recalled(start)
    (worker,) = await cluster.workers(p0=Role.PREFILL)
    record = cluster.state.registry.get("p0")
    worker.policies = (5, "")
    await until(lambda: record.policies_revision == 5, "heard")
    worker.info = msgspec.structs.replace(worker.info, generation=0)
    worker.policies = (7, "of another time")
    line = 'polyphase_wire_dropped_total{cause="generation",socket="heartbeat"}'

    async def ignored() -> bool:
        return line in await text(cluster.transport, "/metrics")

    await until(ignored, "ignored")
    assert (record.policies_revision, record.policies_trouble) == (5, "")


def test_workers_and_monitors_that_know_no_policies_are_understood() -> None:
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode([1, 2.0]), type=ClusterDelta)
    assert plain.policies is None
    beat = ["p", 1, "prefill", False, []]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(beat), type=Heartbeat).policies_revision == 0
