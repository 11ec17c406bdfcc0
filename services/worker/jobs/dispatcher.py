"""Dispatch: which decode instance continues a job, chosen here from the loads that the monitor broadcasts."""

import random
import time
from collections import Counter

import msgspec

from shared.domain.instance import ClusterView, InstanceView
from shared.domain.job import JobView
from shared.domain.route import InstanceRef, PolicySpec, Reason
from shared.errors import InvalidRequest
from shared.policy import registry
from shared.policy.assignment import Assignment
from shared.policy.dispatch import DispatchPolicy, choose_decode
from shared.policy.lengths import is_heavy
from shared.policy.load_tracker import LoadTracker

_KEPT = 16  # policies; schedulers name one at a time


class Dispatcher:
    """The thin driver of dispatch policies: keeps the newest loads and what it assigned since.

    The policy comes with each job: its scheduler owns the choice. One that is built is kept, with its state.
    """

    def __init__(self, seed: int | str) -> None:
        self._rng = random.Random(seed)
        self._index = LoadTracker()
        self._policies: dict[bytes, DispatchPolicy] = {}
        self.choices: Counter[str] = Counter()

    def update(self, view: ClusterView) -> None:
        """Take in a broadcast."""
        self._index.update(view, time.time(), self._rng)

    def known(self, instance_id: str) -> InstanceView | None:
        """A decode instance, as of the last broadcast."""
        return self._index.current.decode.get(instance_id)

    def choose(
        self, job: JobView, policy: PolicySpec | None, exclude: tuple[str, ...] = ()
    ) -> tuple[InstanceRef, tuple[Reason, ...]]:
        """A decode instance and why.

        Raises Unavailable when there is none, InvalidRequest when the policy is missing or unknown.
        """
        if policy is None:
            raise InvalidRequest(f"{job.job_id}: neither a decode instance nor a dispatch policy was named")
        now = time.time()
        choice = choose_decode(self._built(policy), job, self._index.current, exclude, now, self._rng)
        instance_id = choice.instance.instance_id
        self._index.book(Assignment(instance_id, now, decode_tokens=job.prompt_tokens, heavy=is_heavy(job)))
        self.choices[instance_id] += 1
        return choice.ref, choice.reasons

    def _built(self, spec: PolicySpec) -> DispatchPolicy:
        key = msgspec.json.encode(spec, order="deterministic")
        known = self._policies.get(key)
        if known is None:
            known = self._policies[key] = registry.dispatch(spec.name, spec.parameters)
            if len(self._policies) > _KEPT:
                del self._policies[next(iter(self._policies))]
        return known
