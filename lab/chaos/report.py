"""What the bench found: a line as it comes, a table at the end, the JSON contract, and a page of the documentation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from lab.chaos.judge import BROKEN, HARM, UNCLEAN, Verdict
from lab.chaos.recovery import RECOVER_S
from lab.chaos.scenario import Outcome
from lab.chaos.scenarios import FAMILIES

PAGE = "reliability.md"
_COLUMNS = ("whole", "clean error", "lost", "doubled", "wrong", "cut", "hung", "longest wait", "back after")
_PAGE_HEAD = Path(__file__).parent / "reliability_head.md"


def line(outcome: Outcome, number: int, total: int) -> str:
    """One scenario, as soon as it is done, in the markup of the console."""
    mark = "[green]✔[/]" if outcome.ok else "[red]✘[/]"
    cells = cells_of(outcome)
    said = f"{mark} {number}/{total} [bold]{outcome.scenario.name}[/] [dim]{escape(outcome.scenario.does)}: "
    said += f"{cells[0]} whole, {cells[1]} clean errors, longest wait {cells[7]}, back after {cells[8]}, "
    said += f"took {outcome.took_s:.0f} s{''.join(f', {note}' for note in outcome.notes)}[/]"
    for fault in outcome.faults:
        said += f"\n    [red]{escape(fault)}[/]"
    for verdict, example in outcome.tally.examples.items():
        said += f"\n    [dim]{verdict}: {escape(example)}[/]"
    return said


def cells_of(outcome: Outcome) -> tuple[str, ...]:
    """The figures of one row, in the order of _COLUMNS."""
    tally, recovered = outcome.tally, outcome.recovery.recovered_s
    counts = [tally.count(Verdict.WHOLE), tally.count(Verdict.ERROR), *(tally.count(v) for v in HARM)]
    counts += [tally.count(*BROKEN), tally.count(*UNCLEAN)]
    back = "never" if recovered is None else f"{recovered:.1f} s"
    return (*map(str, counts), f"{tally.longest_gap_s:.1f} s of {outcome.allowed_gap_s:.1f}", back)


def table(outcomes: Sequence[Outcome]) -> Table:
    """All scenarios, for people."""
    made = Table(box=None, padding=(0, 1), header_style="dim")
    made.add_column("")
    made.add_column("scenario", no_wrap=True)
    for name in _COLUMNS:
        made.add_column(name, justify="right")
    for outcome in outcomes:
        mark = "[green]✔[/]" if outcome.ok else "[red]✘[/]"
        made.add_row(mark, outcome.scenario.name, *cells_of(outcome))
    return made


def as_result(outcomes: Sequence[Outcome], took_s: float, finished: bool) -> dict[str, Any]:
    """Figures and aims of the JSON line: one aim a scenario."""
    aims = {outcome.scenario.name: _aim(outcome) for outcome in outcomes}
    if not finished:
        aims |= interrupted()["aims"]
    figures: dict[str, float] = {
        "scenarios": len(outcomes),
        "passed": sum(outcome.ok for outcome in outcomes),
        "took_s": round(took_s, 1),
        "answers": sum(outcome.tally.counts.total() for outcome in outcomes),
        **{f"{verdict}_answers": sum(o.tally.count(verdict) for o in outcomes) for verdict in Verdict},
        "longest_wait_s": round(max((o.tally.longest_gap_s for o in outcomes), default=0.0), 3),
        "slowest_recovery_s": round(max((o.recovery.recovered_s or 0.0 for o in outcomes), default=0.0), 3),
    }
    return {"figures": figures, "aims": aims}


def interrupted() -> dict[str, Any]:
    """The result of a run that was ended from outside."""
    return {"figures": {}, "aims": {"the bench ran to its end": {"want": "yes", "got": "interrupted", "met": False}}}


def _aim(outcome: Outcome) -> dict[str, Any]:
    want = f"whole, no wait over {outcome.allowed_gap_s:.1f} s, back within {RECOVER_S:.0f} s, nothing left behind"
    counts = ", ".join(f"{count} {verdict}" for verdict, count in outcome.tally.counts.items())
    got = "; ".join(outcome.faults) or ", ".join((counts, *outcome.notes))
    return {"want": want, "got": got, "met": outcome.ok}


def write_docs(folder: Path, outcomes: Sequence[Outcome], seed: int) -> None:
    """The page: what is written by hand, then the tables of this run."""
    by_name = {outcome.scenario.name: outcome for outcome in outcomes}
    command = f"polyphase bench chaos --seed {seed} --write-docs docs"
    text = [_PAGE_HEAD.read_text().rstrip(), "", f"Written by `{command}`.", ""]
    for family, scenarios in FAMILIES.items():
        rows = [by_name[scenario.name] for scenario in scenarios if scenario.name in by_name]
        if rows:
            text += [f"### {family[0].upper()}{family[1:]}", "", *_markdown(rows), ""]
    failed = [outcome for outcome in outcomes if not outcome.ok]
    text += ["### What did not pass", ""]
    text += [f"- `{o.scenario.name}`: {'; '.join(o.faults)}" for o in failed] or ["Nothing."]
    (folder / PAGE).write_text("\n".join(text) + "\n")


def _markdown(rows: Sequence[Outcome]) -> list[str]:
    head = ("scenario", "what is done", "engines", *_COLUMNS, "passed")
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for outcome in rows:
        scenario = outcome.scenario
        passed = "yes" if outcome.ok else "**no**"
        cells = (f"`{scenario.name}`", scenario.does, scenario.bed.name, *cells_of(outcome), passed)
        lines.append(f"| {' | '.join(cells)} |")
    return lines
