"""`polyphase flip`, `drain`, `resume`, `forget`, `operation`: act on a running suite, and say what came of it."""

import asyncio
import getpass
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.launcher import cluster_keys, state_file
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
from shared.files.faults import meant
from shared.policy import registry
from shared.policy.registry import from_words, in_words
from shared.wire.addresses import several
from shared.wire.clients.monitor import MonitorClient
from shared.wire.clients.planner import PlannerClient

DOING = {"flip": "Draining and flipping", "drain": "Draining", "resume": "Resuming", "forget": "Forgetting"}
_MARKS = {"succeeded": ("✔", "green"), "running": ("…", "yellow"), "unknown": ("?", "yellow")}  # of others: ✘
_FAILED = ("failed", "refused", "expired")


def monitor_url(data_dir: Path, given: str) -> str:
    """`--monitor`, or the running suite's. Raises NotFound."""
    return given or state_file.read(data_dir).monitor_url


def token(data_dir: Path, url: str) -> str:
    """The secret for a service at `url`: as the environment says, or the running suite's if it is one of its own."""
    return cluster_keys.token_of_environment() or (cluster_keys.kept_token(data_dir) if _ours(data_dir, url) else "")


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


# MERGED policies.py
# `polyphase policies`: what the cluster goes by, who chose it, who follows; and changes of it.


Change = dict[str, PolicySpec | None]
FOLLOWED_S, POLICY_POLL_S = 3.0, 0.05
_SOURCE = re.compile(r"\s*\b(?:Source|F|F, [^:]*): ")  # where a docstring goes on to say where it is from


def change_of(words: Sequence[str]) -> Change:
    """What the words ask for. Raises InvalidRequest that names the words at fault."""
    change: Change = {}
    for each in words:
        for kind, spec in from_words(each).items():
            if kind in change:
                raise InvalidRequest(f"{each!r}: another policy of kind {kind} is asked for already")
            change[kind] = spec
    return change


def reset_of(kinds: Sequence[str]) -> Change:
    """Back to the cluster file's: these kinds, or all. Raises InvalidRequest that names the kind at fault."""
    for kind in kinds:
        if kind not in KINDS:
            raise InvalidRequest(f"--reset: no kind of policy {kind!r}; known: {', '.join(KINDS)}")
    return dict.fromkeys(kinds or KINDS)


async def change_policies(url: str, change: Change, who: str, token: str = "") -> dict[str, Any]:
    """Change what is asked for, if anything, and give what is in force, once all follow or FOLLOWED_S later.

    `token`: the cluster's secret. Raises the monitor's own error.
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
    """A table for people, and who does not follow."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for column in ("kind", "policy", "chosen by"):
        table.add_column(column, overflow="fold")
    for kind, one in answer["policies"].items():
        file, changed = _words(one["file"]), one["changed"]
        policy = Text(_words(one), style="yellow" if changed else "")
        chosen = f"{changed['who']}, {_time(changed['since_s'])}, in place of {file}" if changed else "the cluster file"
        table.add_row(Text(kind), policy, Text(chosen))
    console.print(table)
    followers = answer["followers"]
    late = [one for one in followers if not one["follows"]]
    console.print(f"followed by {len(followers) - len(late)} of {len(followers)} schedulers and instances")
    for one in late:
        why = one["trouble"] or "it has not said so yet"
        console.print(Text(f"  {one['process']} {one['name']} goes by revision {one['revision']}: {why}", style="red"))
    console.print(Text("`polyphase policies --choices` says what there is to choose from", "dim"))
    if answer["trouble"]:
        console.print(Text(answer["trouble"], style="red"))


def show_choices(console: Console, in_force: Mapping[str, Any] | None = None) -> None:
    """Every policy by kind, what it does, and the parameters it takes; marked is what is in force."""
    for kind, named in registry.KINDS.items():
        console.print(Text(kind, "bold"))
        table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=False)
        table.add_column(no_wrap=True, width=22)
        table.add_column(overflow="fold")
        for name, made in named.items():
            now = in_force is not None and in_force[kind]["name"] == name
            takes = ", ".join(registry.parameters_of(made))
            text = Text(what_it_does(made)).append(f" Takes {takes}." if takes else "", "dim")
            table.add_row(Text(f"{'*' if now else ' '} {name}", "yellow" if now else ""), text)
        console.print(table)
    marked = "* in force. " if in_force is not None else ""
    console.print(Text(f"{marked}`polyphase policies dispatch=random split=fraction:fraction=0.5` changes two.", "dim"))


def what_it_does(policy: Any) -> str:
    """Its own words, without their source."""
    paragraph = " ".join(str(policy.__doc__ or "").split("\n\n")[0].split())
    return _SOURCE.split(paragraph)[0].replace("`", "")


def _words(one: Mapping[str, Any]) -> str:
    return in_words(PolicySpec(one["name"], one["parameters"]))


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


# MERGED proposals.py
# `polyphase proposals`: what the planner would change in the running cluster, and yes or no to it.


SHOWN = 10
PROPOSAL_POLL_S, CARRIED_OUT_S = 0.2, 600.0
UNHEARD = 50  # questions in a row that the planner, which may be starting again, does not answer
_STYLES = {"open": "yellow", "applied": "green", "failed": "red"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """accept, refuse: ids of proposals, or nothing. auto: None leaves it as it is."""

    accept: str = ""
    refuse: str = ""
    ask: bool = False
    auto: bool | None = None


def planner_url(data_dir: Path, given: str) -> str:
    """`--planner`, or the running suite's. Raises NotFound."""
    url = given or state_file.read(data_dir).planner_url
    if not url:
        raise NotFound("this suite has no planner (`planner: {enabled: false}` in its cluster file)")
    return url


async def answer_proposal(url: str, wanted: Wanted, who: str, token: str = "") -> dict[str, Any]:
    """Do what is wanted, then give the cluster and its proposals. failed: whether what was accepted has.

    `token`: the cluster's secret. Raises the planner's own error.
    """
    if wanted.accept and wanted.refuse:
        raise InvalidRequest("either --accept or --refuse")
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
            "proposals": await planner.proposals(SHOWN),
        }


def show_proposals(console: Console, answer: Mapping[str, Any]) -> None:
    """Sentences for people."""
    fleet = answer["fleet"]
    if fleet["trouble"]:
        console.print(Text(fleet["trouble"], style="red"))
    if fleet["expected"] is not None:
        console.print(Text(f"as it is: {_expected(fleet['expected'])}"))
    console.print("proposals are applied by themselves" if fleet["auto"] else "proposals wait for a yes or no")
    if fleet["auto"] and fleet["why_not_auto"]:
        console.print(Text(f"  but not now: {fleet['why_not_auto']}", style="yellow"))
    if answer["said"]:
        console.print(Text(answer["said"]))
    if not answer["proposals"]:
        console.print("nothing was proposed yet")
    for one in answer["proposals"]:
        _show(console, one)


def _show(console: Console, one: Mapping[str, Any]) -> None:
    at = f"{datetime.fromtimestamp(one['made_s']):%Y-%m-%d %H:%M:%S}"
    by = f" by {one['who']}" if one["who"] else ""
    console.print(Text(f"\n{one['proposal_id']}  {at}  {one['state']}{by}", style=_STYLES.get(one["state"], "")))
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
    ttft = "without end" if one["ttft_s"] is None else f"{one['ttft_s']:.3g} s"
    tpot = "without end" if one["tpot_s"] is None else f"{1e3 * one['tpot_s']:.3g} ms"
    served = f"{one['goodput']:.3g} requests/s within the SLO, {one['rate']:.3g} asked for"
    return f"{served}; attainment {one['attainment']:.0%}, TTFT {ttft}, TPOT {tpot}"


async def _carried_out(planner: PlannerClient, proposal_id: str) -> str:
    """Wait until it is; what it became. Raises DeadlineExceeded after ten minutes, and when the planner is gone."""
    until_s, unheard = time.monotonic() + CARRIED_OUT_S, 0
    while time.monotonic() < until_s:
        await asyncio.sleep(PROPOSAL_POLL_S)
        try:
            state, unheard = str((await planner.proposal(proposal_id))["state"]), 0
        except (Unavailable, DeadlineExceeded):
            unheard += 1
            if unheard > UNHEARD:
                raise
            continue
        if state != "applying":
            return state
    raise DeadlineExceeded(f"proposal {proposal_id} is still being carried out after {CARRIED_OUT_S:g} s")
