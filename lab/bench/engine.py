"""`polyphase bench engine`: prefill orders and decode admissions, changed on a real vLLM engine while it runs.

Rounds of all policies, one after the other, another one first in each; in a round the same requests. Bursts of prompts
of unlike lengths for the orders; answers that outgrow the KV for the admissions.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console

from lab.bench.engine_load import Wanted, burst, predicted_in_time, pressing, send
from lab.bench.engine_report import ALONE, DYNAMIC, FCFS, GREEDY, SJF, STATIC, Result, Run, report
from lab.bench.engine_suite import BLOCK, KV_TOKENS, SEATS, OneEngine, one_engine
from lab.calibrate.host_watch import HostWatch
from lab.calibrate.target import Target
from lab.demo.client import ApiClient
from shared.domain.route import PolicySpec

ORDERS = (FCFS, SJF, "ljf", "least_slack")
OURS = {STATIC: {"reserve_all": True}}
OVERTAKING = {SJF: {"overtake": True}, "ljf": {"overtake": True}}  # instead of batches: as `least_slack`
ADMISSIONS = (GREEDY, STATIC, DYNAMIC)
ROUNDS = 3
FITTING = 6  # requests at once that the KV holds at their full lengths
SEED = 21


def run_engine_bench(rounds: int = ROUNDS) -> Result:
    """All of it; figures, aims and notes."""
    return asyncio.run(_bench(rounds))


async def _bench(rounds: int) -> Result:
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="polyphase-engine-") as folder:
        async with one_engine(Path(folder), console) as engine:
            return await engine.running.supervisor.during(_measure(engine, rounds, console))


async def _measure(engine: OneEngine, rounds: int, console: Console) -> Result:
    target = Target.local(engine.running.suite)
    orders: list[Run] = []
    admissions: list[Run] = []
    async with ApiClient(target.api_url, target.model) as api, HostWatch(target.launcher_pid) as watch:
        meter = Meter(engine, target, api, console)
        # Admissions first: the short answers of bursts would teach the predictor another thing.
        admissions.append(await meter.run(0, ALONE, pressing(SEED), at_once=FITTING))
        for number in range(rounds):
            for admission in _turned(ADMISSIONS, number):
                admissions.append(await meter.run(number, admission, pressing(SEED + number), admission=admission))
        orders.append(await meter.run(0, ALONE, burst(SEED), at_once=1))
        for number in range(rounds):
            for order in _turned(ORDERS, number):
                orders.append(await meter.run(number, order, burst(SEED + number), order=order))
    result = report(orders, admissions)
    result["figures"]["foreign_cores"] = watch.mean_cores
    result["notes"] += [
        f"one engine on one core, {KV_TOKENS} tokens of KV in blocks of {BLOCK}, {SEATS} seats; {rounds} rounds",
        "admissions that reserve go by what the predictor has observed, beginning with an uncounted run",
    ]
    return result


def _turned(policies: Sequence[str], number: int) -> Sequence[str]:
    first = number % len(policies)
    return (*policies[first:], *policies[:first])


class Meter:
    """Sends loads to the engine and notes what came of them."""

    def __init__(self, engine: OneEngine, target: Target, api: ApiClient, console: Console) -> None:
        self._engine = engine
        self._target = target
        self._api = api
        self._console = console
        self._runs = 0

    async def run(
        self,
        number: int,
        policy: str,
        wanted: Sequence[Wanted],
        *,
        order: str = FCFS,
        admission: str = GREEDY,
        at_once: int = 0,
    ) -> Run:
        """One load under these policies, on an engine that has nothing else to do."""
        await self._engine.follow(
            PolicySpec(order, OVERTAKING.get(order, {})), PolicySpec(admission, OURS.get(admission, {}))
        )
        before = await self._engine.preemptions()
        self._runs += 1
        served = await send(self._api, wanted, f"e{self._runs}", at_once)
        preemptions = await self._engine.preemptions() - before
        timelines = await self._target.timelines({one.request_id for one in served})
        predicted = fmean(predicted_in_time(timeline) for timeline in timelines.values())
        ttft_s, jct_s = (fmean(getattr(one, name) for one in served) for name in ("ttft_s", "jct_s"))
        line = f"{number} {policy:16} TTFT {ttft_s:6.2f} s, JCT {jct_s:6.2f} s, {preemptions} preemptions"
        self._console.print(line, soft_wrap=True)
        return Run(number, policy, served, preemptions, predicted)
