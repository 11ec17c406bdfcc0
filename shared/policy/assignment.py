"""What a placement gives instances to do, as loads will show it a little later."""

from dataclasses import dataclass
from zlib import crc32

from shared.domain.instance import Promised
from shared.domain.job import JobView
from shared.domain.route import Route
from shared.policy.decode_admission import is_heavy


@dataclass(frozen=True, slots=True)
class Assignment:
    """Work given to an instance at `time_s` (unix seconds), perhaps not yet in the instance's load.

    coming: a decode whose prompt is computed elsewhere first, wholly or in part, so that it comes only then.
    answer_tokens: of a decode, for which room is kept, from `lead_steps` of its instance on, beside the prompt's tokens
    but for `saved_tokens`, which the instance holds.
    """

    instance_id: str
    time_s: float
    prefill_tokens: int = 0  # prompt tokens that it has to compute
    decode_tokens: int = 0  # prompt tokens that a decode job brings; 0 when it is no decode job
    heavy: bool = False
    job_id: str = ""
    coming: bool = False
    import_tokens: int = 0  # of KV that comes from elsewhere
    answer_tokens: int = 0
    lead_steps: int = 0
    saved_tokens: int = 0


def mark_of(job_id: str) -> int:
    """Short for a job's id, in loads: two jobs of one instance and second have the same once in billions."""
    return crc32(job_id.encode())


def promise_of(bound: Assignment) -> Promised:
    """As the instance's load shows a decode that is still to come, to schedulers that did not place it."""
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


def promised_to(instance_id: str, one: Promised, now: float) -> Assignment:
    """What such a load says, to count it."""
    return Assignment(
        instance_id,
        now,
        one.prefill_tokens,
        one.decode_tokens,
        one.heavy,
        coming=True,
        import_tokens=one.import_tokens,
        answer_tokens=one.answer_tokens,
        lead_steps=one.lead_steps,
        saved_tokens=one.saved_tokens,
    )


def assignments(job: JobView, route: Route, now: float) -> tuple[Assignment, ...]:
    """What to book for a route, so that the next decisions count it."""
    booked = []
    if route.prefill is not None:
        tokens = route.split - route.prefill_saved
        booked.append(Assignment(route.prefill.instance_id, now, prefill_tokens=tokens, job_id=job.job_id))
    if route.decode is not None:
        tokens, heavy, saved = job.prompt_tokens, is_heavy(job), route.decode_saved
        later = route.prefill is not None
        booked.append(
            Assignment(
                route.decode.instance_id,
                now,
                tokens - max(route.split, saved),
                tokens,
                heavy,
                job.job_id,
                later,
                later * max(0, route.split - saved),
                route.answer_tokens or job.max_tokens,
                later * route.lead_steps,
                saved,
            )
        )
    return tuple(booked)
