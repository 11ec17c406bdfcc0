"""Searches for plans, from outside: over HTTP, in real processes, with a real database."""

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.launcher.cluster_file import load_cluster
from services.planner import search_process
from shared.errors import Conflict, InvalidRequest, NotFound, Overloaded
from tests.services.control_plane import until
from tests.services.planner.search_app import LONG, QUICK, STOCK, planner, saying

WAITS = saying("time.sleep(600)")
ONE = {"nodes": [{"name": "n", "accelerator": "A10"}]}


def loads(answer: dict[str, Any], folder: Path) -> list[str]:
    """The instances of the result's cluster file."""
    file = folder / "plan.yaml"
    file.write_text(answer["result"]["cluster_file"])
    return [instance.id for instance in load_cluster(file).instances]


def child() -> psutil.Process | None:
    for process in psutil.Process().children():
        with suppress(psutil.Error):  # one that has just ended
            if "services.planner.search_work" in process.cmdline():
                return process
    return None


async def test_a_search_ends_with_a_plan(tmp_path: Path) -> None:
    async with planner(tmp_path) as own:
        asked = await own.client.submit(QUICK, who="ada")
        assert (asked["state"], asked["who"], asked["result"], asked["error"]) == ("waiting", "ada", None, "")
        done = await own.state(asked["plan_id"], "done", "failed")
        assert done["error"] == ""
        result = done["result"]
        assert [group["name"] for group in result["groups"]] == loads(done, tmp_path)
        assert {group["role"] for group in result["groups"]} == {"both"}
        assert result["method"] == "coupled"
        assert result["promise"]["goodput"] > 0
        assert result["promise"]["usd_per_hour"] == sum(group["price_usd_hour"] for group in result["groups"])
        assert done["progress"]["best_goodput"] == result["promise"]["goodput"]
        assert done["ended_s"] >= done["submitted_s"]
        assert done["progress"]["elapsed_s"] > 0
        assert done["request"]["inventory"] == STOCK
        (listed,) = await own.client.plans()
        assert "cluster_file" not in listed["result"]
        assert "inventory" not in listed["request"]
        assert listed["result"]["promise"] == result["promise"]


async def test_requests_may_be_given_and_methods_compared(tmp_path: Path) -> None:
    rows = [{"arrival_s": at, "prompt_tokens": 500 + at, "output_tokens": 30} for at in range(40)]
    wanted = {**QUICK, "workload": rows, "compare": True, "seconds": 3, "slo": {"ttft_s": 1.0}}
    async with planner(tmp_path) as own:
        asked = await own.client.submit({**wanted, "inventory": ONE})
        done = await own.state(asked["plan_id"], "done", "failed")
        assert done["request"]["workload"][1] == {"arrival_s": 1.0, "prompt_tokens": 501, "output_tokens": 30}
        assert done["result"]["workload"] == "workload of 40 requests"
        assert all(one["method"] != "coupled" and one["goodput"] >= 0 for one in done["result"]["compared"])
        assert (await own.client.plans())[0]["request"]["workload"] == "40 requests"


async def test_a_cancelled_search_has_the_best_so_far(tmp_path: Path) -> None:
    async with planner(tmp_path) as own:
        asked = await own.client.submit(LONG)
        await own.best(asked["plan_id"])
        await own.client.cancel(asked["plan_id"], who="ada")
        ended = await own.state(asked["plan_id"], "cancelled", "done", "failed")
        assert (ended["state"], ended["error"]) == ("cancelled", "")
        assert ended["result"]["stopped"]
        assert ended["result"]["promise"]["goodput"] > 0
        assert loads(ended, tmp_path)
        with pytest.raises(Conflict, match="has ended: it is cancelled"):
            await own.client.cancel(asked["plan_id"])


async def test_a_search_that_has_not_begun_is_cancelled_at_once(tmp_path: Path) -> None:
    async with planner(tmp_path, WAITS) as own:
        first, second = [(await own.client.submit(QUICK))["plan_id"] for _ in range(2)]
        await own.state(first, "running")
        assert (await own.client.cancel(second))["state"] == "cancelled"
        assert (await own.client.plan(first))["state"] == "running"
        with pytest.raises(NotFound):
            await own.client.cancel("nobody")
        assert [one["plan_id"] for one in await own.client.plans()] == [second, first]
        assert len(await own.client.plans(limit=1)) == 1


async def test_one_that_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_process, "GRACE_S", 0.2)
    deaf = saying(
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        'say(json.dumps({"type": "progress", "what": "deaf"})); time.sleep(600)'
    )
    async with planner(tmp_path, deaf) as own:
        plan_id = (await own.client.submit(QUICK))["plan_id"]
        await until(lambda: told(own, plan_id, "deaf"), "it ignores SIGINT")
        await own.client.cancel(plan_id)
        ended = await own.state(plan_id, "cancelled", "failed")
        assert (ended["state"], ended["result"]) == ("cancelled", None)
        assert "before it had a plan" in ended["error"]


async def told(own: Any, plan_id: str, what: str) -> bool:
    return bool((await own.client.plan(plan_id))["progress"]["what"] == what)


async def test_a_killed_process_costs_its_search_and_no_other(tmp_path: Path) -> None:
    async with planner(tmp_path) as own:
        first, second = [(await own.client.submit(one))["plan_id"] for one in (LONG, QUICK)]
        process = await until(child, "its process")
        process.kill()
        failed = await own.state(first, "failed", "done")
        assert "was killed (SIGKILL)" in failed["error"]
        assert (await own.state(second, "done", "failed"))["state"] == "done"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("say('Segmentation fault, maybe')", "wrote a line that is not understood: 'Segmentation fault, maybe'"),
        ("""say('{"type": "answer", "result": 3}')""", "wrote a line that is not understood"),
        ("os.write(1, bytes([0xff, 0xfe, 10]))", "wrote a line that is not understood"),
        ("sys.stdout.write('x' * 300_000)", "more than 200000 bytes in one line"),
        ("sys.exit(3)", "ended with code 3 and no result"),
        ("os.kill(os.getpid(), 11)", "was killed (SIGSEGV)"),
    ],
)
async def test_rubbish_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str) -> None:
    monkeypatch.setattr(search_process, "MAX_LINE_BYTES", 200_000)
    async with planner(tmp_path, saying(code)) as own:
        failed = await own.state((await own.client.submit(QUICK))["plan_id"], "failed", "done")
        assert reason in failed["error"]
        assert (failed["state"], failed["result"]) == ("failed", None)


async def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    async with planner(tmp_path, ["/nowhere/python"]) as own:
        failed = await own.state((await own.client.submit(QUICK))["plan_id"], "failed")
        assert "cannot be started: No such file" in failed["error"]


async def test_a_search_has_so_long_and_no_longer(tmp_path: Path) -> None:
    async with planner(tmp_path, WAITS, search_s=0.3) as own:
        asked = await own.client.submit(QUICK)
        assert asked["request"]["seconds"] == 0.3
        failed = await own.state(asked["plan_id"], "failed", "cancelled")
        assert "no plan after the 0.3 s" in failed["error"]
        with pytest.raises(InvalidRequest, match=r"seconds: at most 0\.3"):
            await own.client.submit({**QUICK, "seconds": 1})


async def test_a_full_queue_refuses(tmp_path: Path) -> None:
    async with planner(tmp_path, WAITS, waiting=1) as own:
        first, second = [(await own.client.submit(QUICK))["plan_id"] for _ in range(2)]
        with pytest.raises(Overloaded, match="2 searches run or wait already"):
            await own.client.submit(QUICK)
        await own.client.cancel(second)
        await own.client.submit(QUICK)
        await own.state(first, "running")


async def test_several_run_at_once(tmp_path: Path) -> None:
    async with planner(tmp_path, WAITS, searches=2) as own:
        ids = [(await own.client.submit(QUICK))["plan_id"] for _ in range(3)]
        for plan_id in ids[:2]:
            await own.state(plan_id, "running")
        assert (await own.client.plan(ids[2]))["state"] == "waiting"


async def test_the_process_ends_with_who_started_it() -> None:
    """As when the planner is killed: nothing but the end of its standard input tells."""
    process = await asyncio.create_subprocess_exec(
        *search_process.COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({"request": json.dumps(LONG), "seconds": 300}).encode() + b"\n")
    assert b"progress" in await process.stdout.readline()
    process.stdin.close()
    async with asyncio.timeout(30):
        assert await process.wait() == 1
