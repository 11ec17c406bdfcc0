"""Structured outputs through the real API layer: tried before they are jobs, and never on the event loop."""

import asyncio
import json
import os
import signal
import time
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from gateway import structured_outputs
from gateway.admission import current_request
from gateway.settings import GatewaySettings
from gateway.structured_outputs import GOOD, TOO_EXPENSIVE_S, Grammars, _Verdicts
from tests.gateway.api import Api, until

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
# Each takes minutes to compile.
PATTERN = {"type": "string", "pattern": r"^(\w{1,9999}-){1,9999}$"}
CHOICES = ["a" * 100 + str(number) for number in range(1500)]
TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": PATTERN}}


def as_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("wish", "backend"),
    [
        ({"response_format": as_format(SCHEMA)}, "xgrammar"),
        ({"response_format": {"type": "json_object"}}, "xgrammar"),
        ({"structured_outputs": {"regex": "[ab]+"}}, "xgrammar"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "xgrammar"),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "xgrammar"),
        ({"structured_outputs": {"json": {"type": "integer", "multipleOf": 7}}}, "guidance"),
    ],
)
async def test_good_ones_reach_the_engines_as_validated(api: Api, wish: dict[str, Any], backend: str) -> None:
    for ask in (api.chat, api.complete):
        response = await ask(**wish)
        assert response.status_code == 200, response.text
        sampling = msgspec.msgpack.decode(api.cluster.prefill.prefills[-1].generation.sampling)
        assert sampling["structured_outputs"]["_backend"] == backend
        assert sampling["structured_outputs"]["choice"] is None  # a choice is a grammar by then


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    "wish",
    [
        {"structured_outputs": {"regex": "(a"}},
        {"structured_outputs": {"grammar": "root ::= nothing"}},
        {"structured_outputs": {"json": '{"type": '}},
        {"structured_outputs": {"json": {"type": "nonsense"}}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"structural_tag": "{}"}},
        {"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "(a"}}},
    ],
)
async def test_bad_ones_are_a_400_that_says_what_is_wrong(api: Api, wish: dict[str, Any]) -> None:
    response = await api.chat(**wish)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]
    assert not api.cluster.prefill.prefills


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    "wish",
    [
        {"response_format": as_format(PATTERN)},
        {"structured_outputs": {"json": {**PATTERN, "title": "another: of the first it is known"}}},
        {"structured_outputs": {"choice": CHOICES}},
        {"response_format": TAG},
        {
            "structured_outputs": {
                "structural_tag": json.dumps({"type": "structural_tag", "format": TAG["format"], "a": 1})
            }
        },
    ],
)
async def test_dear_ones_are_a_400_and_others_are_served_meanwhile(api: Api, wish: dict[str, Any]) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, **wish}
    async with httpx.AsyncClient(base_url=api.client.base_url, timeout=60) as client:
        served, longest_s = 0, 0.0
        async with asyncio.TaskGroup() as group:
            dear = group.create_task(client.post("/v1/chat/completions", json=body))
            while not dear.done():
                began = time.monotonic()
                assert (await api.complete()).status_code == 200
                longest_s = max(longest_s, time.monotonic() - began)
                served += 1
        response = dear.result()
    assert response.status_code == 400, response.text
    assert "too expensive" in response.json()["error"]["message"]
    assert served >= 3, f"in the time of the trial {served} others were served, one in {longest_s:.1f} s"
    assert all(request.job.max_tokens == 6 for request in api.cluster.prefill.prefills)  # the others' alone
    assert api.admission.jobs == 0


def begun(grammars: Any) -> int:
    return sum(trial.begun for trial in grammars._trials.values())


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_a_client_that_leaves_does_not_make_room_for_another_trial(api: Api) -> None:
    grammars = api.app.state.engine_client._grammars
    posts = [
        asyncio.create_task(api.complete(structured_outputs={"json": {**PATTERN, "title": str(number)}}))
        for number in range(6)
    ]
    async with asyncio.timeout(20):
        while begun(grammars) < 2 or len(grammars._trials) < 6:
            await asyncio.sleep(0.01)
    assert begun(grammars) == 2
    for post in posts:
        post.cancel()
    await asyncio.gather(*posts, return_exceptions=True)
    async with asyncio.timeout(30):
        while grammars._trials:
            assert begun(grammars) <= 2
            await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_a_grammar_is_tried_once(api: Api) -> None:
    grammars = api.app.state.engine_client._grammars
    wish = {"structured_outputs": {"regex": "[a-f]+once"}}
    assert (await api.complete(**wish)).status_code == 200
    kept = len(grammars._verdicts)
    answers = await asyncio.gather(*(api.complete(**wish) for _ in range(10)))
    assert {answer.status_code for answer in answers} == {200}
    assert len(grammars._verdicts) == kept


async def tried_by(grammars: Any, regex: str) -> list[int]:
    """Tries a grammar; the pids of the workers that wait for the next one."""
    await grammars.check(SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex)))
    return sorted(worker._pid for worker in grammars._idle if worker._pid)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_a_worker_tries_one_grammar_after_the_other(api: Api) -> None:
    grammars = api.app.state.engine_client._grammars
    pids = [await tried_by(grammars, f"[a-f]+{number}") for number in range(8)]
    assert pids == [pids[0]] * 8


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_a_worker_that_a_grammar_ended_is_replaced_and_so_is_one_that_ends_while_it_waits(api: Api) -> None:
    grammars = api.app.state.engine_client._grammars
    before = await tried_by(grammars, "[g-k]+first")
    assert (await api.complete(structured_outputs={"json": {**PATTERN, "title": "ends it"}})).status_code == 400
    after = await tried_by(grammars, "[g-k]+second")
    assert len(grammars._idle) == 2
    assert len(set(before) - set(after)) == 1
    for worker in list(grammars._idle):
        if worker._pid:
            os.kill(worker._pid, signal.SIGKILL)
            await until(lambda: worker.gone)  # noqa: B023
    assert not set(await tried_by(grammars, "[g-k]+third")) & set(after)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_a_worker_that_has_grown_says_that_it_ends(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    from gateway.structured_outputs import Grammars

    monkeypatch.setattr(structured_outputs, "_MAX_GROWTH_BYTES", -1)
    settings = GatewaySettings(schedulers=("tcp://127.0.0.1:1",), model="demo")
    with Grammars(api.app.state.engine_client.vllm_config, settings) as grammars:
        assert [await tried_by(grammars, f"[a-f]+{number}") for number in range(3)] == [[], [], []]
        assert len(grammars._idle) == 2


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_a_trial_that_lasts_gives_way_with_all_its_threads(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = api.app.state.engine_client._grammars
    await tried_by(grammars, "[l-p]+first")
    (worker,) = [worker for worker in grammars._idle if worker._pid]
    nice: set[int] = set()

    def of_threads() -> None:
        for thread in os.listdir(f"/proc/{worker._pid}/task"):
            nice.add(os.getpriority(os.PRIO_PROCESS, int(thread)))

    prioritise = worker._prioritise

    def seen(priority: int) -> None:
        prioritise(priority)
        of_threads()

    monkeypatch.setattr(worker, "_prioritise", seen)
    of_threads()
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert nice == {usual}
    nice.clear()
    grammars._idle.remove(worker)
    grammars._idle.append(worker)  # it is the next
    assert (await api.complete(structured_outputs={"json": {**PATTERN, "title": "lasts"}})).status_code == 400
    assert nice == {min(usual + 10, 19)}


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_the_end_of_the_process_that_tries_is_not_silent(api: Api) -> None:
    from gateway.structured_outputs import Grammars

    settings = GatewaySettings(schedulers=("tcp://127.0.0.1:1",), model="demo")
    with Grammars(api.app.state.engine_client.vllm_config, settings) as grammars:
        watch = asyncio.create_task(grammars.watch())
        await asyncio.sleep(0)
        os.kill(grammars._pid, signal.SIGKILL)
        with pytest.raises(ChildProcessError):
            await asyncio.wait_for(watch, 5)


class Tried(Grammars):
    """Grammars whose trials wait for the test."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(cast(Any, None), GatewaySettings(schedulers=("tcp://127.0.0.1:1",), model="demo", **changes))
        self.tried: list[bytes] = []
        self.go = asyncio.Semaphore(0)
        self.dear = False

    async def _try(self, request: bytes) -> bytes:
        self.tried.append(request)
        await self.go.acquire()
        return self._too_expensive if self.dear else GOOD + request

    def ask(self, regex: str, who: str = "a") -> "asyncio.Task[Any]":
        async def asked() -> Any:
            current_request.set(cast(Any, SimpleNamespace(caller=who)))
            return await self.check(SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex)))

        return asyncio.create_task(asked())

    def regexes(self) -> list[str]:
        return [self._params.decode(request).structured_outputs.regex for request in self.tried]

    def let(self, count: int) -> None:
        for _ in range(count):
            self.go.release()


async def test_equal_grammars_at_once_are_one_trial_and_a_waiter_that_leaves_ends_it_for_nobody() -> None:
    made = Tried()
    asked = [made.ask("a+") for _ in range(5)]
    await until(lambda: len(made.tried) == 1)
    asked[0].cancel()
    made.let(1)
    await asyncio.gather(*asked, return_exceptions=True)
    assert [task.cancelled() for task in asked] == [True, False, False, False, False]
    assert (await made.ask("a+")).regex == "a+"
    assert len(made.tried) == 1
    assert not made._trials


async def test_that_a_grammar_is_too_expensive_is_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Tried()
    made.dear = True
    made.let(10)
    for _ in range(3):
        with pytest.raises(VLLMValidationError, match="too expensive"):
            await made.ask("a+")
    assert len(made.tried) == 1
    later = time.monotonic() + TOO_EXPENSIVE_S + 1.0
    monkeypatch.setattr(time, "monotonic", lambda: later)
    with pytest.raises(VLLMValidationError, match="too expensive"):
        await made.ask("a+")
    assert len(made.tried) == 2


async def test_a_grammar_that_takes_too_much_memory_is_too_expensive(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(SamplingParams, "_validate_structured_outputs", exhausted)
    trial = object.__new__(structured_outputs._Compiler)
    trial._tokenizer = None
    trial._config = cast(Any, SimpleNamespace(model_config=None, structured_outputs_config=None))
    request = msgspec.msgpack.encode(SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
    assert trial.run(request) == b""


async def test_a_caller_with_many_grammars_does_not_keep_another_waiting() -> None:
    made = Tried()
    many = [made.ask(f"a{number}") for number in range(10)]
    await until(lambda: len(made.tried) == 2)
    other = made.ask("b", "other")
    await until(lambda: len(made._trials) == 11)
    made.let(1)
    await until(lambda: len(made.tried) == 3)
    assert made.regexes()[2] == "b"
    made.let(10)
    assert (await other).regex == "b"
    await asyncio.gather(*many)
    assert not made._trials


async def test_those_that_leave_the_line_are_not_tried_and_take_no_slot() -> None:
    made = Tried()
    asked = [made.ask(f"a{number}") for number in range(6)]
    await until(lambda: len(made._trials) == 6)
    for task in asked[2:]:
        task.cancel()
    await until(lambda: len(made._trials) == 2)
    made.let(3)
    assert (await made.ask("last")).regex == "last"
    assert sorted(made.regexes()) == ["a0", "a1", "last"]


def test_verdicts_are_kept_by_bytes_those_used_last() -> None:
    kept = _Verdicts(10_000)
    for number in range(8):
        kept.put(b"%d" % number, b"+" * 1500, float("inf"))
        assert kept.get(b"0", 0.0) is not None
        assert kept.total_bytes <= 10_000
    assert [number for number in range(8) if kept.get(b"%d" % number, 0.0)] == [0, 5, 6, 7]
    kept.put(b"huge", b"+" * 20_000, float("inf"))
    assert kept.get(b"huge", 0.0) is None
    assert len(kept) == 4
