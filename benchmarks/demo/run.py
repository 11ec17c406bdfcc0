"""`polyphase demo`: starts a suite on free ports, checks each promise on it, and reports."""

import asyncio
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.demo.checked_suite import CheckedSuite
from benchmarks.demo.checks import CHECKS
from benchmarks.demo.report import Report
from benchmarks.suite import started
from services.launcher import cli_common
from services.launcher.up import UpOptions, cluster_of, until_stopped
from tools.client import ApiClient, Prompts


async def demo(
    options: UpOptions, data_dir: Path | None, console: Console, *, as_json: bool = False, keep: bool = False
) -> bool:
    """Returns whether everything held; an interrupted demo did not."""
    console.print("\n[bold]Polyphase[/] shows what it promises, on this machine, with real engines.\n")
    report = Report(console)
    finished = await until_stopped(_check(options, data_dir, report, keep), console) is not None
    if not keep:
        report.summarise()
    result = cli_common.summary(report.as_result(finished=finished or keep))
    if as_json:
        cli_common.print_json(result)
    return bool(result["ok"])


async def _check(options: UpOptions, data_dir: Path | None, report: Report, keep: bool) -> bool:
    with tempfile.TemporaryDirectory(prefix="polyphase-demo-") as folder:
        async with started(cluster_of(options), data_dir or Path(folder), report.console) as running:
            report.console.print()
            async with ApiClient(running.plan.api_url, running.plan.model) as api:
                checked = CheckedSuite(running, api, await Prompts.of(api))
                await running.supervisor.during(report.run(CHECKS, checked))
            if keep:
                report.summarise()
                urls = f"{running.plan.api_url}/v1 and {running.plan.dashboard_url}"
                report.console.print(f"The suite goes on: {urls}. Ctrl-C ends it.")
                await running.supervisor.during(asyncio.Event().wait())
    return True
