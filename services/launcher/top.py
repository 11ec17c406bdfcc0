"""`polyphase top`: the suite, looked at once a second, until Ctrl-C or q."""

import asyncio
import os
import sys
import termios
import time
import tty
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.styled import Styled
from rich.text import Text

from services.launcher import pages
from services.launcher.sight import Seen
from shared.domain.verdict import duration
from shared.errors import PolyphaseError

PERIOD_S = 1.0
_PIPED_ROWS = 20
_PROBLEMS = 3  # of which the causes are told
_OLD_S = 3.0
Look = Callable[[], Awaitable[Seen]]


async def run(console: Console, look: Look, *, once: bool = False) -> None:
    """Show what `look` sees, on a terminal in place, elsewhere one page after the other.

    Raises what `look` raises at first; once there was something to see that stays, greyed, with its age.
    """
    seen = Sights(look)
    await seen.refresh()
    if once:
        console.print(page(seen, console.width, None))
    elif console.is_terminal:
        await _in_place(console, seen)
    else:
        while True:
            console.print(page(seen, console.width, _PIPED_ROWS))
            console.print()
            console.file.flush()
            await asyncio.sleep(PERIOD_S)
            await seen.refresh()


class Sights:
    """What was seen last, and what was wrong since."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._last: Seen | None = None
        self.fault = ""

    @property
    def last(self) -> Seen:
        """The last whole picture. Raises LookupError before the first."""
        if self._last is None:
            raise LookupError("nothing was seen yet")
        return self._last

    def age_s(self, now_s: float) -> float:
        """Of that picture."""
        return now_s - self.last.time_s

    async def keep_looking(self) -> None:
        """Once a second, or as often as there are answers."""
        while True:
            began = time.monotonic()
            await self.refresh()
            await asyncio.sleep(max(0.0, PERIOD_S - (time.monotonic() - began)))

    async def refresh(self) -> None:
        """Look again. What the monitor said stays while it is away; who is asked instead adds what they know."""
        try:
            found = await self._look()
        except PolyphaseError as error:
            if self._last is None:
                raise
            self.fault = error.message
            return
        self.fault = found.fault
        if found.fault and self._last is not None and self._last.verdict is not None:
            self._last = replace(self._last, state=found.state, health=found.health, jobs=found.jobs)
        else:
            self._last = found


def page(sights: Sights, width: int, rows: int | None) -> Group:
    """All of it; at most `rows` lines of instances."""
    seen, age_s = sights.last, max(0.0, sights.age_s(time.time()))
    whole = Group(*_verdict(seen), *pages.instances(seen.instances, width, rows))
    if not sights.fault and age_s < _OLD_S:
        return whole
    said = f"The monitor does not answer: {sights.fault}" if sights.fault else "The monitor has not answered yet."
    told = Text(f"✘ {said}", "bold red")
    if seen.verdict is None:
        return Group(told, *_unwell(seen.health), Text("What the processes say themselves:", "red"), whole)
    age = Text(f"What it said {duration(age_s)} ago:", "red")
    return Group(told, *_unwell(seen.health), age, Styled(whole, "dim"))


def _verdict(seen: Seen) -> Iterator[RenderableType]:
    if seen.verdict is not None:
        yield pages.headline(seen.verdict)
        for problem in islice(pages.problems(seen.verdict), _PROBLEMS):
            yield pages.indented(problem)
        yield Text(f"{_rates(seen.rates)}; {pages.counted(seen.verdict)}", no_wrap=True, overflow="ellipsis")
        yield pages.chain_table(seen.verdict)
    elif seen.jobs is not None:
        yield Text(f"jobs under way: {sum(seen.jobs.values())}")
    yield Text()


def _rates(rates: Mapping[str, float | None]) -> str:
    """Requests, tokens in and out, each a second."""
    told = [f"{_number(rates.get(name))} {what}" for name, what in _RATES.items()]
    return f"{', '.join(told)} /s"


_RATES = {"requests_per_s": "requests", "prompt_tokens_per_s": "tokens in", "output_tokens_per_s": "tokens out"}


def _number(value: float | None) -> str:
    return pages.NONE if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _unwell(health: Mapping[str, str]) -> Iterator[RenderableType]:
    """The processes of this host that say they are not well, in a line."""
    unwell = [f"{name} ({fault})" for name, fault in health.items() if fault]
    if unwell:
        yield Text(f"not healthy: {', '.join(unwell)}", "red", no_wrap=True, overflow="ellipsis")
    elif health:
        yield Text(f"the other {len(health)} processes say that they are well", "yellow")


async def _in_place(console: Console, sights: Sights) -> None:
    """Drawn once a second, whatever the answers take: a picture that grows old says so."""
    ended = asyncio.Event()
    with Live(console=console, screen=True, auto_refresh=False, transient=True) as live, keys(ended):
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(sights.keep_looking())
            while not ended.is_set():
                live.update(_fitted(console, sights), refresh=True)
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), PERIOD_S)
            looking.cancel()


def _fitted(console: Console, sights: Sights) -> Group:
    """As much as the terminal has room for: instances give way."""
    foot = Text("Ctrl-C or q ends", "dim")
    without = len(console.render_lines(page(sights, console.width, 0), pad=False))
    rows = max(1, console.height - without - 3)  # the table's head, what it says of emulated ones, the foot
    return Group(page(sights, console.width, rows), foot)


@contextmanager
def keys(ended: asyncio.Event) -> Iterator[None]:
    """While the block runs, q ends: letters come as they are typed, if this is typed on a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    number, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(number)

    def read() -> None:
        if b"q" in os.read(number, 64):
            ended.set()

    tty.setcbreak(number)
    loop.add_reader(number, read)
    try:
        yield
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)
