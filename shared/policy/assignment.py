"""The work that a placement gives to instances, as their loads will show it a little later."""

from dataclasses import dataclass
from zlib import crc32

from shared.domain.instance import Promised
from shared.domain.job import JobView
from shared.domain.route import Route
from shared.policy.decode_admission import is_heavy


@dataclass(frozen=True, slots=True)
class Assignment:
    """Work given to an instance at `time_s` (unix seconds), perhaps not yet in the instance's load.

    coming: a decode that reaches the instance only after (a part of) its prompt was computed on another one.
    answer_tokens: of a decode, for which room is kept from `lead_steps` steps of its instance on, beside the prompt's
    tokens less the `saved_tokens` that the instance holds.
    """

    instance_id: str
    time_s: float
    prefill_tokens: int = 0  # prompt tokens that the instance has to compute
    decode_tokens: int = 0  # prompt tokens of a decode; 0 when it is none
    heavy: bool = False
    job_id: str = ""
    coming: bool = False
    import_tokens: int = 0  # of KV that comes from another instance
    answer_tokens: int = 0
    lead_steps: int = 0
    saved_tokens: int = 0


def mark_of(job_id: str) -> int:
    """A short mark of a job's id for loads: two jobs of one instance and second share it once in billions."""
    return crc32(job_id.encode())


def promise_of(bound: Assignment) -> Promised:
    """A decode on its way as the instance's load shows it to schedulers that did not place it."""
    return Promised(
        mark_of(bound.job_id),
        bound.decode_tokens,
        bound.answer_tokens,
        bound.lead_steps,
        bound.saved_tokens,
        bound.import_tokens,
        bound.prefill_tokens,
        bound.heavy,
    )


def promised_to(instance_id: str, promised: Promised, now: float) -> Assignment:
    """The assignment that such a load shows; the inverse of `promise_of`."""
    return Assignment(
        instance_id,
        now,
        promised.prefill_tokens,
        promised.decode_tokens,
        promised.heavy,
        coming=True,
        import_tokens=promised.import_tokens,
        answer_tokens=promised.answer_tokens,
        lead_steps=promised.lead_steps,
        saved_tokens=promised.saved_tokens,
    )


def assignments(job: JobView, route: Route, now: float) -> tuple[Assignment, ...]:
    """The assignments of a route, to be booked so that later decisions count them."""
    booked = []
    if route.prefill is not None:
        tokens = route.split - route.prefill_saved
        booked.append(Assignment(route.prefill.instance_id, now, prefill_tokens=tokens, job_id=job.job_id))
    if route.decode is not None:
        saved, coming = route.decode_saved, route.prefill is not None
        booked.append(
            Assignment(
                route.decode.instance_id,
                now,
                prefill_tokens=job.prompt_tokens - max(route.split, saved),
                decode_tokens=job.prompt_tokens,
                heavy=is_heavy(job),
                job_id=job.job_id,
                coming=coming,
                import_tokens=max(0, route.split - saved) if coming else 0,
                answer_tokens=route.answer_tokens or job.max_tokens,
                lead_steps=route.lead_steps if coming else 0,
                saved_tokens=saved,
            )
        )
    return tuple(booked)
