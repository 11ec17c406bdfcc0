"""Structured outputs: grammars are tried before they are jobs, in other processes, once each and in fair turns."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import psutil
import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from gateway import structured_outputs
from gateway.admission import current_request
from gateway.settings import GatewaySettings
from gateway.structured_outputs import GOOD, TOO_EXPENSIVE_S, Grammars, _Verdicts
from tests.gateway.api import Api
from tests.gateway.cluster import until

SETTINGS = GatewaySettings(schedulers=("tcp://127.0.0.1:1",), model="demo")
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
# Each takes minutes to compile.
PATTERN = {"type": "string", "pattern": r"^(\w{1,9999}-){1,9999}$"}
CHOICES = ["a" * 100 + str(number) for number in range(1500)]
TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": PATTERN}}


def as_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def outputs(**kind: Any) -> dict[str, Any]:
    return {"structured_outputs": kind}


def expensive(title: str) -> dict[str, Any]:
    return outputs(json={**PATTERN, "title": title})


async def tried(grammars: Any, regex: str) -> list[int]:
    """Try a grammar; the pids of the workers that wait for the next one."""
    await grammars.check(SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex)))
    return sorted(worker._pid for worker in grammars._idle if worker._pid)


@contextmanager
def frozen(grammars: Any) -> Iterator[None]:
    """No trial goes on within the block."""
    pids = [grammars._pid, *(child.pid for child in psutil.Process(grammars._pid).children())]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


class TestThroughTheApi:
    pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

    @pytest.fixture
    def grammars(self, api: Api) -> Any:
        return api.state.engine_client._grammars

    @pytest.mark.parametrize(
        ("body", "backend"),
        [
            (as_format(SCHEMA), "xgrammar"),
            ({"response_format": {"type": "json_object"}}, "xgrammar"),
            (outputs(regex="[ab]+"), "xgrammar"),
            (outputs(choice=["yes", "no"]), "xgrammar"),
            (outputs(grammar='root ::= "a" | "b"'), "xgrammar"),
            (outputs(json={"type": "integer", "multipleOf": 7}), "guidance"),
        ],
    )
    async def test_a_good_grammar_reaches_the_engines_as_validated(
        self, api: Api, body: dict[str, Any], backend: str
    ) -> None:
        for send in (api.chat, api.complete):
            response = await send(**body)
            assert response.status_code == 200, response.text
            sampling = msgspec.msgpack.decode(api.cluster.prefill.prefills[-1].generation.sampling)
            assert sampling["structured_outputs"]["_backend"] == backend
            assert sampling["structured_outputs"]["choice"] is None  # a choice has become a grammar

    @pytest.mark.parametrize(
        "body",
        [
            outputs(regex="(a"),
            outputs(grammar="root ::= nothing"),
            outputs(json='{"type": '),
            outputs(json={"type": "nonsense"}),
            outputs(choice=[]),
            outputs(structural_tag="{}"),
            {"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "(a"}}},
        ],
    )
    async def test_a_bad_grammar_is_a_400(self, api: Api, body: dict[str, Any]) -> None:
        response = await api.chat(**body)
        assert (response.status_code, bool(response.json()["error"]["message"])) == (400, True)
        assert not api.cluster.prefill.prefills

    @pytest.mark.parametrize(
        "body",
        [
            as_format(PATTERN),
            outputs(choice=CHOICES),
            {"response_format": TAG},
            outputs(structural_tag=json.dumps({"type": "structural_tag", "format": TAG["format"], "a": 1})),
        ],
    )
    async def test_an_expensive_grammar_is_a_400_and_others_are_served_meanwhile(
        self, api: Api, grammars: Any, body: dict[str, Any]
    ) -> None:
        async with asyncio.TaskGroup() as group:
            with frozen(grammars):  # so that the trial cannot end before
                trial = group.create_task(api.chat(max_tokens=4, **body))
                await until(lambda: any(each.begun for each in grammars._trials.values()))
                assert [(await api.complete()).status_code for _ in range(3)] == [200] * 3
                assert not trial.done()
            while not trial.done():
                assert (await api.complete()).status_code == 200
        response = trial.result()
        assert (response.status_code, "too expensive" in response.text) == (400, True), response.text
        assert all(request.job.max_tokens == 6 for request in api.cluster.prefill.prefills)
        await api.idle()

    async def test_a_client_that_leaves_does_not_make_room_for_another_trial(self, api: Api, grammars: Any) -> None:
        def begun() -> int:
            return sum(trial.begun for trial in grammars._trials.values())

        running = [asyncio.create_task(api.complete(**expensive(str(number)))) for number in range(6)]
        await until(lambda: len(grammars._trials) > begun() == 2, 20)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        async with asyncio.timeout(30):
            while grammars._trials:
                assert begun() <= 2
                await asyncio.sleep(0.01)

    async def test_a_worker_tries_one_grammar_after_the_other_and_each_once(self, api: Api, grammars: Any) -> None:
        pids = [await tried(grammars, f"[a-f]+{number}") for number in range(8)]
        assert pids == [pids[0]] * 8
        body = outputs(regex="[a-f]+once")
        assert (await api.complete(**body)).status_code == 200
        kept = len(grammars._verdicts)
        responses = await asyncio.gather(*(api.complete(**body) for _ in range(10)))
        assert {response.status_code for response in responses} == {200}
        assert len(grammars._verdicts) == kept

    async def test_a_worker_that_ended_is_replaced(self, api: Api, grammars: Any) -> None:
        """By a grammar, or while it waits."""
        before = await tried(grammars, "[g-k]+first")
        assert (await api.complete(**expensive("ends it"))).status_code == 400
        after = await tried(grammars, "[g-k]+second")
        assert (len(grammars._idle), len(set(before) - set(after))) == (2, 1)
        for worker in list(grammars._idle):
            if worker._pid:
                os.kill(worker._pid, signal.SIGKILL)
                await until(lambda: worker.gone)  # noqa: B023
        assert not set(await tried(grammars, "[g-k]+third")) & set(after)

    async def test_a_worker_that_has_grown_ends_and_so_does_the_gateway_without_its_workers_parent(
        self, api: Api, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(structured_outputs, "_MAX_GROWTH_BYTES", -1)
        with Grammars(api.state.engine_client.vllm_config, SETTINGS) as grammars:
            assert [await tried(grammars, f"[a-f]+{number}") for number in range(2)] == [[], []]
            assert len(grammars._idle) == 2
            watch = asyncio.create_task(grammars.watch())
            await asyncio.sleep(0)
            os.kill(grammars._pid, signal.SIGKILL)
            with pytest.raises(ChildProcessError):
                await asyncio.wait_for(watch, 30)

    async def test_a_long_trial_lowers_the_priority_of_all_its_threads(
        self, api: Api, grammars: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await tried(grammars, "[l-p]+first")
        (worker,) = [worker for worker in grammars._idle if worker._pid]

        def priorities() -> set[int]:
            found = set()
            for thread in os.listdir(f"/proc/{worker._pid}/task"):
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    found.add(os.getpriority(os.PRIO_PROCESS, int(thread)))
            return found

        usual, seen, prioritise = os.getpriority(os.PRIO_PROCESS, 0), set[int](), worker._prioritise
        monkeypatch.setattr(worker, "_prioritise", lambda priority: (prioritise(priority), seen.update(priorities())))
        assert priorities() == {usual}
        grammars._idle.remove(worker)
        grammars._idle.append(worker)  # it is the next
        with frozen(grammars):  # so that the trial lasts for as long as that takes
            trial = asyncio.create_task(api.complete(**expensive("lasts")))
            await until(lambda: seen)
        assert (await trial).status_code == 400
        assert seen == {min(usual + 10, 19)}


class Tried(Grammars):
    """Grammars whose trials wait for `go`."""

    def __init__(self) -> None:
        super().__init__(cast(Any, None), SETTINGS)
        self.tried: list[bytes] = []
        self.go = asyncio.Semaphore(0)
        self.expensive = False

    async def _try(self, request: bytes) -> bytes:
        self.tried.append(request)
        await self.go.acquire()
        return self._too_expensive if self.expensive else GOOD + request

    def start(self, regex: str, caller: str = "a") -> "asyncio.Task[Any]":
        async def check() -> Any:
            current_request.set(cast(Any, SimpleNamespace(caller=caller)))
            return await self.check(SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex)))

        return asyncio.create_task(check())

    def regexes(self) -> list[str]:
        return [self._params.decode(request).structured_outputs.regex for request in self.tried]

    def let(self, count: int) -> None:
        for _ in range(count):
            self.go.release()


async def test_equal_grammars_are_one_trial_which_a_waiter_that_leaves_does_not_end() -> None:
    grammars = Tried()
    running = [grammars.start("a+") for _ in range(5)]
    await until(lambda: len(grammars.tried) == 1)
    running[0].cancel()
    grammars.let(1)
    await asyncio.gather(*running, return_exceptions=True)
    assert [task.cancelled() for task in running] == [True, False, False, False, False]
    assert (await grammars.start("a+")).regex == "a+"
    assert (len(grammars.tried), grammars._trials) == (1, {})


async def test_the_verdict_too_expensive_is_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, now = Tried(), time.monotonic
    grammars.expensive = True
    grammars.let(10)
    for late_s, trials in ((0.0, 1), (0.0, 1), (TOO_EXPENSIVE_S + 1.0, 2)):
        monkeypatch.setattr(time, "monotonic", lambda late_s=late_s: now() + late_s)
        with pytest.raises(VLLMValidationError, match="too expensive"):
            await grammars.start("a+")
        assert len(grammars.tried) == trials


def test_a_grammar_that_takes_too_much_memory_is_too_expensive(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(SamplingParams, "_validate_structured_outputs", exhausted)
    compiler: Any = object.__new__(structured_outputs._Compiler)
    compiler._tokenizer = None
    compiler._config = SimpleNamespace(model_config=None, structured_outputs_config=None)
    request = msgspec.msgpack.encode(SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
    assert compiler.run(request) == b""


async def test_a_caller_with_many_grammars_does_not_keep_another_waiting() -> None:
    grammars = Tried()
    many = [grammars.start(f"a{number}") for number in range(10)]
    await until(lambda: len(grammars.tried) == 2)
    other = grammars.start("b", "other")
    await until(lambda: len(grammars._trials) == 11)
    grammars.let(1)
    await until(lambda: len(grammars.tried) == 3)
    assert grammars.regexes()[2] == "b"
    for task in many[5:]:
        task.cancel()  # they wait: they are not tried, and take no slot
    await until(lambda: len(grammars._trials) <= 6)
    grammars.let(10)
    assert (await other).regex == "b"
    await asyncio.gather(*many[:5])
    assert sorted(grammars.regexes()) == ["a0", "a1", "a2", "a3", "a4", "b"]
    assert not grammars._trials


def test_the_verdicts_used_last_are_kept_by_bytes() -> None:
    kept = _Verdicts(10_000)
    for number in range(8):
        kept.put(b"%d" % number, b"+" * 1500, float("inf"))
        assert kept.get(b"0", 0.0) is not None
        assert kept.total_bytes <= 10_000
    assert [number for number in range(8) if kept.get(b"%d" % number, 0.0)] == [0, 5, 6, 7]
    kept.put(b"huge", b"+" * 20_000, float("inf"))
    assert (kept.get(b"huge", 0.0), len(kept)) == (None, 4)
