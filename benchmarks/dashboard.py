"""`polyphase bench dashboard`: how soon a page shows something useful, and what a session costs.

Two kinds of clusters. Quiet: monitor, scheduler and dashboard are real processes, the instances those of
`bench control`, all of whose loads change each 100 ms; the database holds a day with 10^5 requests. Busy: a whole suite
with emulated instances that answer chats as fast as the machine's cores allow. The browser is headless Chromium, as
Playwright drives it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from statistics import median

import msgspec
import numpy as np
import psutil
import uvloop
from playwright.async_api import Browser, async_playwright
from prometheus_client import CollectorRegistry

from benchmarks.cluster_files import emulated
from benchmarks.control import Control, make_info, running
from benchmarks.measuring import cores, port_of
from benchmarks.results import Figures, Result, at_most, result
from benchmarks.suite import spawned, started
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
from tools.client import CHAT, StreamFailed, chat_body, stream_completion, users

SIZES = (4, 32, 200)
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")
VISITS, SESSIONS, WINDOW_S, SHOWN_MS = 5, 4, 20.0, 60_000


@dataclass(frozen=True, slots=True)
class Page:
    """path: of its address. useful: what the page itself shows that is of use. first: the same in what comes before it.
    charts: all its charts over time. suite: whether the page needs services that only a whole suite has.
    """

    path: str
    useful: str
    first: str = "#pp-first table"
    charts: tuple[str, ...] = ()
    suite: bool = False


TABLE = "[data-testid=stDataFrame]"
PAGES = {
    "overview": Page(
        "", ".pp-verdict", "#pp-first .pp-verdict", (".st-key-over-time .pp-plot", ".st-key-heat .pp-map")
    ),
    "instances": Page("instances", f"{TABLE}, .st-key-cards"),
    "requests": Page("requests", TABLE),
    "events": Page("events", f"{TABLE}, .pp-empty"),
    "policies": Page("policies", ".pp table"),
    "predictor": Page("predictor", ".pp p", "#pp-first p", suite=True),
    "plan": Page("plan", ".pp-plan", "#pp-first .pp-plan", suite=True),
    "try": Page("try", ".st-key-talk-input input", suite=True),
}
AIM_FIRST_S, AIM_BUSY_S, AIM_SESSION_CORES = 1.0, 2.0, 0.05
NOTE = (
    "…_first: from the address to what is of use on that page, in a new session of a running dashboard; median of "
    f"{VISITS}. …_ready: to the page itself, with its buttons; …_charts: to its charts over time. session_cores: CPU "
    "of the dashboard's process for one more session that looks at the overview, in cores, from "
    f"{SESSIONS} sessions and one. Browser, monitor and instances share the machine's cores."
)

# The busy cluster: chats in a closed loop, so that the cores are never idle.
BUSY_INSTANCES, BUSY_USERS, BUSY_TOKENS, BUSY_STEP_S, BUSY_SETTLE_S = 32, 96, 64, 0.02, 15.0
PROMPT = "The quick brown fox jumps over the lazy dog. " * 8
BUSY_NOTE = (
    f"busy: {BUSY_INSTANCES} emulated instances and {BUSY_USERS} users that send chats of {BUSY_TOKENS} tokens one "
    "after the other, on the same cores. …_first, …_ready, …_charts: as without --busy; …_worst: the longest time to "
    "a page itself. machine_cores: cores in use on the machine without a browser."
)


def run_dashboard_bench(sizes: tuple[int, ...] = SIZES, busy: bool = False) -> Result:
    """Figures by number of instances; aims are about the largest. busy: beside a busy cluster instead. Raises
    NotFound.
    """
    if not CHROMIUM.exists():
        raise NotFound(f"{CHROMIUM} is missing: apt-get install -y chromium")
    if busy:
        figures = uvloop.run(_measure_busy())
        aims = {f"{name}_worst_s": at_most(AIM_BUSY_S, figures[f"{name}_worst_s"]) for name in PAGES}
        return result({"busy": figures}, aims, [BUSY_NOTE])
    by_size: dict[str, Figures] = {str(size): uvloop.run(_measure(size)) for size in sizes}
    largest = by_size[str(sizes[-1])]
    aims = {
        f"overview_first_s at {sizes[-1]}": at_most(AIM_FIRST_S, largest["overview_first_s"]),
        f"session_cores at {sizes[-1]}": at_most(AIM_SESSION_CORES, largest["session_cores"]),
    }
    return result(by_size, aims, [NOTE])


# Pages.


async def _measure(size: int) -> Figures:
    async with running(size, fill) as control, _dashboard(control) as url, _chromium() as browser:
        control.busy()
        figures = await _visits(browser, url, {name: page for name, page in PAGES.items() if not page.suite})
        one = await _sessions(browser, url, control, 1)
        several = await _sessions(browser, url, control, SESSIONS)
    figures |= {"one_session_cores": one, "session_cores": (several - one) / (SESSIONS - 1)}
    return {name: round(value, 3) for name, value in figures.items() if not name.endswith("_worst_s")}


async def _measure_busy() -> Figures:
    roles = [{"id": role.value, "count": BUSY_INSTANCES // 2, "role": role.value} for role in Role]
    services = {name: {"enabled": True} for name in ("dashboard", "predictor", "planner")}
    cluster = emulated("dashboard", roles, {"emulated_step_s": BUSY_STEP_S}, **services)
    async with started(cluster) as suite, _chromium() as browser:
        with spawned(_run_users, port_of(suite)):
            await asyncio.sleep(BUSY_SETTLE_S)
            idle_s, began = psutil.cpu_times().idle, time.monotonic()
            await asyncio.sleep(WINDOW_S / 4)
            idle_cores = (psutil.cpu_times().idle - idle_s) / (time.monotonic() - began)
            figures = await _visits(browser, suite.plan.dashboard_url, PAGES)
    figures["machine_cores"] = (psutil.cpu_count() or 1) - idle_cores
    return {name: round(value, 3) for name, value in figures.items()}


def _run_users(pipe: Connection, port: int) -> None:
    """Send chats in a closed loop until the pipe has something or its other end is gone."""
    uvloop.run(_chat(pipe, port))


async def _chat(pipe: Connection, port: int) -> None:
    async def request(user: int, turn: int) -> bool:
        body = chat_body(f"User {user}, turn {turn}. {PROMPT}", BUSY_TOKENS)
        try:
            await stream_completion("127.0.0.1", port, body, path=CHAT)
        except (StreamFailed, OSError):
            return False
        return True

    async with users(BUSY_USERS, request):
        await asyncio.to_thread(pipe.poll, None)


@asynccontextmanager
async def _chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        await browser.close()


async def _visits(browser: Browser, url: str, pages: Mapping[str, Page]) -> Figures:
    """Medians of each page, and its longest visit."""
    figures: Figures = {}
    for name, page in pages.items():
        # In the first visit the process imports what it needs.
        visits = [await visit(browser, f"{url}/{page.path}", page) for _ in range(1 + VISITS)][1:]
        figures |= {f"{name}_{what}_s": median(each[what] for each in visits) for what in visits[0]}
        figures[f"{name}_worst_s"] = max(each["ready"] for each in visits)
    return figures


async def visit(browser: Browser, url: str, page: Page) -> dict[str, float]:
    """Seconds until the page shows what is of use, until it is there itself, and until it shows its charts."""
    context = await browser.new_context(viewport={"width": 1440, "height": 900})
    tab = await context.new_page()
    seen, began = dict[str, float](), time.monotonic()
    await tab.goto(url, wait_until="commit")
    own = f"#root :is({page.useful})"
    for what, selectors in (("first", (f"{page.first}, {own}",)), ("ready", (own,)), ("charts", page.charts)):
        for selector in selectors:
            await tab.locator(selector).first.wait_for(timeout=SHOWN_MS)
            seen[what] = time.monotonic() - began
    await context.close()
    return seen


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


async def _sessions(browser: Browser, url: str, control: Control, sessions: int) -> float:
    """Cores of the dashboard's process while so many tabs show the overview."""
    contexts = [await browser.new_context(viewport={"width": 1440, "height": 900}) for _ in range(sessions)]
    for context in contexts:
        page = await context.new_page()
        await page.goto(url)
        await page.locator("#root .pp-verdict").wait_for(timeout=SHOWN_MS)
    await asyncio.sleep(WINDOW_S / 4)
    used = await cores({"dashboard": control.pids["dashboard"]}, WINDOW_S)
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
