"""Which jobs are open here, by whose word, and which of them nobody speaks for any more."""

from dataclasses import dataclass

SWEEP_S = 1.0
_STEP_S = 1.5 * SWEEP_S  # more than that between two sweeps is this process's own pause, and no one's silence


@dataclass(slots=True)
class _Open:
    origin: str  # of the gateway process that told of it; empty until it did
    heard_s: float


@dataclass(frozen=True, slots=True)
class Swept:
    """Jobs that are open here no longer. lost: their gateway's process is gone. elsewhere: it lives, and tells
    another scheduler of them, or was never given their placement.
    """

    lost: tuple[str, ...]
    elsewhere: tuple[str, ...]


class OpenJobs:
    """Open jobs and when each was last heard of; the same of gateway processes.

    Ages are on a clock that counts the time between two sweeps, but no pause of this process: what others sent while it
    was frozen waits unread, and is not silence. Nor do steps of the host's clock matter. `now_mono` is monotonic.
    """

    def __init__(self, lost_after_s: float, now_mono: float) -> None:
        self._lost_after_s = lost_after_s
        self._mono = now_mono
        self._clock_s = 0.0
        self._jobs: dict[str, _Open] = {}
        self._origins: dict[str, float] = {}

    def __len__(self) -> int:
        """Open jobs."""
        return len(self._jobs)

    def __contains__(self, job_id: str) -> bool:
        """Whether that job is open."""
        return job_id in self._jobs

    def placed(self, job_id: str) -> None:
        """It got a route here."""
        known = self._jobs.get(job_id)
        self._jobs[job_id] = _Open(known.origin if known else "", self._clock_s)

    def heard(self, job_id: str, origin: str) -> None:
        """Its gateway says that it goes on."""
        self._jobs[job_id] = _Open(origin, self._clock_s)

    def alive(self, origin: str) -> None:
        """A gateway process shows that it lives."""
        self._origins[origin] = self._clock_s

    def ended(self, job_id: str) -> None:
        """It is over; unknown ones are ignored."""
        self._jobs.pop(job_id, None)

    def sweep(self, now_mono: float) -> Swept:
        """Let time pass, and drop what nobody speaks for."""
        self._clock_s += min(_STEP_S, max(0.0, now_mono - self._mono))
        self._mono = now_mono
        since_s = self._clock_s - self._lost_after_s
        self._origins = {origin: heard_s for origin, heard_s in self._origins.items() if heard_s > since_s}
        silent = [(job_id, one.origin) for job_id, one in self._jobs.items() if one.heard_s <= since_s]
        for job_id, _ in silent:
            del self._jobs[job_id]
        return Swept(
            tuple(job_id for job_id, origin in silent if origin and origin not in self._origins),
            tuple(job_id for job_id, origin in silent if not origin or origin in self._origins),
        )
