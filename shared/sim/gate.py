"""The gateway of a run: how many requests it takes, and the lines of those that are delayed."""

from collections.abc import Callable

from shared.policy.fair_share import FairLine, Shares
from shared.policy.overload import steps_aside
from shared.sim.events import EventLoop
from shared.sim.request import SimRequest
from shared.sim.spec import RunSpec

_ASIDE = "\0aside"  # after a class's name: its line of those that have stepped aside


class Queued:
    """Requests that wait to be computed or decoded, of which the gateway takes so many, with so many prompt tokens."""

    def __init__(self, run: RunSpec) -> None:
        self._most, self._most_tokens = run.max_queued_jobs, run.max_queued_tokens
        self._tokens: dict[SimRequest, int] = {}
        self._sum = 0

    def take(self, request: SimRequest) -> bool:
        """Whether there is room for one more. One that nobody is before always has it."""
        tokens = request.job.prompt_tokens
        if self._most is not None and len(self._tokens) >= self._most:
            return False
        if self._most_tokens is not None and self._sum and self._sum + tokens > self._most_tokens:
            return False
        self._tokens[request] = tokens
        self._sum += tokens
        return True

    def leave(self, request: SimRequest) -> None:
        """It decodes, or never will."""
        self._sum -= self._tokens.pop(request, 0)


class DelayLines:
    """One line for each class. Only the head asks, when it was told to; the next follows at once. Those that step aside
    (see `shared.policy.overload.steps_aside`) have a line of their own.

    `ask(request, now)` gives the seconds until the request may ask again, or None once it waits no more.
    """

    def __init__(self, loop: EventLoop, shares: Shares, ask: Callable[[SimRequest, float], float | None]) -> None:
        self._loop = loop
        self._shares = shares
        self._ask = ask
        self._lines: dict[str, FairLine[SimRequest]] = {}
        self._asleep: set[str] = set()  # lines whose head was told when to ask again
        self._aside: dict[SimRequest, None] = {}

    def join(self, request: SimRequest, now: float) -> None:
        """The request waits for its turn, which may be now."""
        self._push(request)
        self._turns(self._name(request), now)

    def join_asleep(self, request: SimRequest, again_s: float, now: float) -> None:
        """The same for the first of a line, which has asked already and is to ask again in so many seconds."""
        self._push(request)
        name = self._name(request)
        self._asleep.add(name)
        self._loop.at(now + again_s, self._wake, name)

    def waiting(self, request: SimRequest) -> bool:
        """Whether others of its class wait."""
        line = self._lines.get(self._name(request))
        return line is not None and len(line) > 0

    def _name(self, request: SimRequest) -> str:
        name = request.job.slo.name
        return name + _ASIDE if request in self._aside else name

    def _push(self, request: SimRequest) -> None:
        name = self._name(request)
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = FairLine(self._shares)
        line.push(request, request.caller)

    def leave(self, request: SimRequest) -> bool:
        """The request gives up; False when it does not wait here."""
        line = self._lines.get(self._name(request))
        self._aside.pop(request, None)
        return line is not None and line.remove(request, request.caller)

    def left(self) -> list[SimRequest]:
        """Everybody who waits; they leave."""
        found = []
        for line in self._lines.values():
            while (request := line.head()) is not None:
                line.remove(request, request.caller)
                found.append(request)
        return found

    def _turns(self, name: str, now: float) -> None:
        line = self._lines[name]
        while name not in self._asleep and (request := line.head()) is not None:
            again_s = self._ask(request, now)
            if again_s is None:
                line.remove(request, request.caller)
                self._aside.pop(request, None)
            elif request not in self._aside and steps_aside(request.job.slo, now - request.arrived_s, again_s):
                line.remove(request, request.caller)
                self._aside[request] = None
                if self.waiting(request):
                    self._push(request)
                else:
                    self.join_asleep(request, again_s, now)
            else:
                self._asleep.add(name)
                self._loop.at(now + again_s, self._wake, name)
                return

    def _wake(self, name: str, now: float) -> None:
        self._asleep.discard(name)
        self._turns(name, now)
