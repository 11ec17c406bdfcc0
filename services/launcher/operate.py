"""Commands that change a running suite: flip, drain, resume and forget instances, move requests, change policies,
answer proposals.

Each sends a change to the monitor or the planner, waits for its outcome and shows it. Advice after a refusal depends on
the class of the error and the state of the instance.
"""

import asyncio
import difflib
import getpass
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.launcher import cluster_keys, pages, state_file
from services.launcher.events import find_job
from services.launcher.suite import change_policies
from shared.domain.instance import InstanceState
from shared.domain.job import job_name
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
from shared.wire.api.monitor import InstanceRow, PoliciesInForce, PolicyChoice
from shared.wire.api.planner import Figures, Fleet, Proposal, ProposalState
from shared.wire.clients.monitor import MonitorClient
from shared.wire.clients.planner import PlannerClient

Change = dict[str, PolicySpec | None]
DOING = {"flip": "Draining and flipping", "drain": "Draining", "resume": "Resuming", "forget": "Forgetting"}
FOLLOWED_S = 3.0
PROPOSALS_SHOWN = 10
PROPOSAL_POLL_S, CARRIED_OUT_S = 0.2, 600.0
MAX_UNANSWERED = 50  # polls in a row that the planner, which may be restarting, does not answer
_MARKS = {  # of all other results: ✘
    OperationResult.SUCCEEDED: ("✔", "green"),
    OperationResult.RUNNING: ("…", "yellow"),
    OperationResult.UNKNOWN: ("?", "yellow"),
}
_PROPOSAL_STYLES = {ProposalState.OPEN: "yellow", ProposalState.APPLIED: "green", ProposalState.FAILED: "red"}
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
                return await monitor.flip(instance, force=force, drain_timeout_s=timeout_s, who=actor())
            if what == "drain":
                return await monitor.drain(instance, force=force, timeout_s=timeout_s, who=actor())
            return await monitor.resume(instance, who=actor())
    except OutcomeUnknown as unknown:
        raise _with_lookup(unknown) from unknown
    except (Conflict, DeadlineExceeded, NotFound) as refusal:
        advice = advice_on(what, instance, refusal, await _instances(url))
        raise type(refusal)(f"{refusal.message}\n{advice}" if advice else refusal.message) from refusal


async def move_request(request: str, to: str, url: str, schedulers: Sequence[str], token: str = "") -> Operation:
    """Let a request that decodes go on at another instance. request: its id, or a part of it that one of the
    `schedulers` completes.

    Raises the monitor's own error, with advice on a line of its own; InvalidRequest if several ids have the part.
    """
    if not request.strip():
        raise InvalidRequest("the request id is empty: give an id or a part of it; `polyphase requests` lists some")
    try:
        job_id = await find_job(schedulers, request)
    except (NotFound, Unavailable, DeadlineExceeded):  # it has just arrived, or no scheduler answers
        job_id = job_name(request.strip())
    try:
        async with MonitorClient(url, token=token) as monitor:
            return await monitor.move(job_id, to=to, who=actor())
    except OutcomeUnknown as unknown:
        raise _with_lookup(unknown) from unknown
    except NotFound as refusal:
        known = [each.instance_id for each in await _instances(url)]
        advice = f"Known: {', '.join(known)}" if to and to not in known else "`polyphase requests` lists requests."
        raise NotFound(f"{refusal.message}\n{advice}") from refusal


def _with_lookup(unknown: OutcomeUnknown) -> OutcomeUnknown:
    message = f"{unknown.message}; `polyphase operation {unknown.operation_id}` shows its outcome"
    return OutcomeUnknown(message, operation_id=unknown.operation_id)


async def _instances(url: str) -> list[InstanceRow]:
    async with MonitorClient(url) as monitor:
        try:
            return await monitor.instances()
        except PolyphaseError:
            return []


def advice_on(what: str, instance: str, refusal: PolyphaseError, known: Sequence[InstanceRow]) -> str:
    """What the user can do after a refusal, by its class and the state of the instance; empty where nothing helps."""
    if isinstance(refusal, NotFound):
        names = [entry.instance_id for entry in known]
        near = difflib.get_close_matches(instance, names, n=1)
        return f"{f'Did you mean {near[0]}? ' if near else ''}Known: {', '.join(names) or 'none yet'}"
    if isinstance(refusal, DeadlineExceeded):
        longer = f"`polyphase {what} {instance} --timeout 120` waits longer"
        if what == "drain":
            resume = f"`polyphase resume {instance}` ends the drain"
            return f"The instance goes on draining and gets no new work: {longer}; {resume}."
        return f"The instance gets work again in its previous role: {longer}."
    entry = next((entry for entry in known if entry.instance_id == instance), None)
    if entry is None:
        return ""
    if what == "forget":
        return f"`polyphase drain {instance}` stops new work; only dead instances can be forgotten."
    if entry.operation:
        return "An instance has one operation at a time: try again when that one has ended."
    match entry.state:
        case InstanceState.DEAD:
            return f"`polyphase logs {instance}` shows why it died; `polyphase forget {instance}` stops counting it."
        case InstanceState.UNRESPONSIVE:
            return f"The instance is restarted if it stays unresponsive: see `polyphase logs {instance}`."
        case InstanceState.STARTING:
            return "Wait until the instance is ready: see `polyphase status`."
    ready = [each for each in known if each.state is InstanceState.READY and each.role is entry.role]
    if what in ("flip", "drain") and ready == [entry]:
        return f"Flip another instance to its role first, or use `polyphase {what} {instance} --force`."
    return ""


async def operation(operation_id: str, url: str) -> Operation:
    """An operation by its id, or by a prefix that only one of the newest operations has. Raises NotFound."""
    async with MonitorClient(url) as monitor:
        try:
            return await monitor.operation(operation_id)
        except NotFound:
            found = [each for each in await monitor.flips(1_000) if each.operation_id.startswith(operation_id)]
            if len(found) != 1:
                raise
            return found[0]


def show_outcome(console: Console, instance: str, operation: Operation | None) -> None:
    """The outcome in a sentence, and the operation's id."""
    if operation is None:
        forgotten = f"{instance} is forgotten: it no longer counts. It registers as a new instance if it comes back."
        console.print(Text("✔ ", "green").append(forgotten, "default"))
        return
    mark, style = _MARKS.get(operation.result, ("✘", "red"))
    console.print(Text(f"{mark} ", style).append(describe_operation(operation), "default"))
    console.print(Text(f"  Operation {operation.operation_id}", "dim"))


def describe_operation(operation: Operation) -> str:
    """How an operation ended or stands, as a sentence."""
    if operation.result is OperationResult.SUCCEEDED:
        return _describe_success(operation)
    roles = f" ({operation.from_role} → {operation.to_role})" if operation.kind is OperationKind.FLIP else ""
    begin = f"{datetime.fromtimestamp(operation.started_s):%H:%M:%S}"
    course = f"The {operation.kind} of {operation.subject}{roles}, requested by {operation.who} at {begin},"
    took = f" after {duration(operation.total_s)}" if operation.total_s else ""
    match operation.result:
        case OperationResult.RUNNING:
            return f"{course} has been running for {duration(max(0.0, time.time() - operation.started_s))}."
        case OperationResult.UNKNOWN:
            unknown = f"{course} may or may not have been carried out: {operation.error}."
            if operation.kind is OperationKind.MOVE:
                return f"{unknown} `polyphase explain {operation.job_id}` shows where it decodes."
            return f"{unknown} `polyphase status` shows the role."
        case OperationResult.REFUSED:
            return f"{course} was refused: {operation.error}."
        case OperationResult.EXPIRED:
            return f"{course} arrived after its deadline: {operation.error}."
    return f"{course} failed{took}: {operation.error}."


def _describe_success(operation: Operation) -> str:
    instance = operation.instance_id
    if operation.kind is OperationKind.FLIP:
        times = (("drained", operation.drain_s), ("flipped", operation.flip_s))
        steps = ", ".join(f"{step} in {_took(seconds)}" for step, seconds in times if seconds is not None)
        return f"{instance} is now {operation.to_role}{': ' if steps else ''}{steps}."
    if operation.kind is OperationKind.DRAIN:
        took = f" in {_took(operation.drain_s)}" if operation.drain_s is not None else ""
        return f"{instance} is drained: its work ended{took}. It gets no work until `polyphase resume {instance}`."
    if operation.kind is OperationKind.MOVE:
        to, explain = operation.to_instance or "another instance", f"`polyphase explain {operation.job_id}`"
        return f"{instance} lets {operation.job_id} move to {to}: {explain} shows whether its gateway has moved it."
    return f"{instance} gets work again, as {operation.to_role}."


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


async def apply_policies(url: str, change: Change, who: str, token: str = "") -> PoliciesInForce:
    """Apply the change, if any, and return the policies in force: when all processes follow, or FOLLOWED_S later.

    Raises the monitor's own error.
    """
    async with MonitorClient(url, token=token) as monitor:
        if not change:
            return await monitor.policies()
        return await change_policies(monitor, change, who, timeout_s=FOLLOWED_S, must_follow=False)


def show_policies(console: Console, answer: PoliciesInForce) -> None:
    """A table of the policies in force, and the processes that do not follow them."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in ("kind", "policy", "chosen by"):
        table.add_column(column, overflow="fold")
    for kind, choice in answer.policies.items():
        chosen = "the cluster file"
        if choice.changed is not None:
            file = f", instead of {in_words(choice.file)}" if choice.file is not None else ""
            chosen = f"{choice.changed.who}, {_time(choice.changed.since_s)}{file}"
        table.add_row(Text(kind), Text(in_words(choice.spec), "yellow" if choice.changed else ""), Text(chosen))
    console.print(table)
    followers = answer.followers
    late = [follower for follower in followers if not follower.follows]
    console.print(f"followed by {len(followers) - len(late)} of {len(followers)} schedulers and instances")
    for follower in late:
        why = follower.trouble or "it has not confirmed the change yet"
        console.print(Text(f"  {follower.process} {follower.name} follows revision {follower.revision}: {why}", "red"))
    console.print(Text("`polyphase policies --choices` lists all policies", "dim"))
    if answer.trouble:
        console.print(Text(answer.trouble, style="red"))


def show_choices(console: Console, in_force: Mapping[str, PolicyChoice] | None = None) -> None:
    """All policies by kind, what each does, and its parameters; policies in force are marked."""
    for kind, named in registry.KINDS.items():
        console.print(Text(kind, "bold"))
        table = pages.plain_table()
        table.add_column(no_wrap=True, width=22)
        table.add_column(overflow="fold")
        for name, made in named.items():
            now = in_force is not None and in_force[kind].name == name
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


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


@dataclass(frozen=True, slots=True)
class ProposalOptions:
    """accept, refuse: ids of proposals, or empty. ask: for a proposal now. auto: None leaves the mode as it is."""

    accept: str = ""
    refuse: str = ""
    ask: bool = False
    auto: bool | None = None


class ProposalsAnswer(msgspec.Struct, frozen=True):
    """The cluster and its proposals. failed: whether carrying out the accepted one failed. said: the planner's remark
    on the requested review.
    """

    failed: bool
    said: str
    fleet: Fleet
    proposals: list[Proposal]


async def answer_proposal(url: str, options: ProposalOptions, who: str, token: str = "") -> ProposalsAnswer:
    """Send the answers, then read the cluster and its proposals. Raises the planner's own error."""
    if options.accept and options.refuse:
        raise InvalidRequest("--accept and --refuse exclude each other: give one of them")
    remark, failed = "", False
    async with PlannerClient(url, token=token) as planner:
        if options.auto is not None:
            await planner.set_auto(options.auto, who=who)
        if options.ask:
            remark = (await planner.propose(who=who)).why
        if options.refuse:
            await planner.refuse(options.refuse, who=who)
        if options.accept:
            await planner.accept(options.accept, who=who)
            failed = await _final_state(planner, options.accept) is ProposalState.FAILED
        return ProposalsAnswer(failed, remark, await planner.fleet(), await planner.proposals(PROPOSALS_SHOWN))


def show_proposals(console: Console, answer: ProposalsAnswer) -> None:
    fleet = answer.fleet
    if fleet.trouble:
        console.print(Text(fleet.trouble, style="red"))
    if fleet.expected is not None:
        console.print(Text(f"expected now: {_expected(fleet.expected)}"))
    console.print("proposals are applied automatically" if fleet.auto else "proposals wait for --accept or --refuse")
    if fleet.auto and fleet.why_not_auto:
        console.print(Text(f"  currently suspended: {fleet.why_not_auto}", style="yellow"))
    if answer.said:
        console.print(Text(answer.said))
    if not answer.proposals:
        console.print("no proposals yet")
    for proposal in answer.proposals:
        _show_proposal(console, proposal)


def _show_proposal(console: Console, proposal: Proposal) -> None:
    by, state = f" by {proposal.who}" if proposal.who else "", proposal.state
    head = f"\n{proposal.proposal_id}  {_time(proposal.made_s)}  {state}{by}"
    console.print(Text(head, style=_PROPOSAL_STYLES.get(state, "")))
    console.print(Text(f"  {proposal.why}"))
    console.print(Text(f"  would change: {_changes(proposal)}"))
    console.print(Text(f"  now:  {_expected(proposal.now)}\n  then: {_expected(proposal.then)}"))
    for step in proposal.steps:
        console.print(Text(f"  {'✔' if step.ok else '✘'} {step.what} {step.text}"))
    if proposal.error:
        console.print(Text(f"  {proposal.error}", style="red" if state is ProposalState.FAILED else ""))
    if state is ProposalState.OPEN:
        console.print(Text(f"  polyphase proposals --accept {proposal.proposal_id}   or   --refuse", style="dim"))


def _changes(proposal: Proposal) -> str:
    flips = [f"{flip.instance_id} to {flip.to_role}" for flip in proposal.flips]
    return ", ".join([*flips, *(["the routes"] if proposal.changes_routes else [])])


def _expected(figures: Figures) -> str:
    ttft = "unbounded" if figures.ttft_s is None else f"{figures.ttft_s:.3g} s"
    tpot = "unbounded" if figures.tpot_s is None else f"{1e3 * figures.tpot_s:.3g} ms"
    served = f"{figures.goodput:.3g} requests/s within the SLO of {figures.rate:.3g} offered"
    return f"{served}; attainment {figures.attainment:.0%}, TTFT {ttft}, TPOT {tpot}"


async def _final_state(planner: PlannerClient, proposal_id: str) -> ProposalState:
    """Wait for the final state of a proposal. Raises DeadlineExceeded after ten minutes, or the planner's own error."""
    until_mono, unanswered = time.monotonic() + CARRIED_OUT_S, 0
    while time.monotonic() < until_mono:
        await asyncio.sleep(PROPOSAL_POLL_S)
        try:
            state, unanswered = (await planner.proposal(proposal_id)).state, 0
        except (Unavailable, DeadlineExceeded):
            unanswered += 1
            if unanswered > MAX_UNANSWERED:
                raise
            continue
        if state is not ProposalState.APPLYING:
            return state
    raise DeadlineExceeded(f"proposal {proposal_id} is still being carried out after {CARRIED_OUT_S:g} s")
