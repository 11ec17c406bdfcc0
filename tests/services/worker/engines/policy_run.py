"""A real engine with little KV in a process of its own, under one policy after another; sends what became of each."""

import asyncio
import threading
import time
from typing import Any

from services.worker.engines import vllm
from services.worker.engines.base import EnginePolicies
from shared.domain.job import LengthPrediction, Slo
from shared.domain.kv import KvHandle
from shared.domain.rates import StepForm, StepRates
from shared.policy.decode_admission import DecodeAdmission, Greedy
from shared.policy.papers.tetriinfer import ReserveDynamic, ReserveStatic
from shared.policy.prefill_order import Fcfs, Ljf, PrefillOrder, Sjf
from tests.services.worker.engines.engine_run import DEAR, guided
from tests.services.worker.engines.own_engine import started
from tests.services.worker.engines.watched_engine import WatchedEngine, make_prompt

BLOCKS = 25  # one is vLLM's own; of 32 tokens each
LENGTHS = [300, 120, 20, 250, 60, 30, 200, 90]
TARGETS_S = [3.0, 7.0, 5.0, 1.0, 8.0, 2.0, 6.0, 4.0]  # above ten seconds, for the first tokens
ORDERS: dict[str, PrefillOrder] = {
    "fcfs": Fcfs(),
    "sjf": Sjf(100),
    "ljf": Ljf(100),
    "sjf, batches of 2": Sjf(2),
    "sjf, window of 2": Sjf(2, overtake=True),
}
ADMISSIONS: dict[str, DecodeAdmission] = {
    "greedy": Greedy(),
    "reserve_static": ReserveStatic(reserve_all=True),
    "reserve_dynamic": ReserveDynamic(),
}
MIXED = StepForm(0.0, token_s=0.001)  # 0.9 of 50 ms are 45 tokens
RATES = StepRates(StepForm(0.0), StepForm(0.0), MIXED)


async def orders(run: WatchedEngine) -> dict[str, Any]:
    """Prompts that are there at once, under each order; the policy is exchanged while they wait."""
    found = {}
    run.submit("warm up", make_prompt(300), 4)
    await run.ends_of("warm up")
    for label, order in ORDERS.items():
        async with run.at_once():
            for at, length in enumerate(LENGTHS):
                slo = Slo(ttft_s=10.0 + TARGETS_S[at])
                run.submit(f"{label} {length}", make_prompt(length, at), slo=slo, first_token_only=True)
            run.follow(order)
        names = [f"{label} {length}" for length in LENGTHS]
        await run.ends_of(*names)
        lengths = dict(zip(names, LENGTHS, strict=True))
        found[label] = {
            "entered": [lengths[name] for name in run.entered if name in lengths],
            "ended": [lengths[name] for name in run.ended if name in lengths],
        }
    return found


async def small_kv(run: WatchedEngine) -> dict[str, Any]:
    """More than fits: 8 requests that grow to 160 tokens, of which 24 blocks hold no more than four."""
    found: dict[str, Any] = {}
    pairs = [(order, "greedy") for order in ORDERS] + [("fcfs", "reserve_static"), ("fcfs", "reserve_dynamic")]
    for order, admission in (*pairs, ("ljf", "reserve_dynamic")):
        run.follow(ORDERS[order], ADMISSIONS[admission])
        before, told, name = run.preemptions, run.engine.stats().preemptions, f"{order}, {admission}"
        names = [f"{name} {at}" for at in range(8)]
        async with run.at_once():
            for at, each in enumerate(names):
                run.submit(each, make_prompt(40 + 3 * at, at), 120 - 3 * at)
        await run.ends_of(*names)
        found[name] = {
            "preemptions": run.preemptions - before,
            "told": run.engine.stats().preemptions - told,
            "paused": sum(each in names for each in run.paused),
            "entered": sum(each in names for each in run.entered),
            "tokens": [run.tokens[each] for each in names],
        }
    run.follow()
    found["alone"] = []
    for at in range(8):
        run.submit(f"alone {at}", make_prompt(40 + 3 * at, at), 120 - 3 * at)
        await run.ends_of(f"alone {at}")
        found["alone"].append(run.tokens[f"alone {at}"])
    return found


async def local_order(run: WatchedEngine) -> dict[str, Any]:
    """Whole prompts that decode here are ordered, too, and held back by the gate."""
    run.follow(Sjf(), ReserveStatic(reserve_all=True))
    run.submit("large", make_prompt(600), 100)  # 700 of 768 tokens
    names = [f"local {length}" for length in (200, 100, 150)]
    async with run.stopped_at("large", 3):
        for name in names:
            run.submit(name, make_prompt(int(name.split()[1])), 4)
    await run.ends_of("large", *names)
    run.follow()
    return {"entered": [name for name in run.entered if name in names], "beside": [run.beside[name] for name in names]}


async def shut(run: WatchedEngine) -> dict[str, Any]:
    """Nothing runs, and the next one has no room; one behind it gives up."""
    room = threading.Event()
    run.submit("no room", make_prompt(50), first_token_only=True, export_to="s1", has_room=room.is_set)
    run.submit("behind", make_prompt(20), first_token_only=True)
    run.submit("gives up", make_prompt(20), first_token_only=True)
    await run.until(lambda: run.engine.stats().waiting == 3)
    idle_s, vllm._IDLE_S = vllm._IDLE_S, 60.0  # after which it would look by itself
    run.engine.abort("gives up")
    await run.until(lambda: run.engine.stats().waiting == 2)
    turns, cpu_s = run.turns, time.process_time()
    await asyncio.sleep(1.5)
    found = {"turns": run.turns - turns, "cpu_s": time.process_time() - cpu_s, "ended": len(run.tokens["behind"])}
    room.set()
    began_mono = time.monotonic()
    run.engine.wake()
    await run.ends_of("no room", "behind")
    found["opened_s"] = time.monotonic() - began_mono
    vllm._IDLE_S = idle_s
    return {**found, "entered": run.entered[run.entered.index("no room") :]}


async def aborts(run: WatchedEngine) -> dict[str, Any]:
    """The one at the head of a shut gate gives up, and those behind it go on."""
    run.follow(Fcfs(), ReserveStatic(reserve_all=True))
    async with run.at_once():
        run.submit("runs", make_prompt(100), 400)
        run.submit("too large", make_prompt(100), 600)
        run.submit("small", make_prompt(30), 20)
    async with run.stopped_at("runs", 6):
        held = [name for name in ("too large", "small") if name not in run.entered]
        run.engine.abort("too large")
    await run.ends_of("small")
    beside = run.ended_before("small", "runs")
    run.engine.abort("runs")
    await run.until(lambda: run.engine.stats().running == 0)
    run.follow()
    stats = run.engine.stats()
    return {"held": held, "beside": beside, "waiting": stats.waiting, "free": stats.free_blocks, "of": BLOCKS - 1}


async def late_prediction(run: WatchedEngine) -> dict[str, Any]:
    """What is predicted of one that runs opens the gate for the next."""
    run.follow(Fcfs(), ReserveStatic(reserve_all=True))
    run.submit("holds", make_prompt(300), 400)  # 700 of 768 tokens
    run.submit("waits", make_prompt(60), 20)
    async with run.stopped_at("holds", 6):
        held = "waits" not in run.entered
        run.engine.predicted("holds", LengthPrediction(0, 100, 120, 1.0, "observed"))
    await run.ends_of("waits")
    beside = run.ended_before("waits", "holds")
    run.engine.abort("holds")
    await run.until(lambda: run.engine.stats().running == 0)
    run.follow()
    return {"held": held, "beside": beside}


async def imports(run: WatchedEngine) -> dict[str, Any]:
    """KV that comes from elsewhere passes the gate before it gets blocks, and counts while it is under way."""
    asked = make_prompt(200, 3)
    run.submit("whole", asked, 60)
    for number in (1, 2):
        run.submit(f"export {number}", asked, 1, first_token_only=True, export_to=f"t{number}")
    await run.ends_of("whole", "export 1", "export 2")
    run.follow(Fcfs(), ReserveStatic(reserve_all=True))

    def handle(number: int) -> KvHandle:
        return KvHandle(f"t{number}", "e", 1, "f", run.settings.kv_endpoints, 200, run.settings.dtype)

    async with run.at_once():
        for number in (1, 2):  # 260 of 768 tokens each
            run.submit(f"import {number}", asked, 60, import_from=handle(number))
        run.submit("beside", make_prompt(200, 5), 100)
    await run.ends_of("beside", "import 1", "import 2")
    await run.until(lambda: len(run.pulls) >= 2)  # their events come on another socket than the tokens
    run.follow()
    return {
        "whole": run.tokens["whole"],
        "imported": [run.tokens[f"import {number}"] for number in (1, 2)],
        "beside": [run.beside[name] for name in ("import 1", "import 2", "beside")],
        "pulled": [(pull.ok, pull.tokens) for pull in run.pulls],
    }


async def budget(run: WatchedEngine) -> dict[str, Any]:
    """A long prompt beside two decodes of which one is in a hurry, without a budget and with one."""
    found: dict[str, Any] = {}
    for label, step_budget in (("without", False), ("with", True)):
        run.engine.set_policies(EnginePolicies(step_budget=step_budget))
        run.submit(f"hurry {label}", make_prompt(20), 60, slo=Slo(tpot_s=0.05))
        run.submit(f"other {label}", make_prompt(20, 1), 60, slo=Slo(tpot_s=5.0))
        async with run.stopped_at(f"other {label}", 3):
            since = run.engine.steps.page("e", 1, -1, 1).next
            run.submit(f"long {label}", make_prompt(400, 9), 3)
        await run.ends_of(*(f"{who} {label}" for who in ("hurry", "other", "long")))
        steps = run.engine.steps.page("e", 1, since, 1000).steps
        found[label] = [sum(tokens for tokens, _ in step.prefill) for step in steps if step.prefill]
        found[f"tokens {label}"] = [run.tokens[f"{who} {label}"] for who in ("hurry", "other", "long")]
    run.follow()
    return found


async def chunks(run: WatchedEngine) -> dict[str, Any]:
    """Another chunk size while it runs, of which the last is more than the engine was started for."""
    found: dict[str, Any] = {}
    for tokens in (128, 48, 1024):
        run.engine.set_chunk_size(tokens)
        run.partly.clear()
        since = run.engine.steps.page("e", 1, -1, 1).next
        run.submit(f"chunks {tokens}", make_prompt(200, 11), 3)
        await run.ends_of(f"chunks {tokens}")
        steps = run.engine.steps.page("e", 1, since, 1000).steps
        found[f"of {tokens}"] = [new for step in steps for new, _ in step.prefill]
        found[f"partly {tokens}"] = list(run.partly)
        found[f"tokens {tokens}"] = run.tokens[f"chunks {tokens}"]
    return found


async def streams(run: WatchedEngine) -> dict[str, Any]:
    """A stream comes while a long prompt is computed in chunks that take every token of a step; a heavier prompt that
    comes with it waits behind.
    """
    asked = make_prompt(100, 3)
    run.submit("whole stream", asked, 20)
    run.submit("its export", asked, 1, first_token_only=True, export_to="stream")
    await run.ends_of("whole stream", "its export")
    kv = KvHandle("stream", "e", 1, "f", run.settings.kv_endpoints, 100, run.settings.dtype)
    scheduler, plans = run.engine._scheduler, list[tuple[bool, dict[str, int]]]()
    schedule = scheduler.schedule

    def planned(*given: Any, **more: Any) -> Any:
        come = "stream" in scheduler.finished_recving_kv_req_ids
        plan = schedule(*given, **more)
        plans.append((come, dict(plan.num_scheduled_tokens)))
        return plan

    scheduler.schedule = planned
    run.engine.set_chunk_size(32)
    since = len(run.pulls)
    async with run.at_once():
        run.submit("long", make_prompt(600, 9), 3)
        run.submit("stream", asked + run.tokens["its export"], 19, import_from=kv, started=True)
        run.submit("heavy prompt", make_prompt(20, 4), 3, slo=Slo(weight=8.0))
    await run.ends_of("long", "stream", "heavy prompt")
    await run.until(lambda: len(run.pulls) > since)
    scheduler.schedule = schedule
    run.engine.set_chunk_size(128)
    came = next(at for at, (come, _) in enumerate(plans) if come)
    first = next(at for at, (_, tokens) in enumerate(plans) if "stream" in tokens)
    return {
        "entered": [name for name in run.entered if name in ("long", "stream", "heavy prompt")],
        "pulled": [(pull.ok, pull.tokens) for pull in run.pulls[since:]],
        "steps from its KV to its token": first - came,
        "beside it": plans[first][1],
        "same": run.tokens["its export"] + run.tokens["stream"] == run.tokens["whole stream"],
    }


async def pressure(run: WatchedEngine) -> dict[str, Any]:
    """Blocks run out under a prompt that is computed slowly and a stream that came after it."""
    asked = make_prompt(100, 3)
    run.submit("one of pressure", asked, 1, first_token_only=True, export_to="pressure")
    await run.ends_of("one of pressure")
    kv = KvHandle("pressure", "e", 1, "f", run.settings.kv_endpoints, 100, run.settings.dtype)
    run.engine.set_chunk_size(4)
    before = run.preemptions
    async with run.at_once():
        run.submit("slow prompt", make_prompt(560, 9), 3)  # 18 of 24 blocks
    asked = asked + run.tokens["one of pressure"]
    async with run.stopped_at("slow prompt", 0):
        run.submit("growing stream", asked, 250, import_from=kv, started=True)
    await run.ends_of("slow prompt", "growing stream")
    run.engine.set_chunk_size(128)
    times = {name: run.entered.count(name) for name in ("slow prompt", "growing stream")}
    return {"entered": times, "preemptions": run.preemptions - before}


async def grammar(run: WatchedEngine) -> dict[str, Any]:
    """One that waits for its grammar at the head of the line is passed, and holds nothing that another one needs."""
    run.follow(Fcfs(), ReserveStatic(reserve_all=True))
    async with run.at_once():
        run.submit("dear", make_prompt(50), 100, sampling=guided(json=DEAR))
        run.submit("plain", make_prompt(600), 90)  # 690 of 768 tokens
    await run.until(lambda: len(run.tokens["plain"]) > 1 or run.ends["dear"].done())
    found = {"began": len(run.tokens["plain"]) > 1, "compiling": not run.ends["dear"].done()}
    run.engine.abort("dear")
    await run.ends_of("plain")
    run.follow()
    return found


async def found(port: int) -> dict[str, Any]:
    """Try it all."""
    more = {"num_gpu_blocks_override": BLOCKS, "enable_prefix_caching": False}
    limits = {
        "dtype": "float32",
        "max_model_len": 704,
        "chunk_size": 128,
        "max_seqs": 16,
        "engine_args": more,
        "async_scheduling": True,
    }
    async with started(port, 16 << 20, {"rates": lambda: RATES}, **limits) as here:
        run = WatchedEngine(here.engine, here.settings)
        following = asyncio.create_task(run.follow_events(here.events))
        answers: dict[str, Any] = {}
        for scenario in (
            orders,
            small_kv,
            local_order,
            shut,
            aborts,
            late_prediction,
            imports,
            budget,
            chunks,
            streams,
            pressure,
            grammar,
        ):
            answers[scenario.__name__] = await scenario(run)
        following.cancel()
        return answers
