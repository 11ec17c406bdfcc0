"""Scenarios of `polyphase bench troubles`: each fault is held until the monitor's verdict names its problem."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any

from benchmarks.chaos.faults import disturbed, frozen, kept_dead
from benchmarks.chaos.load import Answered, Verdict, fresh
from benchmarks.chaos.proxy import Proxy
from benchmarks.chaos.scenario import VERDICTS, scenario
from benchmarks.chaos.testbeds import JOB_S, LATE, QUEUED, VERDICT, VERDICT_LATE, VERDICT_REAL, Testbed
from benchmarks.chaos.under_test import SuiteUnderTest
from benchmarks.chaos.verdict import Expected, Hold, check_verdict
from shared.domain.route import PolicySpec
from shared.domain.verdict import Level, Stage
from tools.client import COMPLETIONS, Ending, Request, completion_body, send, users

SLOW_S = 0.4  # of a KV message in each direction
_BURST, _TOO_LONG = 4 * QUEUED, int(40 * JOB_S)  # requests; tokens of 40 ms


def trouble(
    name: str, description: str, hold: Hold, problem: str, *, bed: Testbed = VERDICT, state: str = "", **expected: Any
) -> None:
    """state: of the problem's instances meanwhile. expected: fields of `Expected`."""
    if state:
        expected["states"] = dict.fromkeys(expected["instances"], state)
    check = partial(check_verdict, hold, Expected(problem, **expected))
    scenario(VERDICTS, name, description, check, bed=bed, errors=True, breaks=True, bound_s=200.0)


async def _send(suite: SuiteUnderTest, number: int, prompt_tokens: int, max_tokens: int, slo: str) -> bool:
    """Send a completion, and log it with those of the steady users; returns whether it was served."""
    assert suite.load is not None
    prompt = [suite.rng.randrange(300, 1200) for _ in range(prompt_tokens)]
    request = Request(COMPLETIONS, completion_body(prompt, max_tokens, return_token_ids=True), slo)
    response = await send(suite.gateway(number), fresh(request))
    served = response.ending is Ending.DONE
    verdict = Verdict.WHOLE if served else Verdict.ERROR
    suite.load.answered.append(Answered(response.began_mono, response.ended_mono, verdict))
    return served


def _burst(count: int, prompt_tokens: int, max_tokens: int) -> Hold:
    """So many requests at once, until the last answer."""

    @asynccontextmanager
    async def hold(suite: SuiteUnderTest) -> AsyncIterator[None]:
        burst = asyncio.gather(*(_send(suite, number, prompt_tokens, max_tokens, "") for number in range(count)))
        try:
            yield
            await burst
        finally:
            burst.cancel()
            with suppress(asyncio.CancelledError):
                await burst

    return hold


def _clients(count: int, prompt_tokens: int, max_tokens: int, slo: str = "") -> Hold:
    """More steady users, whose requests have an SLO class."""

    def hold(suite: SuiteUnderTest) -> AbstractAsyncContextManager[None]:
        return users(count, lambda user, turn: _send(suite, user + turn, prompt_tokens, max_tokens, slo))

    return hold


@asynccontextmanager
async def _not_started(suite: SuiteUnderTest) -> AsyncIterator[None]:
    yield
    spec = suite.spec(LATE)
    await suite.start_stranger(LATE, spec.argv, spec.env)


@asynccontextmanager
async def _policies_not_received(suite: SuiteUnderTest) -> AsyncIterator[None]:
    async with suite.monitor() as monitor:
        async with disturbed(suite.wires.between("decode-0", "monitor", "broadcasts"), Proxy.stall):
            await monitor.set_policies({"decode_admission": PolicySpec("reserve_dynamic")}, who="chaos")
            yield
        await monitor.set_policies({"decode_admission": None}, who="chaos")


_PREFILL: dict[str, Any] = {"stage": Stage.PREFILL, "instances": ("prefill-0",), "value": (1, 1)}
_DECODE: dict[str, Any] = {"stage": Stage.DECODE, "instances": ("decode-0",), "value": (1, 1)}

trouble(
    "dead",
    "SIGKILL of a decode instance, and of each that the launcher starts in its place",
    lambda s: kept_dead(s, "decode-0"),
    "instances_dead",
    state="dead",
    **_DECODE,
)
trouble(
    "missing",
    "an instance of the cluster file does not start",
    _not_started,
    "instances_missing",
    bed=VERDICT_LATE,
    state="missing",
    **(_DECODE | {"instances": (LATE,)}),
)
trouble(
    "unresponsive",
    "a proxy drops all heartbeats of a prefill instance",
    lambda s: disturbed(s.wires.between("prefill-0", "monitor", "heartbeats"), Proxy.stall),
    "instances_unresponsive",
    state="unresponsive",
    **_PREFILL,
)
trouble(
    "frozen",
    "SIGSTOP of a prefill instance, which counts as dead when its connections are silent for 2 s",
    lambda s: frozen(s, "prefill-0"),
    "instances_dead",
    state="dead",
    **_PREFILL,
)
trouble(
    "burst",
    f"{_BURST} requests at once, where each of two gateways accepts {QUEUED} that do not decode yet",
    _burst(_BURST, 30, 8),
    "refusals",
    value=(0.01, 0.8),
)
trouble(
    "too-long",
    f"12 answers of {_TOO_LONG * 0.04:.0f} s, where a request may take {JOB_S:.0f} s",
    _burst(12, 60, _TOO_LONG),
    "errors",
    value=(0.01, 0.8),
)
trouble(
    "ttft",
    "3 clients of a class with a TTFT target of 30 ms, which no prompt of 300 tokens can meet",
    _clients(3, 300, 8, "instant"),
    "ttft_missed",
    value=(0.0, 0.05),
)
trouble(
    "tpot",
    "3 clients of a class with a TPOT target of 20 ms, on instances whose steps take 40 ms",
    _clients(3, 60, 24, "swift"),
    "tpot_missed",
    stage=Stage.DECODE,
    value=(0.0, 0.05),
)
trouble(
    "overload",
    "24 clients with prompts of 900 tokens, each of which repeats its request at once",
    _clients(24, 900, 4),
    "ttft_missed",
    stage=Stage.QUEUE,
    instances=("prefill-0", "prefill-1"),
    value=(0.0, 0.9),
)
trouble(
    "kv-full",
    "44 clients whose answers need more KV than the decode instances have",
    _clients(44, 300, 120),
    "kv_full",
    stage=Stage.DECODE_QUEUE,
    value=(0.3, 1.0),
)
trouble(
    "all-dead",
    "SIGKILL of all decode instances, and of each that the launcher starts in their place",
    lambda s: kept_dead(s, *s.decode),
    "role_empty",
    level=Level.DOWN,
    stage=Stage.DECODE,
    states=dict.fromkeys(("decode-0", "decode-1", "decode-2"), "dead"),
)
for _service in ("gateway", "scheduler"):
    trouble(
        _service,
        f"SIGSTOP of a {_service}",
        lambda s, name=f"{_service}-1": frozen(s, name),  # type: ignore[misc]
        f"{_service}_gone",
        value=(10.0, 30.0),
        counts_requests=False,
    )
trouble(
    "policies",
    "a policy is changed while a proxy drops all broadcasts to an instance",
    _policies_not_received,
    "policies_not_followed",
    instances=("decode-0",),
)
trouble(
    "predictor",
    "SIGKILL of the predictor, and of each that the launcher starts in its place",
    lambda s: kept_dead(s, "predictor"),
    "predictor_fallback",
    value=(0.5, 1.0),
)
trouble(
    "kv-cut",
    "a proxy resets every KV connection",
    lambda s: disturbed(s.wires.all, lambda proxy: proxy.cut(refuse=True)),
    "transfers_failing",
    bed=VERDICT_REAL,
    stage=Stage.TRANSFER,
    value=(0.01, 1.0),
)
trouble(
    "kv-slow",
    f"a proxy delays every KV message by {SLOW_S:g} s",
    lambda s: disturbed(s.wires.all, lambda proxy: proxy.slow(latency_s=SLOW_S)),
    "transfers_slow",
    bed=VERDICT_REAL,
    stage=Stage.TRANSFER,
    value=(0.9 * SLOW_S, 10.0),
)
