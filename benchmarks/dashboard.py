"""`polyphase bench dashboard`: how soon a page shows something useful, and what a session costs.

Monitor, scheduler and dashboard are real processes, the instances those of `bench control`, all of whose loads change
each 100 ms; the database holds a day with 10^5 requests. The browser is headless Chromium, as Playwright drives it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from statistics import median

import msgspec
import numpy as np
import uvloop
from playwright.async_api import Browser, async_playwright
from prometheus_client import CollectorRegistry

from benchmarks.control import Control, make_info, running
from benchmarks.measuring import cores
from benchmarks.results import Figures, Result, at_most, result
from services.cluster_monitor.load_history import FIGURES, STEPS_S, Totals
from services.cluster_monitor.request_stats import STEPS_S as SERVED_STEPS_S
from services.cluster_monitor.request_stats import Ended, How, Served
from services.launcher import ports
from services.launcher.plan import dashboard_command
from shared.domain.instance import InstanceLoad, InstanceState, InstanceView, Role
from shared.errors import NotFound
from shared.store.database import open_engine
from shared.store.tables import load_steps, requests, served
from shared.store.write_behind import WriteBehind

SIZES = (4, 32, 200)
CHROMIUM = Path("/usr/bin/chromium")
VISITS, SESSIONS, WINDOW_S, SHOWN_MS = 5, 4, 20.0, 30_000
# The path of each page, and what it shows first that is of use.
PAGES = {
    "overview": ("", ".pp-verdict"),
    "instances": ("instances", "[data-testid=stDataFrame], .st-key-cards"),
    "requests": ("requests", "[data-testid=stDataFrame]"),
}
AIM_FIRST_S, AIM_SESSION_CORES = 2.0, 0.05
NOTE = (
    "…_first: from the address to what is of use on that page, in a new session of a running dashboard; median of "
    f"{VISITS}. session_cores: CPU of the dashboard's process for one more session that looks at the overview, in "
    f"cores, from {SESSIONS} sessions and one. Browser, monitor and instances share the machine's cores."
)


def run_dashboard_bench(sizes: tuple[int, ...] = SIZES) -> Result:
    """Figures by number of instances; aims are about the largest. Raises NotFound."""
    if not CHROMIUM.exists():
        raise NotFound(f"{CHROMIUM} is missing: apt-get install -y chromium")
    figures: dict[str, Figures] = {str(size): uvloop.run(_measure(size)) for size in sizes}
    largest = figures[str(sizes[-1])]
    aims = {
        f"overview_first_s at {sizes[-1]}": at_most(AIM_FIRST_S, largest["overview_first_s"]),
        f"session_cores at {sizes[-1]}": at_most(AIM_SESSION_CORES, largest["session_cores"]),
    }
    return result(figures, aims, [NOTE])


# Pages.


async def _measure(size: int) -> Figures:
    async with running(size, fill) as control, _dashboard(control) as url, async_playwright() as playwright:
        control.fleet.send("busy")
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        figures = {}
        for name, (path, useful) in PAGES.items():
            # In the first visit the process imports what it needs.
            times = [await _visit(browser, f"{url}/{path}", useful) for _ in range(1 + VISITS)]
            figures[f"{name}_first_s"] = median(times[1:])
        one = await _sessions(browser, url, control, 1)
        several = await _sessions(browser, url, control, SESSIONS)
        await browser.close()
    figures |= {"one_session_cores": one, "session_cores": (several - one) / (SESSIONS - 1)}
    return {name: round(value, 3) for name, value in figures.items()}


@asynccontextmanager
async def _dashboard(control: Control) -> AsyncIterator[str]:
    """The URL of a dashboard over these services, which end it."""
    port = ports.free_range(size=1)
    urls = {"MONITOR": control.monitor_url, "SCHEDULER": control.scheduler_url, "GATEWAY": ""}
    environment = {f"POLYPHASE_DASHBOARD_{name}_URL": url for name, url in urls.items()}
    url = f"http://127.0.0.1:{port}"
    _, *command = dashboard_command(port)
    await control.start("dashboard", f"{url}/_stcore/health", *command, **environment)
    yield url


async def _visit(browser: Browser, url: str, useful: str) -> float:
    context = await browser.new_context(viewport={"width": 1440, "height": 900})
    page = await context.new_page()
    began = time.monotonic()
    await page.goto(url)
    await page.locator(useful).first.wait_for(timeout=SHOWN_MS)
    took_s = time.monotonic() - began
    await context.close()
    return took_s


async def _sessions(browser: Browser, url: str, control: Control, sessions: int) -> float:
    """Cores of the dashboard's process while so many tabs show the overview."""
    contexts = [await browser.new_context(viewport={"width": 1440, "height": 900}) for _ in range(sessions)]
    for context in contexts:
        page = await context.new_page()
        await page.goto(url)
        await page.locator(".pp-verdict").wait_for(timeout=SHOWN_MS)
    await asyncio.sleep(WINDOW_S / 4)
    used = await cores(control.pids("dashboard"), WINDOW_S)
    for context in contexts:
        await context.close()
    return used["dashboard"]


# The database of a day.

INSTANCES, REQUESTS, HOURS = 200, 100_000, 24
KEPT_S = {10: 3 * 3_600, 60: HOURS * 3_600, 600: HOURS * 3_600}
CLASSES = ("default", "chat", "batch")
TIMELINE = "x" * 2_000  # as long as that of a usual request


async def fill(url: str) -> None:
    """Fill the database at that URL."""
    engine, now = open_engine(url), time.time()
    store = WriteBehind(engine, CollectorRegistry(), capacity=1_000_000)
    await store._migrate()
    rng = Random(1)
    for rows, table in ((_requests(rng, now), requests), (_served(rng, now), served), (_loads(now), load_steps)):
        for row in rows:
            store.put(table, row)
            if store.queued >= 20_000:
                await store.flush()
        await store.flush()
    await engine.dispose()


def _requests(rng: Random, now: float) -> Iterator[dict[str, object]]:
    for number in range(REQUESTS):
        arrived_s = now - HOURS * 3_600 * rng.random()
        ttft_s = rng.lognormvariate(-1.0, 0.8)
        yield {
            "job_id": f"job-{number:06d}",
            "scheduler_id": "scheduler-0",
            "gateway_id": "gateway-0",
            "caller": f"key-{rng.randrange(20)}",
            "phase": "completed",
            "final": True,
            "arrived_s": arrived_s,
            "updated_s": arrived_s + rng.expovariate(0.1),
            "prompt_tokens": rng.randrange(4_000),
            "output_tokens": rng.randrange(500),
            "prefill_instance": f"prefill-{rng.randrange(INSTANCES // 2)}",
            "decode_instance": f"decode-{rng.randrange(INSTANCES // 2)}",
            "split": 100,
            "slo": rng.choice(CLASSES),
            "outcome": "peer_lost" if rng.random() < 0.0005 else "stop",
            "ttft_s": ttft_s,
            "tpot_s": rng.lognormvariate(-3.0, 0.3),
            "longest_gap_s": rng.lognormvariate(-2.0, 0.8),
            "slo_met": ttft_s < 0.8,
            "timeline": TIMELINE,
        }


def _steps(step_s: int, now: float) -> range:
    return range(int(now - KEPT_S[step_s]) // step_s * step_s, int(now), step_s)


def _served(rng: Random, now: float) -> Iterator[dict[str, object]]:
    columns = set(served.columns.keys()) & set(Served.__struct_fields__)
    for step_s in SERVED_STEPS_S:
        for slo in CLASSES:
            for start_s in _steps(step_s, now):
                sums = _sums(rng, slo, start_s)
                content = msgspec.json.encode(msgspec.structs.replace(sums, stages={})).decode()
                row = {"step_s": step_s, "time_s": start_s, "slo": slo, "life": "life", "content": content}
                yield row | {name: getattr(sums, name) for name in columns}


def _sums(rng: Random, slo: str, start_s: float) -> Served:
    """Twenty requests of a class that ended."""
    sums = Served()
    for _ in range(20):
        seconds = {name: rng.random() for name in ("queue", "prefill", "transfer", "decode_queue", "decode")}
        ended = Ended(
            slo=slo,
            how=How.COMPLETED,
            ended_s=start_s,
            code="stop",
            ttft_s=rng.lognormvariate(-1.0, 0.8),
            tpot_s=rng.lognormvariate(-3.0, 0.3),
            ttft_target_s=1.0,
            tpot_target_s=0.1,
            prompt_tokens=900,
            output_tokens=200,
            seconds=seconds,
            itl_target_s=0.25,
            gaps=199,
        )
        sums.add(msgspec.structs.replace(ended, longest_gap_s=rng.lognormvariate(-2.0, 0.8)))
    return sums


def _loads(now: float) -> Iterator[dict[str, object]]:
    who = [(view.info.instance_id, view.role.value, view.state.value) for view in _views()]
    names = msgspec.json.encode(who).decode()
    totals = msgspec.json.encode(
        Totals(
            running=100.0,
            waiting=20.0,
            queued_prefill_tokens=5_000.0,
            kv_used_prefill=6.0,
            kv_used_decode=6.0,
            kv_samples_prefill=10,
            kv_samples_decode=10,
            ready_prefill=1_000.0,
            ready_decode=1_000.0,
        )
    ).decode()
    figures = np.random.default_rng(1).random((INSTANCES, len(FIGURES)), np.float32).tobytes()
    for step_s in STEPS_S:
        for start_s in _steps(step_s, now):
            key = {"step_s": step_s, "time_s": start_s, "life": "life", "samples": step_s}
            yield {**key, "totals": totals, "instances": names, "figures": figures}


def _views() -> list[InstanceView]:
    load = InstanceLoad(time_s=1.0, running=20, waiting=3, free_blocks=2_000, context_tokens=9_000, decoding=20)
    return [
        InstanceView(make_info(f"{role.value}-{number}"), role, InstanceState.READY, load)
        for role in Role
        for number in range(INSTANCES // 2)
    ]
