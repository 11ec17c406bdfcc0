"""A second process that makes some of the judge's runs. What it finds is what the first would have found itself."""

import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection

from shared.cost.kinds import Workshop
from shared.plan.estimate import Estimator
from shared.plan.judge import Ask, Judge
from shared.plan.problem import Problem
from shared.sim.spec import RunSpec

_CLOSE_S = 5.0
_Task = tuple[Problem, RunSpec, str, int]  # what a judge is made of


class Helper:
    """One process, which has one run at a time. It ends with the process that made it, and leaves Ctrl-C to it."""

    def __init__(self, judge: Judge) -> None:
        spawn = get_context("spawn")  # it starts while plans are still being composed
        self._here, there = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(there,), daemon=True)
        self._process.start()
        there.close()
        shop = judge.problem.shop
        problem = replace(judge.problem, shop=Workshop(shop.library, shop.geometry))  # without what it has worked out
        self._task: _Task | None = problem, judge.run, judge.arrivals, judge.seed  # until it is told

    def share(self, asks: Sequence[Ask], own: Callable[[Ask], float]) -> dict[Ask, float]:
        """See `Sharer`. The process takes them from the end. Raises EOFError or OSError when it is gone."""
        if self._task is not None:
            self._here.send(self._task)  # by now it reads: nobody waits for it to come up
            self._task = None
        left, found = deque(asks), dict[Ask, float]()
        asked: Ask | None = None
        while left or asked is not None:
            if asked is None:
                asked = left.pop()
                self._here.send(asked)
            if left:
                ask = left.popleft()
                found[ask] = own(ask)
            if not left or self._here.poll():
                found[asked], asked = float(self._here.recv()), None
        return found

    def close(self) -> None:
        """End it, whatever it does."""
        self._process.terminate()
        self._process.join(_CLOSE_S)
        self._here.close()


@contextmanager
def helped(judge: Judge) -> Iterator[None]:
    """The judge has a helper meanwhile."""
    judge.helper = helper = Helper(judge)
    try:
        yield
    finally:
        judge.helper = None
        helper.close()


def _serve(asks: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        task: _Task = asks.recv()
        problem, run, arrivals, seed = task
        judge = Judge(problem, Estimator(problem), run, arrivals, seed)
        while True:
            ask: Ask = asks.recv()
            asks.send(judge.told(ask))
    except EOFError:
        return
