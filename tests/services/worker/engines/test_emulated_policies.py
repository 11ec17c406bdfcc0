"""The emulated engine under the policies of its worker."""

import asyncio
from collections.abc import Callable
from typing import Any

from services.worker.engines.base import EnginePolicies, EngineRequest
from services.worker.engines.emulated import EmulatedEngine
from shared.domain.job import Generation, JobView, LengthPrediction, Slo
from shared.domain.kv import KvHandle
from shared.domain.rates import StepRates
from shared.policy.decode_admission import DecodeAdmission, Greedy
from shared.policy.papers.tetriinfer import ReserveDynamic, ReserveStatic
from shared.policy.prefill_order import Sjf
from shared.wire.messages import TokenStep
from tests.services.worker.engines.test_emulated import settings

BLOCK_BYTES = 32 * 131_072  # of 32 tokens of Llama-3-8B
SLO = Slo(ttft_s=1.0, tpot_s=0.1)


class Run:
    """One engine: who entered and ended, in order, and with which tokens."""

    def __init__(self, policies: EnginePolicies, rates: StepRates | None = None, **more: Any) -> None:
        self.engine = EmulatedEngine(
            settings(emulated_step_s=0.0005, emulated_prefix_cache=False, **more), lambda: rates
        )
        self._policies = policies
        self.entered: list[str] = []
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, asyncio.Event] = {}

    async def __aenter__(self) -> "Run":
        await self.engine.start()
        self.engine.set_policies(self._policies)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()

    def submit(self, name: str, prompt: int, output: int, **more: Any) -> None:
        tokens, ended = self.tokens.setdefault(name, []), self.ended.setdefault(name, asyncio.Event())

        def sink(output: TokenStep) -> None:
            tokens.extend(output.tokens)
            if output.finish_reason:
                ended.set()

        def entered() -> None:
            self.entered.append(name)

        job = JobView(name, prompt, output, more.pop("slo", SLO))
        asked = EngineRequest(name, job, [1] * prompt, Generation(b"", float(name)), output, entered=entered, **more)
        self.engine.submit(asked, sink)

    async def until(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not what():
                await asyncio.sleep(0)

    async def end(self) -> None:
        async with asyncio.timeout(20):
            await asyncio.gather(*(ended.wait() for ended in self.ended.values()))


async def preemptions(admission: DecodeAdmission) -> tuple[int, dict[str, list[int]]]:
    async with Run(EnginePolicies(admission=admission), kv_cache_bytes=12 * BLOCK_BYTES) as run:
        for number in range(8):
            run.submit(str(number), 40 + number, 60)
        await run.end()
        return run.engine.stats().preemptions, run.tokens


async def test_admissions_that_reserve_preempt_less_and_tokens_stay_the_same() -> None:
    greedy, tokens = await preemptions(Greedy())
    dynamic, same = await preemptions(ReserveDynamic())
    assert greedy > 2
    assert dynamic < greedy
    assert same == tokens
    assert await preemptions(ReserveStatic(reserve_all=True)) == (0, tokens)


async def test_only_those_that_go_on_here_pass_the_gate() -> None:
    async with Run(
        EnginePolicies(admission=ReserveStatic(unpredicted_tokens=500, reserve_all=True)),
        kv_cache_bytes=12 * BLOCK_BYTES,
    ) as run:
        run.submit("0", 100, 280)  # all of the 384 tokens but four
        await run.until(lambda: len(run.tokens["0"]) > 1)
        run.submit("1", 50, 1, first_token_only=True)
        await asyncio.wait_for(run.ended["1"].wait(), 10)
        run.submit("2", 50, 5)
        await run.until(lambda: len(run.tokens["0"]) > 20)
        assert run.entered == ["0", "1"]
        await run.end()
        assert run.entered == ["0", "1", "2"]


async def test_a_prediction_that_comes_later_opens_the_gate_for_it_and_for_others() -> None:
    admission = ReserveStatic(unpredicted_tokens=500, reserve_all=True)
    async with Run(EnginePolicies(admission=admission), kv_cache_bytes=12 * BLOCK_BYTES) as run:
        run.submit("0", 100, 280)  # all of the 384 tokens but four
        await run.until(lambda: len(run.tokens["0"]) > 1)
        run.submit("1", 50, 250)
        run.engine.predicted("nobody", LengthPrediction(0, 0, 8, 1.0, "observed"))
        await run.until(lambda: len(run.tokens["0"]) > 5)
        run.engine.predicted("0", LengthPrediction(1, 60, 90, 1.0, "observed"))
        await run.until(lambda: len(run.tokens["0"]) > 10)
        assert run.entered == ["0"]
        run.engine.predicted("1", LengthPrediction(1, 60, 90, 1.0, "observed"))
        await run.until(lambda: run.entered == ["0", "1"])
        assert not run.ended["0"].is_set()
        await run.end()


async def test_policies_are_exchanged_while_it_runs_for_those_that_wait_too() -> None:
    closed = EnginePolicies(admission=ReserveStatic(unpredicted_tokens=500, reserve_all=True))
    async with Run(closed, kv_cache_bytes=12 * BLOCK_BYTES) as run:
        run.submit("0", 100, 280)
        await run.until(lambda: len(run.tokens["0"]) > 1)
        for name, prompt in (("1", 90), ("2", 30), ("3", 60)):
            run.submit(name, prompt, 1)
        await run.until(lambda: len(run.tokens["0"]) > 5)
        assert run.entered == ["0"]
        run.engine.set_policies(EnginePolicies(Sjf(), Greedy()))
        await asyncio.wait_for(run.ended["1"].wait(), 10)
        assert not run.ended["0"].is_set()
        assert run.entered == ["0", "2", "3", "1"]
        named = {"prefill_order": "sjf", "decode_admission": "greedy", "step_budget": False}
        assert run.engine.policies.names() == named


async def test_who_has_no_room_is_asked_again_when_the_engine_is_woken() -> None:
    asked: list[int] = []
    async with Run(EnginePolicies()) as run:
        room = False

        def has_room() -> bool:
            asked.append(1)
            return room

        run.submit("0", 50, 1, first_token_only=True, export_to="t", has_room=has_room)
        await run.until(lambda: bool(asked))
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(asked) == 1  # it does not spin
        room = True
        run.engine.wake()
        await run.end()


async def test_imports_count_while_their_kv_is_under_way() -> None:
    policies = EnginePolicies(admission=ReserveStatic(reserve_all=True))
    async with Run(policies, kv_cache_bytes=12 * BLOCK_BYTES, emulated_link_gbps=1.0) as run:
        for name in "01":
            link = KvHandle(f"t{name}", "p0", 1, "f", (), 100, "bfloat16")
            run.submit(name, 101, 120, import_from=link)  # 221 of 384 tokens
        await run.until(lambda: run.engine.stats().free_blocks < 12)
        assert (run.entered, run.engine.stats().waiting) == (["0"], 2)
        await run.end()
        assert run.engine.stats().preemptions == 0
