"""Searches for plans, from outside: over HTTP, in real processes, with a real database."""

import asyncio
import json
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.launcher.cluster_file import load_cluster
from services.planner import search_process, searches
from services.planner.edge import SearchIn
from services.planner.searches import ATTEMPTS
from shared.cost.library import Library
from shared.errors import Conflict, InvalidRequest, NotFound, Overloaded, Unavailable
from shared.wire.api.planner import PlanSearch
from tests.services.control_plane import request, until
from tests.services.planner.search_app import LONG, QUICK, SLOW, STOCK, planner, saying

WAITS = saying("time.sleep(600)")

ONE = {"nodes": [{"name": "n", "accelerator": "A10"}]}


def loads(answer: PlanSearch, folder: Path) -> list[str]:
    """The instances of the result's cluster file."""
    file = folder / "plan.yaml"
    file.write_text(answer.result.cluster_file)
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
        assert (asked.state, asked.who, asked.result, asked.error) == ("waiting", "ada", None, "")
        done = await own.state(asked.plan_id, "done", "failed")
        assert done.error == ""
        result = done.result
        assert [group.name for group in result.groups] == loads(done, tmp_path)
        assert {group.role for group in result.groups} == {"both"}
        assert result.method == "coupled"
        assert result.promise.goodput > 0
        assert result.promise.usd_per_hour == sum(group.price_usd_hour for group in result.groups)
        assert done.progress.best_goodput == result.promise.goodput
        assert done.ended_s >= done.submitted_s
        assert done.progress.elapsed_s > 0
        assert done.request["inventory"] == STOCK
        (listed,) = await own.client.plans()
        assert listed.result.cluster_file == ""
        assert "inventory" not in listed.request
        assert listed.result.promise == result.promise


async def test_requests_may_be_given_and_methods_compared(tmp_path: Path) -> None:
    rows = [{"arrival_s": at, "prompt_tokens": 500 + at, "output_tokens": 30} for at in range(40)]
    wanted = {**QUICK, "workload": rows, "compare": True, "seconds": 3, "slo": {"ttft_s": 1.0}}
    async with planner(tmp_path) as own:
        asked = await own.client.submit({**wanted, "inventory": ONE})
        done = await own.state(asked.plan_id, "done", "failed")
        assert done.request["workload"][1] == {"arrival_s": 1.0, "prompt_tokens": 501, "output_tokens": 30}
        assert done.result.workload == "workload of 40 requests"
        assert all(one.method != "coupled" and one.goodput >= 0 for one in done.result.compared)
        assert (await own.client.plans())[0].request["workload"] == "40 requests"


async def test_a_cancelled_search_has_the_best_so_far(tmp_path: Path) -> None:
    async with planner(tmp_path) as own:
        asked = await own.client.submit(LONG)
        await own.best(asked.plan_id)
        await own.client.cancel(asked.plan_id, who="ada")
        ended = await own.state(asked.plan_id, "cancelled", "done", "failed")
        assert (ended.state, ended.error) == ("cancelled", "")
        assert ended.result.stopped
        assert ended.result.promise.goodput > 0
        assert loads(ended, tmp_path)
        with pytest.raises(Conflict, match="has ended: it is cancelled"):
            await own.client.cancel(asked.plan_id)


async def test_a_search_that_has_not_begun_is_cancelled_at_once(tmp_path: Path) -> None:
    async with planner(tmp_path, WAITS) as own:
        first, second = [(await own.client.submit(QUICK)).plan_id for _ in range(2)]
        await own.state(first, "running")
        assert (await own.client.cancel(second)).state == "cancelled"
        assert (await own.client.plan(first)).state == "running"
        with pytest.raises(NotFound):
            await own.client.cancel("nobody")
        assert [one.plan_id for one in await own.client.plans()] == [second, first]
        assert len(await own.client.plans(limit=1)) == 1


async def test_one_that_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_process, "GRACE_S", 0.2)
    deaf = saying(
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        'say(json.dumps({"type": "progress", "what": "deaf"})); time.sleep(600)'
    )
    async with planner(tmp_path, deaf) as own:
        plan_id = (await own.client.submit(QUICK)).plan_id
        await until(lambda: told(own, plan_id, "deaf"), "it ignores SIGINT")
        await own.client.cancel(plan_id)
        ended = await own.state(plan_id, "cancelled", "failed")
        assert (ended.state, ended.result) == ("cancelled", None)
        assert "before it had a plan" in ended.error


async def told(own: Any, plan_id: str, what: str) -> bool:
    return bool((await own.client.plan(plan_id)).progress.what == what)


async def test_a_killed_process_costs_its_search_and_no_other(tmp_path: Path) -> None:
    async with planner(tmp_path) as own:
        first, second = [(await own.client.submit(one)).plan_id for one in (LONG, QUICK)]
        process = await until(child, "its process")
        process.kill()
        failed = await own.state(first, "failed", "done")
        assert "was killed (SIGKILL)" in failed.error
        assert (await own.state(second, "done", "failed")).state == "done"


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
        failed = await own.state((await own.client.submit(QUICK)).plan_id, "failed", "done")
        assert reason in failed.error
        assert (failed.state, failed.result) == ("failed", None)


async def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    async with planner(tmp_path, ["/nowhere/python"]) as own:
        failed = await own.state((await own.client.submit(QUICK)).plan_id, "failed")
        assert "cannot be started: No such file" in failed.error


async def test_a_search_has_so_long_and_no_longer(tmp_path: Path) -> None:
    async with planner(tmp_path, WAITS, search_s=0.3) as own:
        asked = await own.client.submit(QUICK)
        assert asked.request["seconds"] == 0.3
        failed = await own.state(asked.plan_id, "failed", "cancelled")
        assert "no plan after the 0.3 s" in failed.error
        with pytest.raises(InvalidRequest, match=r"seconds: at most 0\.3"):
            await own.client.submit({**QUICK, "seconds": 1})


async def test_a_full_queue_refuses(tmp_path: Path) -> None:
    async with planner(tmp_path, WAITS, waiting=1) as own:
        first, second = [(await own.client.submit(QUICK)).plan_id for _ in range(2)]
        with pytest.raises(Overloaded, match="2 searches run or wait already"):
            await own.client.submit(QUICK)
        await own.client.cancel(second)
        await own.client.submit(QUICK)
        await own.state(first, "running")


async def test_several_run_at_once(tmp_path: Path) -> None:
    async with planner(tmp_path, WAITS, searches=2) as own:
        ids = [(await own.client.submit(QUICK)).plan_id for _ in range(3)]
        for plan_id in ids[:2]:
            await own.state(plan_id, "running")
        assert (await own.client.plan(ids[2])).state == "waiting"


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


async def test_searches_survive_a_restart(tmp_path: Path) -> None:
    async with planner(tmp_path, WAITS) as own:
        ids = [(await own.client.submit(QUICK)).plan_id for _ in range(3)]
        await own.state(ids[0], "running")
        await own.client.cancel(ids[1])
    async with planner(tmp_path) as own:
        before = {one.plan_id: one.state for one in await own.client.plans()}
        assert before[ids[1]] == "cancelled"
        done = [await own.state(plan_id, "done", "failed") for plan_id in (ids[0], ids[2])]
        assert [one.state for one in done] == ["done", "done"]
    async with planner(tmp_path, WAITS) as own:
        assert await own.client.plan(ids[0]) == done[0]
        assert [one.state for one in await own.client.plans()] == ["done", "cancelled", "done"]


def rows(folder: Path, change: str = "") -> list[dict[str, Any]]:
    with sqlite3.connect(folder / "polyphase.db") as database:
        database.row_factory = sqlite3.Row
        if change:
            database.execute(change)
        return [dict(row) for row in database.execute("select * from plans")]


async def test_what_ends_the_planner_again_and_again_is_given_up(tmp_path: Path) -> None:
    async with planner(tmp_path, WAITS) as own:
        plan_id = (await own.client.submit(QUICK)).plan_id
        await own.state(plan_id, "running")
        await until(lambda: own.store.queued == 0, "written")
        assert json.loads(rows(tmp_path)[0]["progress"])["attempts"] == 1
    assert json.loads(rows(tmp_path)[0]["progress"])["attempts"] == 0  # who ends in good order blames no search
    rows(tmp_path, f"update plans set progress = json_set(progress, '$.attempts', {ATTEMPTS}), state = 'running'")
    async with planner(tmp_path, WAITS) as own:
        failed = await own.state(plan_id, "failed", "running")
        assert "was begun 3 times, and each time the planner ended" in failed.error


async def test_who_wanted_it_to_end_need_not_ask_again(tmp_path: Path) -> None:
    async with planner(tmp_path, saying("import signal; signal.signal(2, signal.SIG_IGN); time.sleep(600)")) as own:
        plan_id = (await own.client.submit(QUICK)).plan_id
        await own.state(plan_id, "running")
        await own.client.cancel(plan_id)
    async with planner(tmp_path, WAITS) as own:
        assert (await own.client.plan(plan_id)).state == "cancelled"


async def test_rows_that_nobody_wrote_are_passed_over(tmp_path: Path) -> None:
    async with planner(tmp_path, WAITS) as own:
        plan_id = (await own.client.submit(QUICK)).plan_id
    rows(tmp_path, "update plans set request = 'rubbish'")
    async with planner(tmp_path, WAITS) as own:
        assert await own.client.plans() == []
        with pytest.raises(NotFound):
            await own.client.plan(plan_id)


async def test_a_request_that_means_nothing_any_more_says_so(tmp_path: Path) -> None:
    async with planner(tmp_path, WAITS) as own:
        plan_id = (await own.client.submit(QUICK)).plan_id
    rows(tmp_path, "update plans set request = json_set(request, '$.model', 'Forgotten-1B')")
    async with planner(tmp_path) as own:
        assert "model: 'Forgotten-1B' is not bundled" in (await own.state(plan_id, "failed", "done")).error


async def test_old_ones_are_found_in_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searches, "KEPT", 2)
    async with planner(tmp_path, saying("sys.exit(3)"), waiting=0) as own:
        ids = []
        for _ in range(5):
            ids.append((await own.client.submit(QUICK)).plan_id)
            await own.state(ids[-1], "failed")
        await until(lambda: own.store.queued == 0, "written")
        assert [one.plan_id for one in await own.client.plans()] == ids[:1:-1]
        assert (await own.client.plan(ids[0])).state == "failed"


async def test_before_the_database_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searches, "RECALL_S", 0.05)
    async with planner(tmp_path, WAITS, recalls=False) as own:
        plan_id = (await own.client.submit(QUICK)).plan_id
        assert (await own.client.plan(plan_id)).plan_id == plan_id
        for asking in (own.client.plans(), own.client.plan("older")):
            with pytest.raises(Unavailable, match="has not answered since the planner's start"):
                await asking


LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "Llama-2-70B", "method": "best"}, "GB are missing"),
        ({"model": "Llama-2-70B"}, "method coupled finds no deployment for Llama-2-70B"),
        ({"slo": {"ttft_s": 0.001, "tpot_s": 0.0001}}, "the nearest possible SLO: TTFT"),
        ({**SLOW, "inventory": ONE, "cheapest": True, "rate": 50}, "the whole inventory serves"),
        ({"budget": 0.01}, "within 0.01 USD/h"),
    ],
)
async def test_what_cannot_be_is_said_as_the_planner_says_it(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    async with planner(tmp_path) as own:
        failed = await own.state((await own.client.submit({**QUICK, **change})).plan_id, "failed", "done")
        assert reason in failed.error


PREFIXED = {"arrival_s": 0, "prompt_tokens": 900, "output_tokens": 1, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inventory": "nodes: ["}, "inventory:2: not valid YAML"),
        ({"inventory": "- 1"}, "inventory: expected a mapping"),
        ({"inventory": "nodes: [{name: a, accelerator: A11}]"}, ":1: nodes.0.accelerator: unknown accelerator 'A11'"),
        ({"inventory": {"nodes": []}}, "inventory: nodes:"),
        ({"inventory": {"nodes": [{"name": "a", "accelerator": "A10", "colour": 1}]}}, "nodes.0.colour"),
        ({"inventory": {"nodes": [{"name": "a", "accelerator": "A10", "replicas": 90_000}]}}, "not 90000"),
        (
            {
                "inventory": "nodes: [{name: a, accelerator: A10, replicas: 3}]\n"
                "network: {pairs: [{nodes: [a-0, a-1], gbps: 1}]}"
            },
            "inventory:2: network: no link between the nodes",
        ),
        ({"inventory": "a: &a [*a]"}, "inventory:1: an alias inside of what it names"),
        ({"inventory": LAUGHS}, "inventory:6: aliases repeat"),
        ({"inventory": "x: " + "[" * 200}, "inventory:1: lists and mappings are nested more than"),
        ({"inventory": "x: " + "[" * 100_000}, "inventory"),  # nested, or not valid: YAML readers have limits, too
        ({"inventory": 3}, "body.inventory"),
        ({"model": "Llama-9-9B"}, "model: 'Llama-9-9B' is not bundled; there are"),
        ({"workload": "luck"}, "workload: no synthetic workload 'luck'"),
        ({"workload": "prompt=0,output=1"}, "workload: prompt_tokens must be positive"),
        ({"workload": "prompt=1e300,output=1"}, "prompt must be at most"),
        ({"workload": []}, "body.workload.requests"),
        ({"workload": [{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}]}, "workload.requests.0.prompt_tokens"),
        ({"workload": [{"prompt_tokens": 1, "output_tokens": 1, "arrival_s": at} for at in (1, 0)]}, "request 1: arr"),
        ({"workload": [PREFIXED, {**PREFIXED, "hash_ids": None}]}, "workload.1.hash_ids: missing"),
        (
            {"workload": [PREFIXED], "block_tokens": 1024},
            "2 blocks of 1024 tokens (block_tokens) are more than the prompt's",
        ),
        ({"workload": [{**PREFIXED, "hash_ids": ["x"]}]}, "workload.requests.0.hash_ids.0"),
        ({"slo": {"ttfb_s": 1}}, "body.slo.ttfb_s"),
        ({"slo": {"ttft_s": 0}}, "body.slo.ttft_s"),
        ({"method": "luck"}, "unknown method 'luck'; known: best"),
        ({"codec": "zip"}, "codec: one of raw"),
        ({"engine": "steam"}, "engine: emulated or vllm"),
        ({"cheapest": True}, "cheapest needs the rate"),
        ({"max_model_len": 20}, "longer than 20 tokens (max_model_len)"),
        ({"target": 1}, "body.target"),
        ({"seconds": 1e6}, "seconds: at most 600"),
        ({"requests": 60_000}, "body.requests"),
        ({"luck": 1}, "body.luck"),
    ],
)
async def test_what_cannot_be_asked_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    async with planner(tmp_path, WAITS) as own:
        answer = await request(own.transport, "POST", "/plans", {**QUICK, **change})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        assert message in answer.json()["error"]["message"]
        assert await own.client.plans() == []


def test_requests_may_name_their_prefixes() -> None:
    first = {"arrival_s": 0, "prompt_tokens": 250, "output_tokens": 160, "hash_ids": [1, 2, 3]}
    turn = {"arrival_s": 9, "prompt_tokens": 450, "output_tokens": 10, "hash_ids": [1, 2, 4, 5, 6]}
    asked = SearchIn.model_validate({**QUICK, "workload": [first, turn], "block_tokens": 100})
    work = asked.resolved(Library.built_in(), 60.0).problem.workload
    assert work.prefixes == ((1, 2, 3), (1, 2, 4, 5, 6))
    assert (work.prefix_block_tokens, work.answers, work.sessions) == (100, ((4, 5), ()), ("chat-0", "chat-0"))


async def test_no_path_is_opened(tmp_path: Path) -> None:
    """What is there is refused in the same words as what is not."""
    there = tmp_path / "secret"
    there.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
    (tmp_path / "config.json").write_text("{}")
    nodes = [{"name": "a", "accelerator": "A10"}]
    changes = [
        {"inventory": "%s"},
        {"inventory": {"nodes": nodes, "accelerators": "%s"}},
        {"workload": "%s"},
        {"model": "%s"},
    ]
    async with planner(tmp_path, WAITS) as own:
        for change in changes:
            said = []
            for path in (str(there), str(tmp_path), "/nowhere"):
                body = {**QUICK, **json.loads(json.dumps(change).replace("%s", path))}
                answer = await request(own.transport, "POST", "/plans", body)
                assert answer.status_code == 400
                said.append(answer.json()["error"]["message"].replace(path, "PATH"))
            assert len(set(said)) == 1
