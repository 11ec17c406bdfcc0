"""Streams whose KV blocks were taken back: as live, they go on at another instance where that is clearly sooner."""

from shared.policy.pause import MOVE_LEAST_S, PAUSE_NEWS_S
from shared.sim.events import NEVER, EventLoop
from shared.sim.fleet import Fleet
from shared.sim.intake import Intake
from shared.sim.request import Leg
from shared.sim.spec import RunSpec


class Moves:
    """Looks for another place when a stream is paused, and again while that lasts."""

    def __init__(self, run: RunSpec, loop: EventLoop, fleet: Fleet, intake: Intake) -> None:
        self._most = run.moves
        self._loop = loop
        self._fleet = fleet
        self._intake = intake
        self._pauses = 0

    def preempted(self, leg: Leg) -> None:
        """A leg has lost its blocks; the step that it lost them to is only being planned."""
        self._pauses += 1
        leg.pause = self._pauses
        if leg.decodes and leg.started:
            self._loop.at(self._loop.now_s, self._look, (leg, leg.pause))

    def _look(self, subject: tuple[Leg, int], now: float) -> None:
        leg, pause = subject
        request = leg.request
        paused = leg.pause == pause and not leg.blocks and not leg.cancelled
        if not paused or request.over or leg.lane is None or request.moves >= self._most:
            return
        instance = self._fleet.instance(request.decode)
        here_s = instance.pause_s(leg, now)
        if here_s >= MOVE_LEAST_S and self._intake.move(request, leg, here_s, now):
            return
        if instance.engines[leg.lane].due_s != NEVER:  # else nothing changes there
            self._loop.at(now + PAUSE_NEWS_S, self._look, subject)
