"""The report of scenarios: a line for each, a table, JSON figures and aims, and a page of the documentation."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from benchmarks.chaos.load import BROKEN, HARM, UNCLEAN, Verdict
from benchmarks.chaos.recovery import RECOVER_S
from benchmarks.chaos.scenario import FAMILIES, Outcome
from benchmarks.results import aim

PAGE = "reliability.md"
_COLUMNS = ("whole", "clean error", "lost", "doubled", "wrong", "cut", "hung", "longest wait", "back after")
_PAGE_HEAD = Path(__file__).parent / "reliability_head.md"
_INTERRUPTED = {"the bench ran to its end": aim("yes", "interrupted", False)}


def as_result(outcomes: Sequence[Outcome], took_s: float, finished: bool) -> dict[str, Any]:
    """Figures and aims of the JSON line: one aim for each scenario."""
    figures: dict[str, float] = {
        "scenarios": len(outcomes),
        "passed": sum(outcome.ok for outcome in outcomes),
        "took_s": round(took_s, 1),
        "answers": sum(outcome.tally.counts.total() for outcome in outcomes),
        **_figures(outcomes),
    }
    for outcome in outcomes:
        name = outcome.scenario.name.replace("-", "_")
        figures |= {f"{name}_{key}": value for key, value in outcome.figures.items()}
    aims = {outcome.scenario.name: _aim(outcome) for outcome in outcomes}
    return {"figures": figures, "aims": aims | ({} if finished else _INTERRUPTED)}


def random_result(
    outcomes: Sequence[Outcome], took_s: float, finished: bool, drawn: Counter[str], suites: int
) -> dict[str, Any]:
    """Figures and aims of the random mode. drawn: how often each fault was injected."""
    found = _figures(outcomes)
    violations = [f"{each.scenario.name}: {fault}" for each in outcomes for fault in each.faults]
    figures = {
        "minutes": round(took_s / 60.0, 1),
        "faults": drawn.total(),
        "rounds": len(outcomes),
        "suites": suites,
        **found,
        **{f"drawn_{name.replace(' ', '_')}": count for name, count in sorted(drawn.items())},
    }
    broken = sum(each.tally.count(*BROKEN) for each in outcomes)
    got = "; ".join(violations) or f"{found['whole_answers']} whole, {broken} lost with their gateway"
    aims = {"every answer whole or clean, every round recovered": aim("no violation", got, not violations)}
    return {"figures": figures, "aims": aims | ({} if finished else _INTERRUPTED)}


def _figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    return {
        **{f"{verdict}_answers": sum(each.tally.count(verdict) for each in outcomes) for verdict in Verdict},
        "longest_wait_s": round(max((each.tally.longest_gap_s for each in outcomes), default=0.0), 3),
        "slowest_recovery_s": round(max((each.recovered_s or 0.0 for each in outcomes), default=0.0), 3),
    }


def _aim(outcome: Outcome) -> dict[str, Any]:
    want = f"whole, no wait over {outcome.allowed_gap_s:.1f} s, back within {RECOVER_S:.0f} s, nothing left behind"
    counts = ", ".join(f"{count} {verdict}" for verdict, count in outcome.tally.counts.items())
    return aim(want, "; ".join(outcome.faults) or ", ".join((counts, *outcome.notes)), outcome.ok)


def cells_of(outcome: Outcome) -> tuple[str, ...]:
    """The cells of a row, in the order of _COLUMNS."""
    tally, recovered = outcome.tally, outcome.recovered_s
    counts = [tally.count(Verdict.WHOLE), tally.count(Verdict.ERROR), *(tally.count(v) for v in HARM)]
    counts += [tally.count(*BROKEN), tally.count(*UNCLEAN)]
    back = "never" if recovered is None else f"{recovered:.1f} s"
    return (*map(str, counts), f"{tally.longest_gap_s:.1f} s of {outcome.allowed_gap_s:.1f}", back)


def line(outcome: Outcome, number: str) -> str:
    """A result in the markup of the console."""
    cells = cells_of(outcome)
    text = f"{_mark(outcome)} {number} [bold]{outcome.scenario.name}[/] [dim]{escape(outcome.scenario.description)}: "
    text += f"{cells[0]} whole, {cells[1]} clean errors, longest wait {cells[7]}, back after {cells[8]}, "
    text += f"took {outcome.took_s:.0f} s{''.join(f', {escape(note)}' for note in outcome.notes)}[/]"
    text += "".join(f"\n    [red]{escape(fault)}[/]" for fault in outcome.faults)
    examples = outcome.tally.examples.items()
    return text + "".join(f"\n    [dim]{verdict}: {escape(example)}[/]" for verdict, example in examples)


def table(outcomes: Sequence[Outcome]) -> Table:
    grid = Table(box=None, padding=(0, 1), header_style="dim")
    grid.add_column("")
    grid.add_column("scenario", no_wrap=True)
    for name in _COLUMNS:
        grid.add_column(name, justify="right")
    for outcome in outcomes:
        grid.add_row(_mark(outcome), outcome.scenario.name, *cells_of(outcome))
    return grid


def _mark(outcome: Outcome) -> str:
    return "[green]✔[/]" if outcome.ok else "[red]✘[/]"


def write_docs(folder: Path, outcomes: Sequence[Outcome], seed: int) -> None:
    """Write the page: the part that is written by hand, then the tables of this run."""
    by_name = {outcome.scenario.name: outcome for outcome in outcomes}
    command = f"polyphase bench chaos --seed {seed} --write-docs docs"
    text = [_PAGE_HEAD.read_text().rstrip(), "", f"Written by `{command}`.", ""]
    head = ("scenario", "what is done", "engines", *_COLUMNS, "passed")
    for family, scenarios in FAMILIES.items():
        rows = [_row(by_name[scenario.name]) for scenario in scenarios if scenario.name in by_name]
        if rows:
            title = f"### {family[0].upper()}{family[1:]}"
            text += [title, "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *rows, ""]
    failed = [outcome for outcome in outcomes if not outcome.ok]
    text += ["### What did not pass", ""]
    text += [f"- `{o.scenario.name}`: {'; '.join(o.faults)}" for o in failed] or ["Nothing."]
    (folder / PAGE).write_text("\n".join(text) + "\n")


def _row(outcome: Outcome) -> str:
    scenario, passed = outcome.scenario, "yes" if outcome.ok else "**no**"
    return (
        f"| {' | '.join((f'`{scenario.name}`', scenario.description, scenario.bed.name, *cells_of(outcome), passed))} |"
    )
