"""`polyphase policies`: what the cluster goes by, who chose it, who follows; and changes of it."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shared.domain.policies import KINDS
from shared.domain.route import PolicySpec
from shared.errors import InvalidRequest
from shared.policy import registry
from shared.policy.registry import from_words, in_words
from shared.wire.clients.monitor import MonitorClient

Change = dict[str, PolicySpec | None]
FOLLOWED_S, ASK_S = 3.0, 0.05
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


async def act(url: str, change: Change, who: str, token: str = "") -> dict[str, Any]:
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
                    await asyncio.sleep(ASK_S)
                    answer = await monitor.policies()
        return answer


def show(console: Console, answer: Mapping[str, Any]) -> None:
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
