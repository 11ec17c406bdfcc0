"""Runs of a scenario's requests, on other processes; each is made once, and kept in a file if there is one."""

import json
from collections.abc import Callable
from concurrent.futures import Executor
from math import floor
from pathlib import Path
from threading import Lock
from typing import Protocol, TextIO

from lab.bench.scenarios import TARGET

FIRST_PART = 3  # one in so many requests is served before the rest
SURELY = 1.25  # times as many misses as all may have, among the first part: those that come later mend none of them

Run = tuple[str, int, str, str, int]  # scenario, seed, policy, rate, requests


class Case(Protocol):
    """A scenario, as far as runs of it go."""

    @property
    def name(self) -> str:
        """Unlike all others'."""
        ...

    @property
    def seed(self) -> int:
        """Of its requests."""
        ...

    def attained(self, policy: str, rate: float, requests: int, head: int | None = None) -> float:
        """The share of the requests within their SLO; of the first `head` alone, if given."""
        ...


class Runs:
    """Whether the target is met, by scenario, policy, rate and number of requests. May be asked by several threads.

    file: what stands in it is not run again, and what is run is added to it, a line of JSON each. It only fits the
    code that made it.
    """

    def __init__(self, pool: Executor, file: Path | None = None) -> None:
        self._pool = pool
        self._lock = Lock()
        self._known: dict[Run, bool] = {}
        self._file: TextIO | None = None
        self.made = 0
        if file is not None:
            for line in file.read_text("utf-8").splitlines() if file.exists() else ():
                name, seed, policy, rate, requests, met = json.loads(line)
                self._known[name, seed, policy, rate, requests] = met
            self._file = file.open("a", encoding="utf-8")

    def __enter__(self) -> "Runs":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def of(self, case: Case, policy: str, requests: int) -> Callable[[float], bool]:
        """By rate, of one policy."""
        return lambda rate: self.meets(case, policy, rate, requests)

    def lasting(self, case: Case, policy: str, seconds: float, fewest: int) -> Callable[[float], bool]:
        """By rate, with as many requests as come in so many seconds, and no fewer than that."""
        return lambda rate: self.meets(case, policy, rate, max(fewest, round(seconds * rate)))

    def meets(self, case: Case, policy: str, rate: float, requests: int) -> bool:
        """Whether the target is met. Waits for the run."""
        run = (case.name, case.seed, policy, f"{rate:.6g}", requests)
        with self._lock:
            known = self._known.get(run)
        if known is not None:
            return known
        met = self._pool.submit(met_by, case, policy, rate, requests).result()
        with self._lock:
            self._known[run] = met
            self.made += 1
            if self._file is not None:
                self._file.write(json.dumps([*run, met]) + "\n")
                self._file.flush()
        return met


def met_by(case: Case, policy: str, rate: float, requests: int) -> bool:
    """Whether the target is met, or plainly missed already by the first part of the requests."""
    head = requests // FIRST_PART
    allowed = floor((1.0 - TARGET) * requests + 1e-9)
    if head and (1.0 - case.attained(policy, rate, requests, head)) * head > SURELY * allowed:
        return False
    return case.attained(policy, rate, requests) >= TARGET
