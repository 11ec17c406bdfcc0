"""A real engine with little KV in a process of its own, under one policy after another; sends what became of each."""

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgspec
from vllm import SamplingParams

from services.launcher.model_source import PROJECT
from services.worker.engines.base import EngineRequest
from services.worker.engines.policies import EnginePolicies
from services.worker.engines.vllm import VllmEngine
from services.worker.kv.events import KvEvents, PullEnded
from services.worker.settings import WorkerSettings
from shared.domain.job import Generation, JobView, LengthPrediction, Slo
from shared.domain.kv import KvHandle
from shared.domain.rates import StepForm, StepRates
from shared.policy.decode_admission import DecodeAdmission, Greedy, ReserveDynamic, ReserveStatic
from shared.policy.prefill_order import Fcfs, LeastSlack, Ljf, PrefillOrder, Sjf
from shared.runtime.logs import configure_logs
from shared.wire.messages import TokenStep
from tests.services.worker.kv.vllm.engine_process import own_process

BLOCKS = 25  # one is vLLM's own; of 32 tokens each
LENGTHS = [300, 120, 20, 250, 60, 30, 200, 90]
TARGETS_S = [3.0, 7.0, 5.0, 1.0, 8.0, 2.0, 6.0, 4.0]  # above ten seconds, for the first tokens
ORDERS: dict[str, PrefillOrder] = {
    "fcfs": Fcfs(),
    "sjf": Sjf(100),
    "ljf": Ljf(100),
    "least_slack": LeastSlack(100),
    "sjf, window of 2": Sjf(2),
}
ADMISSIONS: dict[str, DecodeAdmission] = {
    "greedy": Greedy(),
    "reserve_static": ReserveStatic(),
    "reserve_dynamic": ReserveDynamic(),
}
MIXED = StepForm(0.0, token_s=0.001)  # 0.9 of 50 ms are 45 tokens
RATES = StepRates(StepForm(0.0), StepForm(0.0), MIXED)


class Engine:
    """The engine, and all that was asked of it, by name."""

    def __init__(self, engine: VllmEngine, settings: WorkerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.entered: list[str] = []
        self.ended: list[str] = []
        self.tokens: dict[str, list[int]] = {}
        self.first_s: dict[str, float] = {}
        self.ends: dict[str, asyncio.Future[TokenStep]] = {}
        self.beside: dict[str, list[str]] = {}  # who was inside when it entered
        self.pulls: list[PullEnded] = []
        self.preemptions = self.turns = 0
        self._watch()

    def _watch(self) -> None:
        scheduler = self.engine._scheduler
        preempt, schedule = scheduler._preempt_request, scheduler.schedule

        def preempted(*given: Any, **more: Any) -> Any:
            self.preemptions += 1
            return preempt(*given, **more)

        def turned(*given: Any, **more: Any) -> Any:
            self.turns += 1
            return schedule(*given, **more)

        scheduler._preempt_request, scheduler.schedule = preempted, turned

    async def follow_events(self, events: KvEvents) -> None:
        async for event in events:
            if isinstance(event, PullEnded):
                self.pulls.append(event)

    def submit(self, name: str, prompt: list[int], tokens: int = 1, slo: Slo | None = None, **more: Any) -> None:
        self.tokens[name] = []
        self.ends[name] = asyncio.get_running_loop().create_future()
        asked_s = time.monotonic()

        def sink(step: TokenStep) -> None:
            self.first_s.setdefault(name, time.monotonic() - asked_s)
            self.tokens[name] += step.tokens
            if step.finish_reason:
                self.ended.append(name)
                self.ends[name].set_result(step)

        # As long as it will be: who predicts better knows nothing more.
        said = LengthPrediction(0, tokens, tokens, 1.0, "observed")
        job = JobView(name, len(prompt), tokens, slo or Slo(), prediction=said)
        sampling = msgspec.msgpack.encode(SamplingParams(temperature=0, ignore_eos=True))
        generation = Generation(sampling, time.time())
        entered = partial(self._entered, name)
        self.engine.submit(EngineRequest(name, job, prompt, generation, tokens, entered=entered, **more), sink)

    def _entered(self, name: str) -> None:  # on the engine's thread, between two looks at the gate
        self.entered.append(name)
        self.beside[name] = [one.job.job_id for one in self.engine._seam._inside() if one.job.job_id != name]

    async def end(self, *names: str) -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*(asyncio.shield(self.ends[name]) for name in names))

    async def until(self, what: Any) -> None:
        async with asyncio.timeout(30):
            while not what():
                await asyncio.sleep(0.005)

    @asynccontextmanager
    async def at_once(self) -> AsyncIterator[None]:
        """All that is submitted in the block is there before the engine looks."""
        done = threading.Event()
        self.engine._post(lambda: done.wait(30))
        try:
            yield
        finally:
            done.set()

    def follow(self, order: PrefillOrder | None = None, admission: DecodeAdmission | None = None) -> None:
        self.engine.set_policies(EnginePolicies(order or Fcfs(), admission or Greedy()))


def make_prompt(tokens: int, seed: int = 0) -> list[int]:
    return [5 + (seed * 131 + at * 7) % 4000 for at in range(tokens)]


async def orders(run: Engine) -> dict[str, Any]:
    """Prompts that are there at once, under each order; the policy is exchanged while they wait."""
    found = {}
    run.submit("warm up", make_prompt(300), 4)
    await run.end("warm up")
    for label, order in ORDERS.items():
        async with run.at_once():
            for at, length in enumerate(LENGTHS):
                slo = Slo(ttft_s=10.0 + TARGETS_S[at])
                run.submit(f"{label} {length}", make_prompt(length, at), slo=slo, first_token_only=True)
            run.follow(order)
        names = [f"{label} {length}" for length in LENGTHS]
        await run.end(*names)
        lengths = dict(zip(names, LENGTHS, strict=True))
        found[label] = {
            "entered": [lengths[name] for name in run.entered if name in lengths],
            "ended": [lengths[name] for name in run.ended if name in lengths],
            "mean_ttft_s": sum(run.first_s[name] for name in names) / len(names),
        }
    return found


async def small_kv(run: Engine) -> dict[str, Any]:
    """More than fits: 8 requests that grow to 160 tokens, of which 24 blocks hold no more than four."""
    found: dict[str, Any] = {}
    pairs = [(order, "greedy") for order in ORDERS] + [("fcfs", "reserve_static"), ("fcfs", "reserve_dynamic")]
    for order, admission in (*pairs, ("ljf", "reserve_dynamic")):
        run.follow(ORDERS[order], ADMISSIONS[admission])
        before, name = run.preemptions, f"{order}, {admission}"
        names = [f"{name} {at}" for at in range(8)]
        async with run.at_once():
            for at, each in enumerate(names):
                run.submit(each, make_prompt(40 + 3 * at, at), 120 - 3 * at)
        await run.end(*names)
        found[name] = {"preemptions": run.preemptions - before, "tokens": [run.tokens[each] for each in names]}
    run.follow()
    found["alone"] = []
    for at in range(8):
        run.submit(f"alone {at}", make_prompt(40 + 3 * at, at), 120 - 3 * at)
        await run.end(f"alone {at}")
        found["alone"].append(run.tokens[f"alone {at}"])
    return found


async def local_order(run: Engine) -> dict[str, Any]:
    """Whole prompts that decode here are ordered, too, and held back by the gate."""
    run.follow(Sjf(), ReserveStatic())
    run.submit("large", make_prompt(600), 100)  # 700 of 768 tokens
    await run.until(lambda: len(run.tokens["large"]) > 2)
    names = [f"local {length}" for length in (200, 100, 150)]
    for name in names:
        run.submit(name, make_prompt(int(name.split()[1])), 4)
    await run.end("large", *names)
    run.follow()
    return {"entered": [name for name in run.entered if name in names], "beside": [run.beside[name] for name in names]}


async def shut(run: Engine) -> dict[str, Any]:
    """Nothing runs, and the next one has no room; one behind it gives up."""
    room = threading.Event()
    run.submit("no room", make_prompt(50), first_token_only=True, export_to="s1", has_room=room.is_set)
    run.submit("behind", make_prompt(20), first_token_only=True)
    run.submit("gives up", make_prompt(20), first_token_only=True)
    await run.until(lambda: run.engine.stats().waiting == 3)
    run.engine.abort("gives up")
    await run.until(lambda: run.engine.stats().waiting == 2)
    turns, cpu_s = run.turns, time.process_time()
    await asyncio.sleep(1.5)
    found = {"turns": run.turns - turns, "cpu_s": time.process_time() - cpu_s, "ended": len(run.tokens["behind"])}
    room.set()
    began_s = time.monotonic()
    run.engine.wake()
    await run.end("no room", "behind")
    at = run.entered.index("no room")
    return {**found, "opened_s": time.monotonic() - began_s, "entered": run.entered[at:]}


async def aborts(run: Engine) -> dict[str, Any]:
    """The one at the head of a shut gate gives up, and those behind it go on."""
    run.follow(Fcfs(), ReserveStatic())
    async with run.at_once():
        run.submit("runs", make_prompt(100), 400)
        run.submit("too large", make_prompt(100), 600)
        run.submit("small", make_prompt(30), 20)
    await run.until(lambda: len(run.tokens["runs"]) > 5)
    held = [name for name in ("too large", "small") if name not in run.entered]
    run.engine.abort("too large")
    await run.end("small")
    beside = not run.ends["runs"].done()
    run.engine.abort("runs")
    await run.until(lambda: run.engine.stats().running == 0)
    run.follow()
    stats = run.engine.stats()
    return {"held": held, "beside": beside, "waiting": stats.waiting, "free": stats.free_blocks, "of": BLOCKS - 1}


async def imports(run: Engine) -> dict[str, Any]:
    """KV that comes from elsewhere passes the gate before it gets blocks, and counts while it is under way."""
    asked = make_prompt(200, 3)
    run.submit("whole", asked, 60)
    for number in (1, 2):
        run.submit(f"export {number}", asked, 1, first_token_only=True, export_to=f"t{number}")
    await run.end("whole", "export 1", "export 2")
    run.follow(Fcfs(), ReserveStatic())

    def handle(number: int) -> KvHandle:
        return KvHandle(f"t{number}", "e", 1, "f", run.settings.kv_endpoints, 200, run.settings.dtype)

    async with run.at_once():
        for number in (1, 2):  # 260 of 768 tokens each
            run.submit(f"import {number}", asked, 60, import_from=handle(number))
        run.submit("beside", make_prompt(200, 5), 100)
    await run.end("beside", "import 1", "import 2")
    run.follow()
    return {
        "whole": run.tokens["whole"],
        "imported": [run.tokens[f"import {number}"] for number in (1, 2)],
        "beside": [run.beside[name] for name in ("import 1", "import 2", "beside")],
        "pulled": [(pull.ok, pull.tokens) for pull in run.pulls],
    }


async def budget(run: Engine) -> dict[str, Any]:
    """A long prompt beside two decodes of which one is in a hurry, without a budget and with one."""
    found: dict[str, Any] = {}
    for label, step_budget in (("without", False), ("with", True)):
        run.engine.set_policies(EnginePolicies(step_budget=step_budget))
        run.submit(f"hurry {label}", make_prompt(20), 60, Slo(tpot_s=0.05))
        run.submit(f"other {label}", make_prompt(20, 1), 60, Slo(tpot_s=5.0))
        await run.until(lambda label=label: len(run.tokens[f"other {label}"]) > 2)
        since = run.engine.steps.page("e", 1, -1, 1).next
        run.submit(f"long {label}", make_prompt(400, 9), 3)
        await run.end(*(f"{who} {label}" for who in ("hurry", "other", "long")))
        steps = run.engine.steps.page("e", 1, since, 1000).steps
        found[label] = [sum(tokens for tokens, _ in step.prefill) for step in steps if step.prefill]
        found[f"tokens {label}"] = [run.tokens[f"{who} {label}"] for who in ("hurry", "other", "long")]
    run.follow()
    return found


async def all_of_it(port: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        settings = WorkerSettings(
            instance_id="e",
            model=str(PROJECT / "models" / "demo"),
            rpc_port=0,
            http_port=0,
            kv_port=port,
            monitor_url="",
            heartbeat_address="",
            broadcast_address="",
            dtype="float32",
            max_model_len=704,
            chunk_size=128,
            max_seqs=16,
            engine_args={"num_gpu_blocks_override": BLOCKS, "enable_prefix_caching": False},
        )
        async with KvEvents(f"ipc://{folder}/events") as events:
            connector = {
                "endpoints": list(settings.kv_endpoints),
                "events": events.address,
                "control_key": "k",
                "instance_id": "e",
                "generation": 1,
                "fingerprint": "f",
                "staging_bytes": 16 << 20,
            }
            engine = VllmEngine(settings, connector, lambda: RATES)
            await engine.start()
            run = Engine(engine, settings)
            following = asyncio.create_task(run.follow_events(events))
            found = {}
            for scenario in (orders, small_kv, local_order, shut, aborts, imports, budget):
                found[scenario.__name__] = await scenario(run)
            following.cancel()
            await engine.close()
            return found


def run(log: str, port: int, found: "Connection[dict[str, Any], None]") -> None:
    """Try it all; what the engine prints goes to `log`."""
    own_process(log)
    configure_logs("engine", "WARNING")
    found.send(asyncio.run(all_of_it(port)))
    os._exit(0)
