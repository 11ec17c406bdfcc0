"""Commands that change a running suite: flip, drain, resume and forget instances, change policies, answer proposals.

Each sends a change to the monitor or the planner, waits for its outcome and shows it. Advice after a refusal depends on
the class of the error and the state of the instance.
"""

import asyncio
import difflib
import getpass
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.launcher import cluster_keys, state_file
from shared.domain.instance import InstanceState
from shared.domain.policies import KINDS
from shared.domain.route import PolicySpec
from shared.domain.verdict import duration
from shared.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    PolyphaseError,
    Unavailable,
)
from shared.policy import registry
from shared.policy.registry import from_words, in_words
from shared.wire.addresses import several
from shared.wire.api import Operation, OperationKind, OperationResult
from shared.wire.clients.monitor import MonitorClient
from shared.wire.clients.planner import PlannerClient

Change = dict[str, PolicySpec | None]
DOING = {"flip": "Draining and flipping", "drain": "Draining", "resume": "Resuming", "forget": "Forgetting"}
FOLLOWED_S, POLICY_POLL_S = 3.0, 0.05
PROPOSALS_SHOWN = 10
PROPOSAL_POLL_S, CARRIED_OUT_S = 0.2, 600.0
MAX_UNANSWERED = 50  # polls in a row that the planner, which may be restarting, does not answer
_MARKS = {  # of all other results: ✘
    OperationResult.SUCCEEDED: ("✔", "green"),
    OperationResult.RUNNING: ("…", "yellow"),
    OperationResult.UNKNOWN: ("?", "yellow"),
}
_PROPOSAL_STYLES = {"open": "yellow", "applied": "green", "failed": "red"}
_SOURCE = re.compile(r"\s*\b(?:Source|F|F, [^:]*): ")  # where a docstring turns to its source


def monitor_url(data_dir: Path, given: str) -> str:
    """`--monitor`, or the monitor of the running suite. Raises NotFound."""
    return given or state_file.read(data_dir).monitor_url


def planner_url(data_dir: Path, given: str) -> str:
    """`--planner`, or the planner of the running suite. Raises NotFound."""
    url = given or state_file.read(data_dir).planner_url
    if not url:
        raise NotFound("this suite has no planner (`planner: {enabled: false}` in its cluster file)")
    return url


def token(data_dir: Path, url: str) -> str:
    """The cluster token for a service at `url`: from the environment, or that of the running suite.

    The suite's own token is sent to its own services only, not to whatever `--monitor` names.
    """
    if given := cluster_keys.token_of_environment():
        return given
    try:
        state = state_file.read(data_dir)
    except NotFound:
        return ""
    ours = set(several(url)) <= {*several(state.monitor_url), state.planner_url}
    return cluster_keys.kept_token(data_dir) if ours else ""


def actor() -> str:
    """The name of the user in the audit."""
    return f"{getpass.getuser()} (polyphase)"


async def act(
    what: str, instance: str, url: str, token: str = "", *, timeout_s: float, force: bool
) -> Operation | None:
    """Flip, drain, resume or forget an instance; None for the last, which is no operation.

    Raises the monitor's own error, with advice on a line of its own.
    """
    try:
        async with MonitorClient(url, token=token) as monitor:
            if what == "forget":
                await monitor.forget(instance, who=actor())
                return None
            if what == "flip":
                answer = await monitor.flip(instance, force=force, drain_timeout_s=timeout_s, who=actor())
            elif what == "drain":
                answer = await monitor.drain(instance, force=force, timeout_s=timeout_s, who=actor())
            else:
                answer = await monitor.resume(instance, who=actor())
            return msgspec.convert(answer, Operation)
    except OutcomeUnknown as unknown:
        message = f"{unknown.message}; `polyphase operation {unknown.operation_id}` shows its outcome"
        raise OutcomeUnknown(message, operation_id=unknown.operation_id) from unknown
    except (Conflict, DeadlineExceeded, NotFound) as refusal:
        advice = advice_on(what, instance, refusal, await _instances(url))
        raise type(refusal)(f"{refusal.message}\n{advice}" if advice else refusal.message) from refusal


async def _instances(url: str) -> list[dict[str, Any]]:
    async with MonitorClient(url) as monitor:
        try:
            return await monitor.instances()
        except PolyphaseError:
            return []


def advice_on(what: str, instance: str, refusal: PolyphaseError, known: Sequence[Mapping[str, Any]]) -> str:
    """What the user can do after a refusal, by its class and the state of the instance; empty where nothing helps."""
    entries = {str(entry["instance_id"]): entry for entry in known}
    if isinstance(refusal, NotFound):
        near = difflib.get_close_matches(instance, entries, n=1)
        return f"{f'Did you mean {near[0]}? ' if near else ''}Known: {', '.join(entries) or 'none yet'}"
    if isinstance(refusal, DeadlineExceeded):
        longer = f"`polyphase {what} {instance} --timeout 120` waits longer"
        if what == "drain":
            return (
                f"The instance goes on draining and gets no new work: {longer}; `polyphase resume {instance}` "
                "ends the drain."
            )
        return f"The instance gets work again in its previous role: {longer}."
    if (entry := entries.get(instance)) is None:
        return ""
    state = InstanceState(entry["state"])
    if what == "forget":
        return f"`polyphase drain {instance}` stops new work; only dead instances can be forgotten."
    if entry.get("operation"):
        return "An instance has one operation at a time: try again when that one has ended."
    if state is InstanceState.DEAD:
        return f"`polyphase logs {instance}` shows why it died; `polyphase forget {instance}` stops counting it."
    if state is InstanceState.UNRESPONSIVE:
        return f"The instance is restarted if it stays unresponsive: see `polyphase logs {instance}`."
    if state is InstanceState.STARTING:
        return "Wait until the instance is ready: see `polyphase status`."
    ready = [each for each in known if each["state"] == InstanceState.READY and each["role"] == entry["role"]]
    if what in ("flip", "drain") and ready == [entry]:
        return f"Flip another instance to its role first, or use `polyphase {what} {instance} --force`."
    return ""


async def operation(operation_id: str, url: str) -> Operation:
    """An operation by its id, or by a prefix that only one of the newest operations has. Raises NotFound."""
    async with MonitorClient(url) as monitor:
        try:
            return msgspec.convert(await monitor.operation(operation_id), Operation)
        except NotFound:
            rows = [row for row in await monitor.flips(1_000) if str(row["operation_id"]).startswith(operation_id)]
            if len(rows) != 1:
                raise
            return msgspec.convert(rows[0], Operation)


def show_outcome(console: Console, instance: str, operation: Operation | None) -> None:
    """The outcome in a sentence, and the operation's id."""
    if operation is None:
        forgotten = f"{instance} is forgotten: it no longer counts. It registers as a new instance if it comes back."
        console.print(Text("✔ ", "green").append(forgotten, "default"))
        return
    mark, style = _MARKS.get(operation.result, ("✘", "red"))
    console.print(Text(f"{mark} ", style).append(sentence(operation), "default"))
    console.print(Text(f"  Operation {operation.operation_id}", "dim"))


def sentence(operation: Operation) -> str:
    """How an operation ended or stands."""
    one, result = operation, operation.result
    if result is OperationResult.SUCCEEDED:
        return _success(one)
    change = f" ({one.from_role} → {one.to_role})" if one.kind is OperationKind.FLIP else ""
    begin = f"{datetime.fromtimestamp(one.started_s):%H:%M:%S}"
    course = f"The {one.kind} of {one.instance_id}{change}, requested by {one.who} at {begin},"
    if result is OperationResult.RUNNING:
        return f"{course} has been running for {duration(max(0.0, time.time() - one.started_s))}."
    if result is OperationResult.UNKNOWN:
        return f"{course} may or may not have been carried out: {one.error}. `polyphase status` shows the role."
    took = f" after {duration(one.total_s)}" if one.total_s else ""
    outcome = {
        OperationResult.FAILED: f"failed{took}",
        OperationResult.REFUSED: "was refused",
        OperationResult.EXPIRED: "arrived after its deadline",
    }[result]
    return f"{course} {outcome}: {one.error}."


def _success(one: Operation) -> str:
    if one.kind is OperationKind.FLIP:
        times = (("drained", one.drain_s), ("flipped", one.flip_s))
        steps = [f"{step} in {_took(seconds)}" for step, seconds in times if seconds is not None]
        return f"{one.instance_id} is now {one.to_role}{': ' + ', '.join(steps) if steps else ''}."
    if one.kind is OperationKind.DRAIN:
        took = f" in {_took(one.drain_s)}" if one.drain_s is not None else ""
        return (
            f"{one.instance_id} is drained: its work ended{took}. It gets no work until "
            f"`polyphase resume {one.instance_id}`."
        )
    return f"{one.instance_id} gets work again, as {one.to_role}."


def _took(seconds: float) -> str:
    return duration(seconds) if seconds >= 0.001 else "under 1 ms"


def change_of(words: Sequence[str]) -> Change:
    """The change that the words of the command line describe. Raises InvalidRequest that names the wrong word."""
    change: Change = {}
    for each in words:
        for kind, spec in from_words(each).items():
            if kind in change:
                raise InvalidRequest(f"{each!r}: a policy of kind {kind} is named twice")
            change[kind] = spec
    return change


def reset_of(kinds: Sequence[str]) -> Change:
    """Back to the policies of the cluster file: for these kinds, or all. Raises InvalidRequest for an unknown kind."""
    for kind in kinds:
        if kind not in KINDS:
            raise InvalidRequest(f"--reset: no kind of policy {kind!r}; known: {', '.join(KINDS)}")
    return dict.fromkeys(kinds or KINDS)


async def change_policies(url: str, change: Change, who: str, token: str = "") -> dict[str, Any]:
    """Apply the change, if any, and return the policies in force: when all processes follow, or FOLLOWED_S later.

    Raises the monitor's own error.
    """
    async with MonitorClient(url, token=token) as monitor:
        if not change:
            return await monitor.policies()
        answer = await monitor.set_policies(change, who=who)
        with suppress(TimeoutError):
            async with asyncio.timeout(FOLLOWED_S):
                while not all(one["follows"] for one in answer["followers"]):
                    await asyncio.sleep(POLICY_POLL_S)
                    answer = await monitor.policies()
        return answer


def show_policies(console: Console, answer: Mapping[str, Any]) -> None:
    """A table of the policies in force, and the processes that do not follow them."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in ("kind", "policy", "chosen by"):
        table.add_column(column, overflow="fold")
    for kind, one in answer["policies"].items():
        file, changed = _words(one["file"]), one["changed"]
        policy = Text(_words(one), style="yellow" if changed else "")
        chosen = f"{changed['who']}, {_time(changed['since_s'])}, instead of {file}" if changed else "the cluster file"
        table.add_row(Text(kind), policy, Text(chosen))
    console.print(table)
    followers = answer["followers"]
    late = [one for one in followers if not one["follows"]]
    console.print(f"followed by {len(followers) - len(late)} of {len(followers)} schedulers and instances")
    for one in late:
        why = one["trouble"] or "it has not confirmed the change yet"
        console.print(Text(f"  {one['process']} {one['name']} follows revision {one['revision']}: {why}", style="red"))
    console.print(Text("`polyphase policies --choices` lists all policies", "dim"))
    if answer["trouble"]:
        console.print(Text(answer["trouble"], style="red"))


def show_choices(console: Console, in_force: Mapping[str, Any] | None = None) -> None:
    """All policies by kind, what each does, and its parameters; policies in force are marked."""
    for kind, named in registry.KINDS.items():
        console.print(Text(kind, "bold"))
        table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=False)
        table.add_column(no_wrap=True, width=22)
        table.add_column(overflow="fold")
        for name, made in named.items():
            now = in_force is not None and in_force[kind]["name"] == name
            parameters = ", ".join(registry.parameters_of(made))
            text = Text(what_it_does(made)).append(f" Parameters: {parameters}." if parameters else "", "dim")
            table.add_row(Text(f"{'*' if now else ' '} {name}", "yellow" if now else ""), text)
        console.print(table)
    marked = "* in force. " if in_force is not None else ""
    console.print(Text(f"{marked}`polyphase policies dispatch=random split=fraction:fraction=0.5` changes two.", "dim"))


def what_it_does(policy: Any) -> str:
    """The first paragraph of its docstring, without the source."""
    paragraph = " ".join(str(policy.__doc__ or "").split("\n\n")[0].split())
    return _SOURCE.split(paragraph)[0].replace("`", "")


def _words(one: Mapping[str, Any]) -> str:
    return in_words(PolicySpec(one["name"], one["parameters"]))


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


@dataclass(frozen=True, slots=True)
class ProposalAnswer:
    """accept, refuse: ids of proposals, or empty. ask: for a proposal now. auto: None leaves the mode as it is."""

    accept: str = ""
    refuse: str = ""
    ask: bool = False
    auto: bool | None = None


async def answer_proposal(url: str, wanted: ProposalAnswer, who: str, token: str = "") -> dict[str, Any]:
    """Send the answer, then return the cluster and its proposals. failed: whether carrying out the accepted one failed.

    Raises the planner's own error.
    """
    if wanted.accept and wanted.refuse:
        raise InvalidRequest("--accept and --refuse exclude each other: give one of them")
    said, failed = "", False
    async with PlannerClient(url, token=token) as planner:
        if wanted.auto is not None:
            await planner.set_auto(wanted.auto, who=who)
        if wanted.ask:
            said = (await planner.propose(who=who))["why"]
        if wanted.refuse:
            await planner.refuse(wanted.refuse, who=who)
        if wanted.accept:
            await planner.accept(wanted.accept, who=who)
            failed = await _carried_out(planner, wanted.accept) == "failed"
        return {
            "failed": failed,
            "said": said,
            "fleet": await planner.fleet(),
            "proposals": await planner.proposals(PROPOSALS_SHOWN),
        }


def show_proposals(console: Console, answer: Mapping[str, Any]) -> None:
    fleet = answer["fleet"]
    if fleet["trouble"]:
        console.print(Text(fleet["trouble"], style="red"))
    if fleet["expected"] is not None:
        console.print(Text(f"expected now: {_expected(fleet['expected'])}"))
    console.print("proposals are applied automatically" if fleet["auto"] else "proposals wait for --accept or --refuse")
    if fleet["auto"] and fleet["why_not_auto"]:
        console.print(Text(f"  currently suspended: {fleet['why_not_auto']}", style="yellow"))
    if answer["said"]:
        console.print(Text(answer["said"]))
    if not answer["proposals"]:
        console.print("no proposals yet")
    for one in answer["proposals"]:
        _show(console, one)


def _show(console: Console, one: Mapping[str, Any]) -> None:
    at = f"{datetime.fromtimestamp(one['made_s']):%Y-%m-%d %H:%M:%S}"
    by = f" by {one['who']}" if one["who"] else ""
    style = _PROPOSAL_STYLES.get(one["state"], "")
    console.print(Text(f"\n{one['proposal_id']}  {at}  {one['state']}{by}", style=style))
    console.print(Text(f"  {one['why']}"))
    console.print(Text(f"  would change: {_changes(one['flips'], one['changes_routes'])}"))
    console.print(Text(f"  now:  {_expected(one['now'])}\n  then: {_expected(one['then'])}"))
    for step in one["steps"]:
        console.print(Text(f"  {'✔' if step['ok'] else '✘'} {step['what']} {step['text']}"))
    if one["error"]:
        console.print(Text(f"  {one['error']}", style="red" if one["state"] == "failed" else ""))
    if one["state"] == "open":
        console.print(Text(f"  polyphase proposals --accept {one['proposal_id']}   or   --refuse", style="dim"))


def _changes(flips: Sequence[Mapping[str, Any]], routes: bool) -> str:
    words = [f"{flip['instance_id']} to {flip['to_role']}" for flip in flips]
    return ", ".join([*words, *(["the routes"] if routes else [])])


def _expected(one: Mapping[str, Any]) -> str:
    ttft = "unbounded" if one["ttft_s"] is None else f"{one['ttft_s']:.3g} s"
    tpot = "unbounded" if one["tpot_s"] is None else f"{1e3 * one['tpot_s']:.3g} ms"
    served = f"{one['goodput']:.3g} requests/s within the SLO of {one['rate']:.3g} offered"
    return f"{served}; attainment {one['attainment']:.0%}, TTFT {ttft}, TPOT {tpot}"


async def _carried_out(planner: PlannerClient, proposal_id: str) -> str:
    """Wait for the final state of a proposal. Raises DeadlineExceeded after ten minutes, or the planner's own error."""
    until_s, unanswered = time.monotonic() + CARRIED_OUT_S, 0
    while time.monotonic() < until_s:
        await asyncio.sleep(PROPOSAL_POLL_S)
        try:
            state, unanswered = str((await planner.proposal(proposal_id))["state"]), 0
        except (Unavailable, DeadlineExceeded):
            unanswered += 1
            if unanswered > MAX_UNANSWERED:
                raise
            continue
        if state != "applying":
            return state
    raise DeadlineExceeded(f"proposal {proposal_id} is still being carried out after {CARRIED_OUT_S:g} s")
