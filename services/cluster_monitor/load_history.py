"""Load history: means of the instances' sampled loads over steps of time, as arrays."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.domain.instance import InstanceState, InstanceView, Role

STEPS_S = (10, 60, 600)
FIGURES = ("kv_used", "running", "waiting", "queued_prefill_tokens", "inflight", "staged_bytes")
Floats = NDArray[np.float32]


class Totals(msgspec.Struct):
    """Sums over the samples of a step, of all instances that are not dead. kv_used_…: sums of the means over a role's
    instances, over the `kv_samples_…` samples in which the role had some.
    """

    running: float = 0.0
    waiting: float = 0.0
    queued_prefill_tokens: float = 0.0
    kv_used_prefill: float = 0.0
    kv_used_decode: float = 0.0
    kv_samples_prefill: int = 0
    kv_samples_decode: int = 0
    ready_prefill: float = 0.0
    ready_decode: float = 0.0


class LoadStep(NamedTuple):
    """A step: its number of samples, and for each instance its id, role, state and means (NaN: not known)."""

    step_s: int
    start_s: int
    samples: int
    totals: Totals
    who: list[tuple[str, str, str]]
    means: Floats  # [instances, FIGURES]


class _Step:
    def __init__(self, step_s: int, start_s: int) -> None:
        self.step_s = step_s
        self.start_s = start_s
        self.samples = 0
        self.totals = Totals()
        self._rows: dict[str, int] = {}
        self._last: Sequence[tuple[str, str, str]] = ()
        self._last_rows = np.zeros(0, np.intp)  # of `_last`
        self._who: list[tuple[str, str, str]] = []
        self._sums = np.zeros((0, len(FIGURES)))
        self._counts = np.zeros((0, 1))

    def add(self, who: Sequence[tuple[str, str, str]], values: NDArray[np.float64], alive: NDArray[np.bool_]) -> None:
        if who != self._last:
            self._last, self._last_rows = who, np.fromiter((self._row(one) for one in who), np.intp, len(who))
        rows = self._last_rows
        if (more := len(self._rows) - len(self._counts)) > 0:
            self._sums = np.concatenate((self._sums, np.zeros((more, len(FIGURES)))))
            self._counts = np.concatenate((self._counts, np.zeros((more, 1))))
        self._sums[rows[alive]] += values[alive]
        self._counts[rows[alive]] += 1
        self.samples += 1

    def seen(self) -> LoadStep:
        with np.errstate(invalid="ignore"):
            means = (self._sums / self._counts).astype(np.float32)  # 0 / 0 is NaN: nothing is known
        return LoadStep(self.step_s, self.start_s, self.samples, self.totals, list(self._who), means)

    def _row(self, one: tuple[str, str, str]) -> int:
        row = self._rows.setdefault(one[0], len(self._rows))
        if row == len(self._who):
            self._who.append(one)
        else:
            self._who[row] = one
        return row


class LoadBook:
    """Collects samples of all loads into steps of each length."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._roles = (list[tuple[str, str, str]](), dict[Role, list[int]](), dict[Role, int]())

    def sample(self, views: Iterable[InstanceView], now: float) -> list[LoadStep]:
        """Add a sample at `now` (unix seconds); returns the steps that ended before it."""
        over = []
        some = list(views)
        who: list[tuple[str, str, str]] = [(view.info.instance_id, view.role, view.state) for view in some]
        there, ready = self._of_roles(who, some)
        values = np.array([_values(view) for view in some], np.float64).reshape(len(some), len(FIGURES))
        alive = np.fromiter((view.state is not InstanceState.DEAD for view in some), np.bool_, len(some))
        for step_s in STEPS_S:
            start_s = int(now // step_s) * step_s
            step = self._steps.get(step_s)
            if step is None or step.start_s != start_s:
                over += [step.seen()] if step is not None else []
                step = self._steps[step_s] = _Step(step_s, start_s)
            step.add(who, values, alive)
            _add_up(step.totals, there, ready, values)
        return over

    def _of_roles(
        self, who: list[tuple[str, str, str]], views: Sequence[InstanceView]
    ) -> tuple[dict[Role, list[int]], dict[Role, int]]:
        """The positions of the instances of each role that are not dead, and how many of them are ready."""
        known, there, ready = self._roles
        if who != known:
            there = {role: list[int]() for role in Role}
            for at, view in enumerate(views):
                if view.state is not InstanceState.DEAD:
                    there[view.role].append(at)
            ready = {role: sum(views[at].state is InstanceState.READY for at in each) for role, each in there.items()}
            self._roles = who, there, ready
        return there, ready

    def open(self) -> list[LoadStep]:
        return [step.seen() for step in self._steps.values()]


def _values(view: InstanceView) -> tuple[float, ...]:
    load = view.load
    return (kv_used(view), load.running, load.waiting, load.queued_prefill_tokens, load.inflight, load.staged_bytes)


def kv_used(view: InstanceView) -> float:
    """Share of its KV blocks in use; NaN before its first heartbeat."""
    if not view.load.time_s:
        return float("nan")
    return view.load.kv_used_share(view.info.total_blocks)


def _add_up(
    totals: Totals, of_role: dict[Role, list[int]], ready: dict[Role, int], values: NDArray[np.float64]
) -> None:
    for role, there in of_role.items():
        name = role.value
        setattr(totals, f"ready_{name}", getattr(totals, f"ready_{name}") + ready[role])
        if not there:
            continue
        its = values[there]
        totals.running += float(its[:, 1].sum())
        totals.waiting += float(its[:, 2].sum())
        totals.queued_prefill_tokens += float(its[:, 3].sum())
        known = its[~np.isnan(its[:, 0]), 0]
        if len(known):
            setattr(totals, f"kv_used_{name}", getattr(totals, f"kv_used_{name}") + float(known.mean()))
            setattr(totals, f"kv_samples_{name}", getattr(totals, f"kv_samples_{name}") + 1)
