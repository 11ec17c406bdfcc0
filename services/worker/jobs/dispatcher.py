"""Dispatch: which decode instance continues a job, chosen here from the loads that the monitor broadcasts."""

import asyncio
import random
import time
from collections.abc import Callable

import msgspec

from shared.domain.cluster import ClusterDelta
from shared.domain.instance import InstanceView
from shared.domain.job import JobView
from shared.domain.route import InstanceRef, PolicySpec, Reason
from shared.errors import InvalidRequest
from shared.policy import registry
from shared.policy.assignment import Assignment
from shared.policy.decode_admission import is_heavy
from shared.policy.dispatch import DispatchPolicy, choose_decode
from shared.policy.index import LoadTracker

_KEPT = 16  # policies; schedulers name one at a time
PATIENCE_S = 1.0  # for the first word of the cluster
REST_S = 30.0  # without a job that asks for so long, the cluster is not followed any more


class Dispatcher:
    """The thin driver of dispatch policies: keeps the newest loads and what it assigned since.

    The policy comes with each job: its scheduler owns the choice. One that is built is kept, with its state. The
    cluster is followed only while jobs ask for it: most routes name the decode instance, and a thousand instances that
    hear of each other are a million messages.
    """

    def __init__(self, seed: int | str) -> None:
        self._rng = random.Random(seed)
        self._index = LoadTracker()
        self._first = asyncio.Event()
        self._wanted_mono: float | None = None  # when a job was expected last
        self.on_follow: Callable[[bool], None] = lambda _: None  # called to hear of the cluster, or of it no more
        self._policies: dict[bytes, DispatchPolicy] = {}
        self.dispatched = 0  # jobs, since the start

    def hear(self, delta: ClusterDelta) -> bool:
        """Take in a broadcast; False where one before it is missing."""
        heard = self._index.hear(delta, time.time(), self._rng)
        if heard:
            self._first.set()
        return heard

    def expect(self) -> None:
        """A job will ask soon: follow the cluster from now on."""
        if self._wanted_mono is None:
            self.on_follow(True)
        self._wanted_mono = time.monotonic()

    async def heard(self) -> None:
        """Wait for the first word of the cluster, so long as that makes sense."""
        if not self._first.is_set():
            self.expect()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._first.wait()
            except TimeoutError:
                return  # `choose` says so

    def rest(self) -> None:
        """Follow the cluster no more where nobody has asked for a while."""
        if self._wanted_mono is not None and time.monotonic() - self._wanted_mono > REST_S:
            self._wanted_mono = None
            self.on_follow(False)
            self._index = LoadTracker()
            self._first.clear()

    def known(self, instance_id: str) -> InstanceView | None:
        """A decode instance, as of the last broadcast."""
        return self._index.current.decode.get(instance_id) if self._index.known else None

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
        answer = job.answer_tokens or job.max_tokens
        self._index.book(
            Assignment(
                instance_id,
                now,
                decode_tokens=job.prompt_tokens,
                heavy=is_heavy(job),
                job_id=job.job_id,
                answer_tokens=answer,
            )
        )
        self.dispatched += 1
        return choice.ref, choice.reasons

    def _built(self, spec: PolicySpec) -> DispatchPolicy:
        key = msgspec.json.encode(spec, order="deterministic")
        known = self._policies.get(key)
        if known is None:
            known = self._policies[key] = registry.dispatch(spec.name, spec.parameters)
            if len(self._policies) > _KEPT:
                del self._policies[next(iter(self._policies))]
        return known
