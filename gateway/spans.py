"""Where the time of a job's legs went, on the gateway's clock: stretches that leave no gap before its first token."""

import time

import msgspec

from gateway.job import Job
from shared.errors import PolyphaseError
from shared.timeline import Span, clock_shift_s
from shared.wire.messages import DecodeReply, PrefillReply


def prefill_ended(job: Job, instance_id: str, reply: PrefillReply) -> None:
    """Take in the times of a prefill that has just replied."""
    replied_s = time.time()
    shift_s = clock_shift_s(reply.queued_s, reply.ended_s, job.mark_s, replied_s)
    for span, until_s in (
        (Span.HANDOVER, reply.queued_s),
        (Span.QUEUE, reply.started_s),
        (Span.PREFILL, reply.ended_s),
    ):
        job.spent(span, min(until_s + shift_s, replied_s), instance_id)
    job.spent(Span.REPLY, replied_s, instance_id)


def decode_ended(job: Job, instance_id: str, reply: DecodeReply) -> None:
    """Take in the times of a decode that has just replied, and its transfer: the wait until there was room for its KV,
    the transfer itself, and the wait from when the KV was there to the end of the first step are apart.
    """
    replied_s = time.time()
    shift_s = clock_shift_s(reply.queued_s, reply.ended_s, job.mark_s, replied_s)
    transfer = reply.transfer
    job.spent(Span.HANDOVER, reply.queued_s + shift_s, instance_id)
    first_step_s = job.leg_first_step_s or replied_s
    if transfer.started_s:
        transfer = msgspec.structs.replace(
            transfer, started_s=transfer.started_s + shift_s, ended_s=transfer.ended_s + shift_s
        )
        if transfer.started_s > job.mark_s:  # else it was fetched beforehand
            job.spent_here(Span.DECODE_QUEUE, min(transfer.started_s, first_step_s), instance_id)
        job.record(Span.TRANSFER, transfer.started_s, transfer.ended_s, instance_id)
    job.timeline.transfers.append(transfer)
    job.spent_here(Span.DECODE_QUEUE, min(reply.started_s + shift_s, first_step_s), instance_id)
    if job.timeline.first_token_s == first_step_s:
        job.spent(Span.REPLY, first_step_s, instance_id)
    job.spent_here(Span.DECODE, min(reply.ended_s + shift_s, replied_s), instance_id)


def leg_broke_off(job: Job, instance_id: str, error: BaseException) -> None:
    """A leg ended without a reply: it failed, or was cancelled because the client has enough or is gone."""
    now_s = time.time()
    if job.trace is not None and isinstance(error, PolyphaseError):
        job.trace.leg_lost(instance_id, job.mark_s, now_s, error.code)
    job.end_pause(now_s)
    first_s = job.leg_first_step_s or (job.pauses[0].began_s if job.pauses else 0.0)
    if first_s:
        job.spent_here(Span.DECODE_QUEUE, first_s, instance_id)
        job.spent_here(Span.DECODE, now_s, instance_id)
    else:
        job.spent(Span.LOST, now_s, instance_id)
