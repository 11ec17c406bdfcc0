"""`polyphase proposals`: what the planner would change in the running cluster, and yes or no to it."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from services.launcher import state_file
from shared.errors import DeadlineExceeded, InvalidRequest, NotFound, Unavailable
from shared.wire.clients.planner import PlannerClient

SHOWN = 10
ASK_S, CARRIED_OUT_S = 0.2, 600.0
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


async def act(url: str, wanted: Wanted, who: str, token: str = "") -> dict[str, Any]:
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


def show(console: Console, answer: Mapping[str, Any]) -> None:
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
        await asyncio.sleep(ASK_S)
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
