"""One search as it is remembered: by the book, in the database, and for who asks."""

import json
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from services.planner.search_messages import Progress


class SearchState(StrEnum):
    """Where a search is."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


OPEN = (SearchState.WAITING, SearchState.RUNNING)


@dataclass(slots=True)
class SearchRecord:
    """request: JSON of `edge.SearchIn`. Times are unix seconds.

    attempts: how often a process was started for it; begun_s: when it was last. cancelled_by: who wants it to end; ""
    if nobody. result: see `search_answer.result`.
    """

    plan_id: str
    who: str
    submitted_s: float
    request: str
    state: SearchState = SearchState.WAITING
    ended_s: float | None = None
    progress: Progress = field(default_factory=lambda: Progress("waiting"))
    begun_s: float | None = None
    attempts: int = 0
    cancelled_by: str = ""
    result: dict[str, Any] | None = None
    error: str = ""
    summary: dict[str, Any] = field(init=False)  # of the request

    def __post_init__(self) -> None:
        self.summary = _summary(json.loads(self.request))

    @property
    def open(self) -> bool:
        """Whether it has not ended."""
        return self.state in OPEN

    def begin(self) -> None:
        """A process is started for it."""
        self.state, self.progress = SearchState.RUNNING, Progress("begun")
        self.begun_s, self.attempts = time.time(), self.attempts + 1

    def end(self, state: SearchState, error: str = "") -> None:
        """That is how it ended."""
        self.state, self.error, self.ended_s = state, error, time.time()

    def wait_again(self) -> None:
        """The planner ended before it did."""
        self.state, self.progress, self.begun_s = SearchState.WAITING, Progress("waiting to begin again"), None

    def brief(self) -> dict[str, Any]:
        """As lists tell it."""
        result = self.result and {key: value for key, value in self.result.items() if key != "cluster_file"}
        return {**self._told(), "request": self.summary, "result": result}

    def full(self) -> dict[str, Any]:
        """All of it."""
        return {**self._told(), "request": json.loads(self.request), "result": self.result}

    def _told(self) -> dict[str, Any]:
        return {
            "plan_id": self.plan_id,
            "state": self.state.value,
            "who": self.who,
            "submitted_s": self.submitted_s,
            "ended_s": self.ended_s,
            "progress": self._progress(),
            "error": self.error,
        }

    def _progress(self) -> dict[str, Any]:
        until_s = time.time() if self.ended_s is None else self.ended_s
        return {
            "what": self.progress.what,
            "best_goodput": self.progress.best_goodput,
            "elapsed_s": 0.0 if self.begun_s is None else max(0.0, until_s - self.begun_s),
        }

    def row(self) -> dict[str, Any]:
        """For the table `plans`; with the progress what nobody but us asks for."""
        kept = {"begun_s": self.begun_s, "attempts": self.attempts, "cancelled_by": self.cancelled_by}
        return {
            "plan_id": self.plan_id,
            "state": self.state.value,
            "who": self.who,
            "submitted_s": self.submitted_s,
            "ended_s": self.ended_s,
            "request": self.request,
            "progress": json.dumps({**self._progress(), **kept}),
            "result": None if self.result is None else json.dumps(self.result),
            "error": self.error,
        }


def _summary(request: dict[str, Any]) -> dict[str, Any]:
    """A request without what may be long."""
    workload = request["workload"]
    given = isinstance(workload, list)
    short = {**request, "workload": f"{len(workload)} requests" if given else workload}
    return {key: value for key, value in short.items() if key != "inventory"}


def recalled(row: dict[str, Any]) -> SearchRecord:
    """A row again. Raises ValueError, KeyError or TypeError for what we never wrote."""
    kept = json.loads(row["progress"])
    return SearchRecord(
        row["plan_id"],
        row["who"],
        row["submitted_s"],
        row["request"],
        SearchState(row["state"]),
        row["ended_s"],
        Progress(kept["what"], kept["best_goodput"]),
        kept["begun_s"],
        kept["attempts"],
        kept["cancelled_by"],
        None if row["result"] is None else json.loads(row["result"]),
        row["error"],
    )
