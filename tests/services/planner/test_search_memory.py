"""Searches for plans over restarts of the planner."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from services.planner import searches
from services.planner.searches import ATTEMPTS
from shared.errors import NotFound, Unavailable
from tests.services.control_plane import until
from tests.services.planner.search_app import QUICK, planner, saying

WAITS = saying("time.sleep(600)")


async def test_searches_survive_a_restart(tmp_path: Path) -> None:
    async with planner(tmp_path, WAITS) as own:
        ids = [(await own.client.submit(QUICK))["plan_id"] for _ in range(3)]
        await own.state(ids[0], "running")
        await own.client.cancel(ids[1])
    async with planner(tmp_path) as own:
        before = {one["plan_id"]: one["state"] for one in await own.client.plans()}
        assert before[ids[1]] == "cancelled"
        done = [await own.state(plan_id, "done", "failed") for plan_id in (ids[0], ids[2])]
        assert [one["state"] for one in done] == ["done", "done"]
    async with planner(tmp_path, WAITS) as own:
        assert await own.client.plan(ids[0]) == done[0]
        assert [one["state"] for one in await own.client.plans()] == ["done", "cancelled", "done"]


def rows(folder: Path, change: str = "") -> list[dict[str, Any]]:
    with sqlite3.connect(folder / "polyphase.db") as database:
        database.row_factory = sqlite3.Row
        if change:
            database.execute(change)
        return [dict(row) for row in database.execute("select * from plans")]


async def test_what_ends_the_planner_again_and_again_is_given_up(tmp_path: Path) -> None:
    async with planner(tmp_path, WAITS) as own:
        plan_id = (await own.client.submit(QUICK))["plan_id"]
        await own.state(plan_id, "running")
        await until(lambda: own.store.queued == 0, "written")
        assert json.loads(rows(tmp_path)[0]["progress"])["attempts"] == 1
    assert json.loads(rows(tmp_path)[0]["progress"])["attempts"] == 0  # who ends in good order blames no search
    rows(tmp_path, f"update plans set progress = json_set(progress, '$.attempts', {ATTEMPTS}), state = 'running'")
    async with planner(tmp_path, WAITS) as own:
        failed = await own.state(plan_id, "failed", "running")
        assert "was begun 3 times, and each time the planner ended" in failed["error"]


async def test_who_wanted_it_to_end_need_not_ask_again(tmp_path: Path) -> None:
    async with planner(tmp_path, saying("import signal; signal.signal(2, signal.SIG_IGN); time.sleep(600)")) as own:
        plan_id = (await own.client.submit(QUICK))["plan_id"]
        await own.state(plan_id, "running")
        await own.client.cancel(plan_id)
    async with planner(tmp_path, WAITS) as own:
        assert (await own.client.plan(plan_id))["state"] == "cancelled"


async def test_rows_that_nobody_wrote_are_passed_over(tmp_path: Path) -> None:
    async with planner(tmp_path, WAITS) as own:
        plan_id = (await own.client.submit(QUICK))["plan_id"]
    rows(tmp_path, "update plans set request = 'rubbish'")
    async with planner(tmp_path, WAITS) as own:
        assert await own.client.plans() == []
        with pytest.raises(NotFound):
            await own.client.plan(plan_id)


async def test_a_request_that_means_nothing_any_more_says_so(tmp_path: Path) -> None:
    async with planner(tmp_path, WAITS) as own:
        plan_id = (await own.client.submit(QUICK))["plan_id"]
    rows(tmp_path, "update plans set request = json_set(request, '$.model', 'Forgotten-1B')")
    async with planner(tmp_path) as own:
        assert "model: 'Forgotten-1B' is not bundled" in (await own.state(plan_id, "failed", "done"))["error"]


async def test_old_ones_are_found_in_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searches, "KEPT", 2)
    async with planner(tmp_path, saying("sys.exit(3)"), waiting=0) as own:
        ids = []
        for _ in range(5):
            ids.append((await own.client.submit(QUICK))["plan_id"])
            await own.state(ids[-1], "failed")
        await until(lambda: own.store.queued == 0, "written")
        assert [one["plan_id"] for one in await own.client.plans()] == ids[:1:-1]
        assert (await own.client.plan(ids[0]))["state"] == "failed"


async def test_before_the_database_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searches, "RECALL_S", 0.05)
    async with planner(tmp_path, WAITS, recalls=False) as own:
        plan_id = (await own.client.submit(QUICK))["plan_id"]
        assert (await own.client.plan(plan_id))["plan_id"] == plan_id
        for asking in (own.client.plans(), own.client.plan("older")):
            with pytest.raises(Unavailable, match="has not answered since the planner's start"):
                await asking
