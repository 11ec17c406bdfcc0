"""Why no instance of a role can take a job: *busy* (429), *broken* (503) and *impossible* (400) apart."""

from collections.abc import Collection, Iterable

from shared.domain.instance import InstanceState, InstanceView, Role
from shared.domain.job import JobView
from shared.errors import Busy, InvalidRequest, PolyphaseError, Unavailable
from shared.policy.index import ClusterIndex

RETRY_S = 0.2


def context_of(job: JobView, role: Role) -> int:
    """Tokens of context that an instance of that role must be able to hold for `job`."""
    return job.prompt_tokens + (job.max_tokens if role is Role.DECODE else 0)


def fits(job: JobView, view: InstanceView, role: Role) -> bool:
    """Whether the instance's context is long enough."""
    return context_of(job, role) <= view.info.max_model_len


def why_none(job: JobView, role: Role, index: ClusterIndex, exclude: Collection[str]) -> PolyphaseError:
    """The error that says why no instance of `role` can take `job`.

    Busy while some are starting or draining, InvalidRequest when the job is too long for all that are ready,
    Unavailable else.
    """
    ready = index.view.ready(role)
    usable = [view for view in ready if view.instance_id not in exclude]
    if usable:
        return _too_long(job, role, usable)
    counts = {state: index.states[(role, state)] for state in InstanceState if index.states[(role, state)]}
    seen = ", ".join(f"{count} {state.value}" for state, count in counts.items()) or "none registered"
    if ready:
        failed = ", ".join(sorted(view.instance_id for view in ready))
        return Unavailable(f"every ready {role.value} instance just failed this job ({failed})", retry_after_s=RETRY_S)
    message = f"no {role.value} instance is ready ({seen})"
    if counts.get(InstanceState.STARTING) or counts.get(InstanceState.DRAINING):
        return Busy(message, retry_after_s=RETRY_S)
    return Unavailable(message, retry_after_s=RETRY_S)


def _too_long(job: JobView, role: Role, usable: Iterable[InstanceView]) -> PolyphaseError:
    longest = max(view.info.max_model_len for view in usable)
    return InvalidRequest(
        f"the job needs a context of {context_of(job, role)} tokens; "
        f"the longest of the ready {role.value} instances is {longest}"
    )
