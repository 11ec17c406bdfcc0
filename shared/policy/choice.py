"""Which instances can take a job, what a policy that picks one answers, and the error that says why there is none.

Nobody there (503) and *impossible* (400) are told apart.
"""

from collections.abc import Collection, Iterable

import msgspec

from shared.domain.instance import InstanceState, InstanceView, Role
from shared.domain.job import JobView
from shared.domain.route import InstanceRef, Reason, Work
from shared.errors import InvalidRequest, PolyphaseError, Unavailable
from shared.policy.index import ClusterIndex

RETRY_S = 0.2


class Choice(msgspec.Struct, frozen=True):
    """The chosen instance and why it was chosen. A struct, because it is made once a decision and cheaply.

    A placement may name the decode instance that belongs to it, too, the split between both, and the work to count
    until the job is complete. lead_steps, ttft_s, hold_s, has_room: see `Route`.
    """

    instance: InstanceView
    reasons: tuple[Reason, ...] = ()
    decode: InstanceView | None = None
    work: Work | None = None
    split: int | None = None
    lead_steps: int = 0
    ttft_s: float = 0.0
    hold_s: float = 0.0
    has_room: bool = False

    @property
    def ref(self) -> InstanceRef:
        """The chosen instance as a route names it."""
        return ref_of(self.instance)


def ref_of(view: InstanceView) -> InstanceRef:
    """An instance as a route names it."""
    info = view.info
    return InstanceRef(info.instance_id, info.generation, info.rpc)


def context_of(job: JobView, role: Role) -> int:
    """Tokens of context that an instance of that role must be able to hold for `job`."""
    return job.prompt_tokens + (job.max_tokens if role is Role.DECODE else 0)


def usable(view: InstanceView, context_tokens: int, exclude: Collection[str]) -> bool:
    """Whether the instance's context is long enough and nobody excluded it."""
    info = view.info
    return info.max_model_len >= context_tokens and not (exclude and info.instance_id in exclude)


def why_none(job: JobView, role: Role, index: ClusterIndex, exclude: Collection[str]) -> PolyphaseError:
    """The error that says why no instance of `role` can take `job`.

    InvalidRequest when the job is too long for all that are ready, Unavailable else. Never Busy: that is a limit which
    the client itself has reached.
    """
    ready = index.view.ready(role)
    left = [view for view in ready if view.instance_id not in exclude]
    if left:
        return _too_long(job, role, left)
    states = index.states
    counts = {state: states[(role, state)] for state in InstanceState if states[(role, state)]}
    seen = ", ".join(f"{count} {state.value}" for state, count in counts.items()) or "none registered"
    if ready:
        failed = ", ".join(sorted(view.instance_id for view in ready))
        return Unavailable(f"every ready {role.value} instance just failed this job ({failed})", retry_after_s=RETRY_S)
    return Unavailable(f"no {role.value} instance is ready ({seen})", retry_after_s=RETRY_S)


def _too_long(job: JobView, role: Role, views: Iterable[InstanceView]) -> PolyphaseError:
    longest = max(view.info.max_model_len for view in views)
    return InvalidRequest(
        f"the job needs a context of {context_of(job, role)} tokens; "
        f"the longest of the ready {role.value} instances is {longest}"
    )
