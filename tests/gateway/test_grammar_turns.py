"""Trials of grammars: equal ones are one, callers take turns, and what is kept is bounded by bytes."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from gateway import structured_outputs
from gateway.admission import current_request
from gateway.settings import GatewaySettings
from gateway.structured_outputs import GOOD, TOO_EXPENSIVE_S, Grammars, _Verdicts
from tests.gateway.api import until


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
