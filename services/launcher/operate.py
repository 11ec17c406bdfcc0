"""`polyphase status`, `flip`, `drain`, `resume`, `forget`, `operation`: look at a running suite and act on it."""

import getpass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.launcher import state_file
from shared.errors import NotFound, OutcomeUnknown
from shared.wire.clients.monitor import MonitorClient

_STYLES = {"ready": "green", "starting": "yellow", "draining": "magenta", "unresponsive": "red", "dead": "red"}

_NO = "[red]✘[/]"
_MARKS = {"failed": _NO, "refused": _NO, "expired": _NO, "running": "…", "unknown": "?"}  # of other results: ✔


def monitor_url(data_dir: Path, given: str) -> str:
    """`--monitor`, or the running suite's. Raises NotFound."""
    return given or state_file.read(data_dir).monitor_url


def actor() -> str:
    """Who acts, for the audit."""
    return f"{getpass.getuser()} (polyphase)"


async def status(data_dir: Path, given: str) -> dict[str, Any]:
    """The processes of this machine's suite, and the instances and SLO windows of the cluster."""
    async with MonitorClient(monitor_url(data_dir, given)) as monitor:
        answer: dict[str, Any] = {"instances": await monitor.instances(), "slo": await monitor.slo()}
    try:
        state = state_file.read(data_dir)
    except NotFound:
        return answer
    if given and given != state.monitor_url:
        return answer
    processes = [
        {"name": p.name, "pid": p.pid, "state": p.state, "restarts": p.restarts, "fault": p.fault}
        for p in state.processes
    ]
    return {"api_url": state.api_url, "dashboard_url": state.dashboard_url, "processes": processes, **answer}


async def act(what: str, instance: str, url: str, *, timeout_s: float, force: bool) -> dict[str, Any]:
    """Flip, drain, resume or forget. Raises the monitor's own error."""
    try:
        return await _act(what, instance, url, timeout_s=timeout_s, force=force)
    except OutcomeUnknown as unknown:
        ask = f"polyphase operation {unknown.operation_id}"
        raise OutcomeUnknown(f"{unknown.message}; ask with: {ask}", operation_id=unknown.operation_id) from unknown


async def operation(operation_id: str, url: str) -> dict[str, Any]:
    """How an operation stands. Raises NotFound."""
    async with MonitorClient(url) as monitor:
        return await monitor.operation(operation_id)


async def _act(what: str, instance: str, url: str, *, timeout_s: float, force: bool) -> dict[str, Any]:
    async with MonitorClient(url) as monitor:
        if what == "flip":
            return await monitor.flip(instance, force=force, drain_timeout_s=timeout_s, who=actor())
        if what == "drain":
            return await monitor.drain(instance, force=force, timeout_s=timeout_s, who=actor())
        if what == "forget":
            await monitor.forget(instance, who=actor())
            return {"instance_id": instance, "result": "forgotten"}
        return await monitor.resume(instance, who=actor())


def show_status(console: Console, answer: dict[str, Any]) -> None:
    """Tables for people."""
    if "api_url" in answer:
        console.print(f"API {answer['api_url']}   dashboard {answer['dashboard_url'] or 'off'}\n")
    console.print(_instances(answer["instances"]))
    if answer["slo"]:
        console.print(_slo(answer["slo"]))
    restarted = [p for p in answer.get("processes", []) if p["restarts"] or p["state"] != "ready"]
    for process in restarted:
        times = f"started again {process['restarts']} times, the last one because: {process['fault']}"
        console.print(f"{process['name']}: {process['state']}" + (f", {times}" if process["restarts"] else ""))


def show_outcome(console: Console, what: str, instance: str, answer: dict[str, Any]) -> None:
    """What the monitor said about an operation, in one line."""
    figures = ", ".join(f"{key} {_short(value)}" for key, value in answer.items() if key != "instance_id")
    console.print(f"{_MARKS.get(answer.get('result', ''), '[green]✔[/]')} {what} {instance}: {figures}")


def _instances(entries: list[dict[str, Any]]) -> Table:
    table = Table(title="Instances", title_justify="left", box=None, padding=(0, 1))
    for column in ("instance", "role", "state", "accelerator"):
        table.add_column(column, no_wrap=True)
    for column in ("queue", "run", "wait", "decode", "free KV", "MiB staged"):
        table.add_column(column, justify="right")
    for entry in entries:
        info, load = entry["info"], entry["load"]
        state = Text(entry["state"], _STYLES.get(entry["state"], ""))
        counts = [str(load[key]) for key in ("queued_prefill", "running", "waiting", "decoding")]
        free = f"{load['free_blocks'] / max(1, info['total_blocks']):.0%}"
        engine = " (emulated)" if info["compatibility"]["engine"] == "emulated" else ""
        table.add_row(
            entry["instance_id"],
            entry["role"],
            state,
            info["accelerator"] + engine,
            *counts,
            free,
            f"{load['staged_bytes'] / 2**20:.1f}",
        )
    return table


def _slo(windows: list[dict[str, Any]]) -> Table:
    table = Table(title="SLO attainment", title_justify="left", box=None, padding=(0, 1))
    table.add_column("class")
    for column in ("window", "requests", "both", "TTFT", "TPOT", "TTFT p50", "p99", "TPOT p50", "p99"):
        table.add_column(column, justify="right")
    for window in windows:
        shares = [_share(window[key]) for key in ("attainment", "ttft_attainment", "tpot_attainment")]
        times = [_ms(window[key][p]) for key in ("ttft_s", "tpot_s") for p in ("p50", "p99")]
        table.add_row(window["slo"], f"{window['window_s']:g} s", str(window["requests"]), *shares, *times)
    return table


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _ms(value_s: float | None) -> str:
    return "–" if value_s is None else f"{value_s * 1e3:.1f} ms"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)
