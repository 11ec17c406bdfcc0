"""`polyphase demo`: starts a suite on free ports, checks each promise on it, and reports."""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
from rich.console import Console

from benchmarks.demo.answers import (
    check_bad_input,
    check_first_token,
    check_identity,
    check_lengths,
    check_samples,
    check_splits,
    check_zeroed_kv,
)
from benchmarks.demo.client import ApiClient, Prompts
from benchmarks.demo.disturbances import (
    check_control_plane,
    check_decode_loss,
    check_disconnects,
    check_flips,
    check_prefill_loss,
)
from benchmarks.demo.report import Section, as_result, show_section, show_summary
from benchmarks.suite import on_free_ports
from services.launcher import cli_common
from services.launcher.up import RunningSuite, UpOptions, cluster_of, running_suite, until_stopped
from shared.errors import PolyphaseError

READY_S, MEMORY_GIB = 60.0, 8.0
_BREAKS = (PolyphaseError, AssertionError, OSError, TimeoutError, LookupError, httpx.HTTPError)
Step = Callable[[], Awaitable[Section]]


async def demo(
    options: UpOptions, data_dir: Path | None, console: Console, *, as_json: bool = False, keep: bool = False
) -> bool:
    """Returns whether everything held; an interrupted demo did not."""
    began = time.monotonic()
    sections: list[Section] = []
    figures: dict[str, float] = {}
    work = _show(options, data_dir, console, sections, figures, keep)
    finished = await until_stopped(work, console) is not None
    figures["total_s"] = time.monotonic() - began
    if not keep:
        show_summary(console, sections, figures)
    result = as_result(sections, figures)
    if not finished and not keep:
        result["aims"]["the demo ran to its end"] = {"want": "yes", "got": "interrupted", "met": False}
    if as_json:
        cli_common.print_json(cli_common.summary(result))
    return bool(cli_common.summary(result)["ok"])


async def _show(
    options: UpOptions,
    data_dir: Path | None,
    console: Console,
    sections: list[Section],
    figures: dict[str, float],
    keep: bool,
) -> bool:
    began = time.monotonic()
    console.print("\n[bold]Polyphase[/] shows what it promises, on this machine, with real engines.\n")
    with tempfile.TemporaryDirectory(prefix="polyphase-demo-") as folder:
        where = data_dir or Path(folder)
        async with running_suite(on_free_ports(cluster_of(options)), where, console) as running:
            console.print()
            await running.supervisor.during(check_all(running, console, sections, figures))
            if keep:
                figures["total_s"] = time.monotonic() - began
                show_summary(console, sections, figures)
                urls = f"{running.plan.api_url}/v1 and {running.plan.dashboard_url}"
                console.print(f"The suite goes on: {urls}. Ctrl-C ends it.")
                await running.supervisor.during(asyncio.Event().wait())
    return True


async def check_all(
    running: RunningSuite, console: Console, sections: list[Section], figures: dict[str, float]
) -> None:
    """All checks, one after the other; a section is shown when its check has ended."""
    async with ApiClient(running.plan.api_url, running.plan.model) as api:
        prompts = await Prompts.of(api)
        for number, step in enumerate(steps(running, api, prompts), 1):
            with console.status(f"{number} …"):
                section = await _timed(step)
            sections.append(section)
            figures.update(section.figures)
            show_section(console, number, section)


def steps(running: RunningSuite, api: ApiClient, prompts: Prompts) -> tuple[Step, ...]:
    """The checks in the order of the report."""
    suite = running.suite
    return (
        lambda: _check_start(running),
        lambda: check_samples(api),
        lambda: check_lengths(suite, api),
        lambda: check_identity(suite, api, prompts),
        lambda: check_splits(suite, api, prompts),
        lambda: check_zeroed_kv(suite, api, prompts, running.supervisor.restart),
        lambda: check_first_token(suite, api, prompts),
        lambda: check_disconnects(suite, api, prompts),
        lambda: check_flips(suite, api, prompts),
        lambda: check_decode_loss(suite, api, prompts),
        lambda: check_prefill_loss(suite, api, prompts),
        lambda: check_control_plane(suite, api, prompts),
        lambda: check_bad_input(api),
    )


async def _check_start(running: RunningSuite) -> Section:
    section = Section("The whole suite is up")
    memory = running.suite.memory_bytes() / 2**30
    section.at_most("ready to serve", READY_S, running.took_s)
    section.check("memory of all processes", memory < MEMORY_GIB, f"under {MEMORY_GIB:g} GiB", f"{memory:.2f} GiB")
    section.figures |= {"ready_s": running.took_s, "memory_gib": memory}
    names = [process.name for process in running.plan.processes]
    section.lines.append(f"{len(names)} processes: {', '.join(names)}")
    return section


async def _timed(step: Step) -> Section:
    """The section of a check; a check that raises has not held."""
    began = time.monotonic()
    try:
        section = await step()
    except (*_BREAKS, ExceptionGroup) as error:
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if not isinstance(cause, _BREAKS):
            raise
        section = Section(f"A check broke: {type(cause).__name__}")
        section.check("the check could be made", False, "yes", str(cause)[:1000])
    section.took_s = time.monotonic() - began
    return section
