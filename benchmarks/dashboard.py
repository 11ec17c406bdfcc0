"""`polyphase bench dashboard`: how soon a page shows something useful, and what a session that looks on costs.

Monitor, scheduler and dashboard are real processes, the instances those of `bench control`, all of whose loads change
each 100 ms; the database holds a day with 10^5 requests. The browser is headless Chromium, as Playwright drives it.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from playwright.async_api import Browser, Page, async_playwright

from benchmarks.console import fill
from benchmarks.control import Control, healthy, running, until
from services.launcher import ports
from services.launcher.plan import dashboard_command
from shared.errors import NotFound
from shared.store.database import open_engine

SIZES = (4, 32, 200)
CHROMIUM = Path("/usr/bin/chromium")
VISITS, SESSIONS, WINDOW_S, SHOWN_MS = 5, 4, 20.0, 30_000
# What each page shows first that is of use: the verdict, the instances, the requests.
PAGES = {"overview": ("", ".pp-verdict"), "instances": ("instances", "[data-testid=stDataFrame], .st-key-cards")}
PAGES["requests"] = ("requests", "[data-testid=stDataFrame]")
FIRST_S, SESSION_CORES = 2.0, 0.05
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
Figures = dict[str, float]


def run_dashboard_bench(sizes: tuple[int, ...] = SIZES) -> dict[str, Any]:
    """{"figures": {size: {name_unit: number}}, "aims": of the largest, "notes": [str]}. Raises NotFound."""
    if not CHROMIUM.exists():
        raise NotFound(f"{CHROMIUM} is missing: apt-get install -y chromium")
    figures = {str(size): uvloop.run(_measure(size)) for size in sizes}
    largest = figures[str(sizes[-1])]
    aims = {
        f"{name} at {sizes[-1]}": {"want": f"<= {most:g}", "got": largest[name], "met": largest[name] <= most}
        for name, most in (("overview_first_s", FIRST_S), ("session_cores", SESSION_CORES))
    }
    note = (
        "…_first: from the address to what is of use on that page, in a new session of a running dashboard; median of "
        f"{VISITS}. session_cores: CPU of the dashboard's process for one more session that looks at the overview, in "
        f"cores, from {SESSIONS} sessions and one. Browser, monitor and instances share the machine's cores."
    )
    return {"figures": figures, "aims": aims, "notes": [note]}


async def _measure(size: int) -> Figures:
    async with running(size, _fill) as control, _served(control) as url, async_playwright() as playwright:
        control.load("busy")
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        figures = {f"{name}_first_s": await _first(browser, f"{url}/{at}", what) for name, (at, what) in PAGES.items()}
        one = await _looking_on(browser, url, control, 1)
        several = await _looking_on(browser, url, control, SESSIONS)
        await browser.close()
    figures |= {"one_session_cores": one, "session_cores": (several - one) / (SESSIONS - 1)}
    return {name: round(value, 3) for name, value in figures.items()}


async def _fill(url: str) -> None:
    engine = open_engine(url)
    await fill(engine, time.time())
    await engine.dispose()


@asynccontextmanager
async def _served(control: Control) -> AsyncIterator[str]:
    """The URL of a dashboard over these services."""
    port = ports.free_range(size=1)
    prefix = "POLYPHASE_DASHBOARD_"
    environment = {
        f"{prefix}MONITOR_URL": control.monitor_url,
        f"{prefix}SCHEDULER_URL": control.scheduler_url,
        f"{prefix}GATEWAY_URL": "",
    }
    _, *command = dashboard_command(port)
    await control.start("dashboard", *command, **environment)
    url = f"http://127.0.0.1:{port}"
    await until(lambda: healthy(f"{url}/_stcore/health"), "the dashboard answers")
    yield url


async def _first(browser: Browser, url: str, what: str) -> float:
    """The median of several sessions; one before them has the process import what it needs."""
    found = [await _visit(browser, url, what) for _ in range(1 + VISITS)]
    return median(found[1:])


async def _visit(browser: Browser, url: str, what: str) -> float:
    context = await browser.new_context(viewport={"width": 1440, "height": 900})
    page = await context.new_page()
    began = time.monotonic()
    await page.goto(url)
    await page.locator(what).first.wait_for(timeout=SHOWN_MS)
    took_s = time.monotonic() - began
    await context.close()
    return took_s


async def _looking_on(browser: Browser, url: str, control: Control, sessions: int) -> float:
    """Cores of the dashboard's process while so many tabs show the overview."""
    contexts = [await browser.new_context(viewport={"width": 1440, "height": 900}) for _ in range(sessions)]
    pages: list[Page] = [await context.new_page() for context in contexts]
    for page in pages:
        await page.goto(url)
        await page.locator(".pp-verdict").wait_for(timeout=SHOWN_MS)
    await asyncio.sleep(WINDOW_S / 4)
    began, before = time.monotonic(), control.cpu_s("dashboard")
    await asyncio.sleep(WINDOW_S)
    cores = (control.cpu_s("dashboard") - before) / (time.monotonic() - began)
    for context in contexts:
        await context.close()
    return cores
