"""Dispatch: which decode instance continues a job, chosen here from the loads that the monitor broadcasts."""

import random
import time
from collections import Counter

from shared.domain.instance import ClusterView
from shared.domain.job import JobView
from shared.domain.route import InstanceRef, Reason
from shared.policy.dispatch import DispatchPolicy, choose_decode
from shared.policy.index import Assignment
from shared.policy.lengths import is_heavy
from shared.policy.load_tracker import LoadTracker


class Dispatcher:
    """The thin driver of a dispatch policy: keeps the newest loads and what it assigned since."""

    def __init__(self, policy: DispatchPolicy, seed: int) -> None:
        self._policy = policy
        self._rng = random.Random(seed)
        self._index = LoadTracker()
        self.choices: Counter[str] = Counter()

    def update(self, view: ClusterView) -> None:
        """Take in a broadcast."""
        self._index.update(view, time.time(), self._rng)

    def choose(self, job: JobView, exclude: tuple[str, ...] = ()) -> tuple[InstanceRef, tuple[Reason, ...]]:
        """A decode instance and why. Raises Unavailable or Busy when there is none."""
        now = time.time()
        choice = choose_decode(self._policy, job, self._index.current, exclude, now, self._rng)
        instance_id = choice.instance.instance_id
        self._index.book(Assignment(instance_id, now, decode_tokens=job.prompt_tokens, heavy=is_heavy(job)))
        self.choices[instance_id] += 1
        return choice.ref, choice.reasons
