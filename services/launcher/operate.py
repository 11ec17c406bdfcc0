"""`polyphase flip`, `drain`, `resume`, `forget`, `operation`: act on a running suite, and say what came of it."""

import getpass
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from services.launcher import cluster_token, state_file
from shared.domain.verdict import duration
from shared.errors import Conflict, DeadlineExceeded, NotFound, OutcomeUnknown, PolyphaseError
from shared.files.faults import meant
from shared.wire.addresses import several
from shared.wire.clients.monitor import MonitorClient

DOING = {"flip": "Draining and flipping", "drain": "Draining", "resume": "Resuming", "forget": "Forgetting"}
_MARKS = {"succeeded": ("✔", "green"), "running": ("…", "yellow"), "unknown": ("?", "yellow")}  # of others: ✘
_FAILED = ("failed", "refused", "expired")


def monitor_url(data_dir: Path, given: str) -> str:
    """`--monitor`, or the running suite's. Raises NotFound."""
    return given or state_file.read(data_dir).monitor_url


def token(data_dir: Path, url: str) -> str:
    """The secret for a service at `url`: as the environment says, or the running suite's if it is one of its own."""
    return cluster_token.of_environment() or (cluster_token.kept(data_dir) if _ours(data_dir, url) else "")


def _ours(data_dir: Path, url: str) -> bool:
    """A secret is not shown to whatever `--monitor` names."""
    try:
        state = state_file.read(data_dir)
    except NotFound:
        return False
    return set(several(url)) <= {*several(state.monitor_url), state.planner_url}


def actor() -> str:
    """Who acts, for the audit."""
    return f"{getpass.getuser()} (polyphase)"


async def act(what: str, instance: str, url: str, token: str = "", *, timeout_s: float, force: bool) -> dict[str, Any]:
    """Flip, drain, resume or forget; `token`: the cluster's secret.

    Raises the monitor's own error, with what would help on a line of its own.
    """
    try:
        return await _act(what, instance, url, token, timeout_s=timeout_s, force=force)
    except OutcomeUnknown as unknown:
        ask = f"polyphase operation {unknown.operation_id}"
        raise OutcomeUnknown(f"{unknown.message}; ask with: {ask}", operation_id=unknown.operation_id) from unknown
    except (Conflict, DeadlineExceeded, NotFound) as refusal:
        helps = await _help(what, instance, url, refusal)
        raise type(refusal)(f"{refusal.message}{helps and chr(10)}{helps}") from refusal


async def operation(operation_id: str, url: str) -> dict[str, Any]:
    """How an operation stands; the beginning of its id suffices where one of the newest has it. Raises NotFound."""
    async with MonitorClient(url) as monitor:
        try:
            return await monitor.operation(operation_id)
        except NotFound:
            rows = await monitor.flips(1_000)
            found = [row for row in rows if str(row["operation_id"]).startswith(operation_id)]
            if len(found) != 1:
                raise
            return found[0]


async def _act(what: str, instance: str, url: str, token: str, *, timeout_s: float, force: bool) -> dict[str, Any]:
    async with MonitorClient(url, token=token) as monitor:
        if what == "flip":
            return await monitor.flip(instance, force=force, drain_timeout_s=timeout_s, who=actor())
        if what == "drain":
            return await monitor.drain(instance, force=force, timeout_s=timeout_s, who=actor())
        if what == "forget":
            await monitor.forget(instance, who=actor())
            return {"instance_id": instance, "result": "forgotten"}
        return await monitor.resume(instance, who=actor())


async def _help(what: str, instance: str, url: str, refusal: PolyphaseError) -> str:
    if not isinstance(refusal, NotFound):
        return help_of(what, instance, refusal)
    async with MonitorClient(url) as monitor:
        try:
            known = [str(entry["instance_id"]) for entry in await monitor.instances()]
        except PolyphaseError:
            return ""
    return help_of(what, instance, refusal, known)


def help_of(what: str, instance: str, refusal: PolyphaseError, known: list[str] | None = None) -> str:
    """What whoever was refused may do instead; empty where nothing is known to help."""
    said = refusal.message
    if isinstance(refusal, NotFound):
        near = meant(instance, known or []).removeprefix("; d").removesuffix(".")
        return f"{f'D{near} ' if near else ''}Known: {', '.join(known or []) or 'none yet'}"
    if isinstance(refusal, DeadlineExceeded):
        again = f"`polyphase {what} {instance} --timeout 120` waits longer"
        if what == "drain":
            return f"It goes on draining, and gets no new work: {again}; `polyphase resume {instance}` calls it off."
        return f"It has work again in the role it had. {again[0].upper() + again[1:]}."
    helps = {
        "is the last ready": f"Flip another instance to its role first, or `polyphase {what} {instance} --force`.",
        "only dead instances": f"`polyphase drain {instance}` gives it no more work; what is dead is forgotten.",
        "is under way": "One at a time: try again when it has ended.",
        "is dead": f"`polyphase logs {instance}` tells why; `polyphase forget {instance}` counts it no longer.",
        "is unresponsive": f"It is restarted if it stays so: `polyphase logs {instance}`.",
        "is starting": "Once it is ready it can be: `polyphase status`.",
    }
    return next((text for words, text in helps.items() if words in said), "")


def show_outcome(console: Console, what: str, instance: str, answer: Mapping[str, Any]) -> None:
    """What came of it, in a sentence or two."""
    mark, style = _MARKS.get(answer.get("result", "succeeded"), ("✘", "red"))
    if answer.get("result") == "forgotten":
        mark, style = _MARKS["succeeded"]
    console.print(Text(f"{mark} ", style).append(f"{sentence(what, instance, answer)}", "default"))
    if operation_id := answer.get("operation_id"):
        console.print(Text(f"  Operation {operation_id}", "dim"))


def sentence(what: str, instance: str, answer: Mapping[str, Any]) -> str:
    """How an operation went or stands."""
    result = answer.get("result")
    if result == "forgotten":
        return f"{instance} is forgotten: it counts no longer. If it comes back it registers anew."
    if result == "succeeded":
        return _done(what, instance, answer)
    course = f"The {what} of {instance}{_change(what, answer)}, asked for by {answer['who']} {_when(answer)},"
    if result == "running":
        return f"{course} is under way{_so_far(answer)}."
    if result in _FAILED:
        took = f" after {duration(answer['total_s'])}" if answer.get("total_s") else ""
        said = {"failed": f"failed{took}", "refused": "was refused", "expired": "came too late"}[str(result)]
        return f"{course} {said}: {answer['error']}."
    return f"{course} may have been carried out or not: {answer['error']}. `polyphase status` shows its role."


def _done(what: str, instance: str, answer: Mapping[str, Any]) -> str:
    if what == "flip":
        parts = [f"drained in {_took(answer['drain_s'])}"] if answer.get("drain_s") is not None else []
        parts += [f"flipped in {_took(answer['flip_s'])}"] if answer.get("flip_s") is not None else []
        return f"{instance} is now {answer['to_role']}{': ' + ', '.join(parts) if parts else ''}."
    if what == "drain":
        took = f" in {_took(answer['drain_s'])}" if answer.get("drain_s") is not None else ""
        return f"{instance} is drained: its work ended{took}. It gets none until `polyphase resume {instance}`."
    return f"{instance} gets work again, as {answer['to_role']}."


def _took(seconds: float) -> str:
    return duration(seconds) if seconds >= 0.001 else "under 1 ms"


def _change(what: str, answer: Mapping[str, Any]) -> str:
    return f" ({answer['from_role']} → {answer['to_role']})" if what == "flip" else ""


def _when(answer: Mapping[str, Any]) -> str:
    return f"at {datetime.fromtimestamp(answer['started_s']):%H:%M:%S}"


def _so_far(answer: Mapping[str, Any]) -> str:
    return f" since {duration(max(0.0, time.time() - answer['started_s']))}"
