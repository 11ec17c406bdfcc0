"""The pipeline over real sockets: what runs where, exactly-once tokens, and what follows each failure."""

import asyncio
import time
from dataclasses import replace

import msgspec
import pytest

from gateway import job as job_module
from shared.domain.job import FirstTokenOut, Phase
from shared.domain.kv import TransferOutcome
from shared.domain.prompt import BLOCK_TOKENS, block_hashes, unpacked
from shared.errors import Busy, DeadlineExceeded, EngineFailed, PolyphaseError, Unavailable, WrongRole
from shared.timeline import Span
from shared.wire.messages import TokenStep
from tests.gateway.api import until
from tests.gateway.cluster import Cluster, make_job, running_cluster, tokens_of
from tests.gateway.worker import Worker, answer, next_token

PROMPT = [5, 6, 7, 8, 9]


async def test_the_first_token_comes_from_prefill_and_decode_carries_on() -> None:
    async with running_cluster() as cluster:
        job, steps = make_job(PROMPT, 8)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 8)
        assert steps[-1].finish_reason == "length"
        (decode,) = cluster.decodes[0].decodes
        assert not cluster.prefill.prefills[0].job.started
        assert decode.job.started, "its client has a token"
        assert unpacked(decode.prompt) == PROMPT + answer(PROMPT, 1)
        assert decode.job.max_tokens == 7
        assert decode.handle is not None
        assert decode.handle.tokens == len(PROMPT)
        assert job.phase is Phase.COMPLETED
        assert job.timeline.transfers[0].outcome is TransferOutcome.PULLED
        assert [decision.kind for decision in job.timeline.decisions] == ["placement", "dispatch"]


@pytest.mark.parametrize("split", [1, 3, 4])
async def test_a_partial_split_computes_a_prefix_and_drops_its_token(split: int) -> None:
    async with running_cluster() as cluster:
        cluster.split = lambda _: split
        job, steps = make_job(PROMPT, 6)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 6)
        (prefill,) = cluster.prefill.prefills
        assert unpacked(prefill.prompt) == PROMPT[:split]
        assert not prefill.want_token
        (decode,) = cluster.decodes[0].decodes
        assert not decode.job.started
        assert unpacked(decode.prompt) == PROMPT
        assert decode.job.max_tokens == 6


async def test_no_split_stays_on_the_decode_instance() -> None:
    async with running_cluster() as cluster:
        cluster.split = lambda _: 0
        job, steps = make_job(PROMPT, 6)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 6)
        assert not cluster.prefill.prefills
        assert cluster.decodes[0].decodes[0].handle is None


async def test_a_job_that_cannot_be_carried_gets_all_tokens_from_decode() -> None:
    async with running_cluster() as cluster:
        job, steps = make_job(PROMPT, 6, carry=False)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 6)
        assert not cluster.prefill.prefills[0].want_token
        assert unpacked(cluster.decodes[0].decodes[0].prompt) == PROMPT


async def test_one_token_needs_no_decode_and_no_staging() -> None:
    async with running_cluster() as cluster:
        job, steps = make_job(PROMPT, 1)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 1)
        assert steps[-1].finish_reason == "length"
        assert not cluster.prefill.prefills[0].export
        assert not cluster.decodes[0].decodes


async def test_a_first_token_that_ends_the_answer_ends_the_job() -> None:
    async with running_cluster() as cluster:
        cluster.prefill.stop_token = answer(PROMPT, 1)[0]
        job, steps = make_job(PROMPT, 8)
        await cluster.pipeline.run(job)
        assert [step.finish_reason for step in steps] == ["stop"]
        assert not cluster.decodes[0].decodes


async def test_a_long_prompt_is_fetched_while_it_is_computed() -> None:
    async with running_cluster() as cluster:
        cluster.prefill.chunked = True
        seen = cluster.decodes[0].prefetched

        async def until_fetched() -> None:
            await until(lambda: bool(seen))

        cluster.prefill.before_token = lambda _: until_fetched()
        job, steps = make_job(PROMPT, 4)
        await cluster.pipeline.run(job)
        assert seen == [job.transfer_id]
        assert tokens_of(steps) == answer(PROMPT, 4)


def _dies_at(worker: Worker, count: int, steps: list[TokenStep]) -> None:
    """Let a worker vanish before its `count`-th token, when the client has some of them."""

    async def die() -> None:
        await until(lambda: bool(steps))
        asyncio.get_running_loop().create_task(worker.stop())
        await asyncio.Event().wait()

    worker.before_token = lambda number: die() if number == count else asyncio.sleep(0)


@pytest.mark.parametrize("carry", [True, False])
async def test_a_lost_decode_instance_costs_no_token_and_doubles_none(carry: bool) -> None:
    async with running_cluster() as cluster:
        job, steps = make_job(PROMPT, 10, carry=carry)
        _dies_at(cluster.decodes[0], 4, steps)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 10)
        assert len(cluster.decodes[1].decodes) == 1
        assert job.attempt == 2
        assert "d0" in cluster.places[-1].exclude
        second = cluster.prefill.prefills[1]
        assert second.job.started, "a resumed job goes before prompts without a token"
        got = second.prompt_tokens - len(PROMPT)  # of the lost instance's last tokens some may not have arrived
        assert 1 <= got <= 5 if carry else got == 0
        assert unpacked(second.prompt) == PROMPT + answer(PROMPT, got)


async def test_a_second_run_repeats_what_the_client_has_and_goes_on_by_its_own_arithmetic() -> None:
    async with running_cluster() as cluster:
        job, steps = make_job(PROMPT, 10, carry=False)
        _dies_at(cluster.decodes[0], 4, steps)
        cluster.decodes[1].twist = 1
        await cluster.pipeline.run(job)
        (second,) = cluster.decodes[1].decodes
        known = unpacked(second.known)
        assert 1 <= len(known) <= 4
        assert known == answer(PROMPT, len(known))
        right = PROMPT + known
        for _ in range(10 - len(known)):
            right.append(next_token(right) + 1)
        assert tokens_of(steps) == right[len(PROMPT) :]
        assert not cluster.decodes[0].decodes[0].known


async def test_a_lost_prefill_instance_is_replaced_when_it_is_back() -> None:
    async with running_cluster() as cluster:
        prefill = cluster.prefill

        async def die() -> None:
            asyncio.get_running_loop().create_task(restart())
            await asyncio.Event().wait()

        async def restart() -> None:
            prefill.before_token = None
            await prefill.stop()
            await prefill.start()

        prefill.before_token = lambda _: die()
        job, steps = make_job(PROMPT, 5)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 5)
        assert job.attempt >= 2


@pytest.mark.parametrize("refusal", [WrongRole("draining"), Busy("full")])
async def test_a_refused_decode_takes_the_same_kv_elsewhere(refusal: PolyphaseError) -> None:
    async with running_cluster() as cluster:
        cluster.decodes[0].refuse = refusal
        job, steps = make_job(PROMPT, 5)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 5)
        assert len(cluster.prefill.prefills) == 1  # not computed again
        handle = cluster.decodes[1].decodes[0].handle
        assert handle is not None
        assert handle.transfer_id == job.transfer_id


async def test_a_decode_instance_that_is_gone_leaves_the_same_kv_to_another() -> None:
    """It died while nobody could say so: dispatch still names it."""
    async with running_cluster() as cluster:
        await cluster.decodes[0].stop()
        job, steps = make_job(PROMPT, 5)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 5)
        assert len(cluster.prefill.prefills) == 1  # not computed again
        assert not job.losses
        assert [each.handle and each.handle.transfer_id for each in cluster.decodes[1].decodes] == [job.transfer_id]


async def test_waiting_for_an_instance_that_is_gone_takes_from_the_patience_and_costs_no_attempt() -> None:
    async with running_cluster(patience_s=10.0, attempts=1) as cluster:
        await cluster.prefill.stop()
        job, steps = make_job(PROMPT, 5)
        began = time.monotonic()
        running = asyncio.create_task(cluster.pipeline.run(job))
        await until(lambda: job.waited_s >= 1.0, 20)
        assert job.waited_s > 0.5 * (time.monotonic() - began)  # nearly all of it was spent in calls, not in pauses
        await cluster.prefill.start()
        await asyncio.wait_for(running, 20)
        assert tokens_of(steps) == answer(PROMPT, 5)


async def test_a_job_waits_for_a_scheduler_that_comes_back() -> None:
    async with running_cluster() as cluster:
        await cluster.scheduler_down()
        job, steps = make_job(PROMPT, 5)
        task = asyncio.create_task(cluster.pipeline.run(job))
        await asyncio.sleep(0.2)  # long enough for a first try to fail; the assertion does not depend on it
        await cluster.scheduler_up()
        await asyncio.wait_for(task, 5)
        assert tokens_of(steps) == answer(PROMPT, 5)


async def test_patience_ends_with_a_clear_error() -> None:
    async with running_cluster(patience_s=0.2) as cluster:
        cluster.decodes.clear()
        job, steps = make_job(PROMPT, 5)
        with pytest.raises(Unavailable):
            await cluster.pipeline.run(job)
        assert not steps
        assert job.phase is Phase.FAILED


async def test_the_deadline_of_the_job_holds_for_all_its_legs() -> None:
    async with running_cluster() as cluster:
        cluster.decodes[0].before_token = lambda _: asyncio.Event().wait()
        job, _ = make_job(PROMPT, 5, timeout_s=1.5)
        with pytest.raises(DeadlineExceeded):
            await cluster.pipeline.run(job)
        await asyncio.wait_for(cluster.decodes[0].cancelled.wait(), 5)


async def test_reports_reach_the_scheduler_with_the_timeline_at_the_end() -> None:
    async with running_cluster() as cluster:
        job, _ = make_job(PROMPT, 5)
        await cluster.pipeline.run(job)
        await cluster.reporter.flush()
        await until(lambda: bool(cluster.reports))
        last = cluster.reports[-1]
        assert last.phase is Phase.COMPLETED
        assert last.output_tokens == 5
        assert last.timeline is not None
        assert {span.span for span in last.timeline.spans} >= {Span.PLACEMENT}


async def test_many_jobs_at_once_do_not_mix() -> None:
    async with running_cluster() as cluster:
        jobs = [make_job([index, index + 1, 7], 12) for index in range(50)]
        await asyncio.gather(*(cluster.pipeline.run(job) for job, _ in jobs))
        for index, (_, steps) in enumerate(jobs):
            assert tokens_of(steps) == answer([index, index + 1, 7], 12)


async def test_a_bug_of_ours_ends_the_job_in_the_status_table_too() -> None:
    async with running_cluster() as cluster:
        job, _ = make_job(PROMPT, 5)

        def broken(_: object) -> None:
            raise ZeroDivisionError("a bug")

        job.emit = broken
        with pytest.raises(ZeroDivisionError):
            await cluster.pipeline.run(job)
        assert job.phase is Phase.FAILED
        await cluster.reporter.flush()
        await until(lambda: bool(cluster.reports))
        assert cluster.reports[-1].outcome == "internal_error"


async def test_a_smooth_class_gets_its_first_token_with_the_second() -> None:
    async with running_cluster() as cluster:
        job, steps = make_job(PROMPT, 5)
        job.spec = replace(job.spec, slo=msgspec.structs.replace(job.spec.slo, first_token=FirstTokenOut.SMOOTH))
        at_decode: list[int] = []
        for worker in cluster.decodes:
            worker.before_token = lambda _: at_decode.append(len(steps))
        await cluster.pipeline.run(job)
        assert at_decode[0] == 0, "its prompt was computed, and its client had nothing yet"
        assert tokens_of(steps) == answer(PROMPT, 5)
        assert job.timeline.output_tokens == 5


def test_what_is_kept_for_a_smooth_class_is_handed_on_once_and_ends_with_a_stop_string() -> None:
    job, steps = make_job(PROMPT, 5)
    job.spec = replace(job.spec, slo=msgspec.structs.replace(job.spec.slo, first_token=FirstTokenOut.SMOOTH))
    job.phase = Phase.PREFILL
    job.accept(TokenStep([1]))
    assert (steps, job.tokens, job.timeline.first_token_s) == ([], [1], 0.0)
    job.phase = Phase.DECODE

    def ends(step: TokenStep) -> None:
        steps.append(step)
        job.stop()  # the first token completes a stop string

    job.emit = ends
    job.accept(TokenStep([2]))
    assert (tokens_of(steps), job.finish_reason) == ([1], "stop")


def test_an_answer_of_one_token_is_not_kept() -> None:
    job, steps = make_job(PROMPT, 1)
    job.spec = replace(job.spec, slo=msgspec.structs.replace(job.spec.slo, first_token=FirstTokenOut.SMOOTH))
    job.phase = Phase.PREFILL
    job.accept(TokenStep([1], "length"))
    assert (tokens_of(steps), job.finish_reason) == ([1], "length")


async def test_cancelling_stops_the_decode_leg_and_frees_the_staged_kv() -> None:
    async with running_cluster() as cluster:
        decode, reached = cluster.decodes[0], asyncio.Event()

        async def hang() -> None:
            reached.set()
            await asyncio.Event().wait()

        decode.before_token = lambda count: hang() if count == 3 else asyncio.sleep(0)
        job, _ = make_job(PROMPT, 10)
        task = asyncio.create_task(cluster.pipeline.run(job))
        await asyncio.wait_for(reached.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(decode.cancelled.wait(), 1)
        await until(lambda: cluster.prefill.released == [job.transfer_id], 1)
        assert job.phase is Phase.CANCELLED


async def test_cancelling_stops_the_prefill_leg_and_drops_what_was_fetched() -> None:
    async with running_cluster() as cluster:
        cluster.prefill.chunked = True
        reached = asyncio.Event()

        async def hang() -> None:
            reached.set()
            await asyncio.Event().wait()

        cluster.prefill.before_token = lambda _: hang()
        job, _ = make_job(PROMPT, 10)
        task = asyncio.create_task(cluster.pipeline.run(job))
        await asyncio.wait_for(reached.wait(), 5)
        await until(lambda: bool(cluster.decodes[0].prefetched))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(cluster.prefill.cancelled.wait(), 1)
        await until(lambda: cluster.decodes[0].released == [job.transfer_id], 1)


async def test_a_reply_that_crosses_the_cancellation_leaves_nothing() -> None:
    async with running_cluster() as cluster:
        prefill, reached = cluster.prefill, asyncio.Event()

        async def hang() -> None:
            reached.set()
            await asyncio.Event().wait()

        prefill.before_token, prefill.stubborn = lambda _: hang(), True
        job, _ = make_job(PROMPT, 10)
        task = asyncio.create_task(cluster.pipeline.run(job))
        await asyncio.wait_for(reached.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await prefill.releases(1)
        assert prefill.released == [job.transfer_id]


async def test_a_first_token_that_ends_the_answer_leaves_nothing() -> None:
    async with running_cluster() as cluster:
        cluster.prefill.stop_token = answer(PROMPT, 1)[0]
        job, _ = make_job(PROMPT, 8)
        await cluster.pipeline.run(job)
        await cluster.prefill.releases(1)


async def test_a_failed_prefill_leaves_nothing() -> None:
    async with running_cluster(attempts=1) as cluster:

        def fail(_: int) -> None:
            raise EngineFailed("a bug")

        cluster.prefill.before_token = fail
        job, _ = make_job(PROMPT, 8)
        with pytest.raises(EngineFailed):
            await cluster.pipeline.run(job)
        await cluster.prefill.releases(1)


async def test_whatever_became_of_the_kv_the_prefill_instance_is_told_once() -> None:
    """That it was pulled, it hears from the importer too, by a connection that may be broken."""
    async with running_cluster() as cluster:
        pulled, _ = make_job(PROMPT, 4)
        await cluster.pipeline.run(pulled)
        cluster.prefill.stop_token = answer(PROMPT, 1)[0]
        over_at_once, _ = make_job(PROMPT, 4)
        await cluster.pipeline.run(over_at_once)
        await cluster.prefill.releases(2)
        assert cluster.prefill.released == [pulled.transfer_id, over_at_once.transfer_id]
        assert not any(decode.released for decode in cluster.decodes)


async def test_a_prefetch_goes_on_until_the_decode_has_ended() -> None:
    async with running_cluster() as cluster:
        decode = cluster.decodes[0]
        cluster.prefill.chunked, decode.fetching = True, asyncio.Event()
        states: list[tuple[int, int]] = []
        decode.before_token = lambda _: states.append((len(decode.prefetched), len(decode.dropped)))
        job, steps = make_job(PROMPT, 6)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 6)
        assert states == [(1, 0)] * 5
        await until(lambda: len(decode.dropped) == 1)  # the call that is still under way then is of no use to anybody


async def test_a_prefetch_of_an_instance_that_then_refuses_is_dropped() -> None:
    async with running_cluster() as cluster:
        first, second = cluster.decodes
        cluster.prefill.chunked, first.fetching = True, asyncio.Event()
        first.refuse = WrongRole("draining")
        job, steps = make_job(PROMPT, 6)
        await cluster.pipeline.run(job)
        assert tokens_of(steps) == answer(PROMPT, 6)
        assert len(second.decodes) == 1
        await first.releases(1)
        assert not second.released
        await cluster.prefill.releases(1)


async def test_transfers_of_jobs_with_one_id_differ() -> None:
    async with running_cluster() as cluster:
        first, _ = make_job(PROMPT, 4)
        second, _ = make_job(PROMPT, 4, job_id=first.spec.job_id)
        await asyncio.gather(cluster.pipeline.run(first), cluster.pipeline.run(second))
        assert len({request.transfer_id for request in cluster.prefill.prefills}) == 2


PREFIX_PROMPT = [number % 900 for number in range(3 * BLOCK_TOKENS + 5)]


async def run(cluster: Cluster, **more: object) -> None:
    job, _ = make_job(PREFIX_PROMPT, 4, **more)  # type: ignore[arg-type]
    await cluster.pipeline.run(job)


async def test_it_is_told_from_the_second_job_on_while_the_policy_looks_at_it() -> None:
    async with running_cluster() as cluster:
        await run(cluster)
        cluster.wants_prefix = True
        await run(cluster)
        await run(cluster)
        cluster.wants_prefix = False
        await run(cluster)
        await run(cluster)
        told = [place.job.prefix for place in cluster.places]
        assert told == [(), (), block_hashes(PREFIX_PROMPT), block_hashes(PREFIX_PROMPT), ()]
        assert len(told[2]) == 3
        for worker in (cluster.prefill, *cluster.decodes):
            assert all(request.job.prefix == () for request in (*worker.prefills, *worker.decodes))


async def test_the_salt_is_part_of_it_and_who_bypasses_the_cache_has_none() -> None:
    async with running_cluster() as cluster:
        cluster.wants_prefix = True
        await run(cluster)
        await run(cluster, salt="s")
        await run(cluster, local_only=True)
        assert [place.job.prefix for place in cluster.places[1:]] == [block_hashes(PREFIX_PROMPT, "s"), ()]


async def test_it_is_computed_once_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []

    def count(*given: object) -> tuple[int, ...]:
        computed.append(given)
        return (1, 2)

    async with running_cluster() as cluster:
        cluster.wants_prefix = True
        await run(cluster)
        monkeypatch.setattr(job_module, "hashes_of", count)
        lost = []

        def lose_once(_: int) -> None:
            if not lost:
                lost.append(1)
                raise EngineFailed("the first attempt is lost")

        cluster.prefill.before_token = lose_once
        await run(cluster)
        assert [place.job.prefix for place in cluster.places[1:]] == [(1, 2), (1, 2)]
        assert len(computed) == 1


async def test_instances_are_told_what_they_are_known_to_hold() -> None:
    async with running_cluster() as cluster:
        cluster.saved = 2
        await run(cluster)
        assert [request.saved for request in cluster.prefill.prefills] == [2]
        await run(cluster, local_only=True)
        requests = [request for worker in cluster.decodes for request in worker.decodes]
        assert sorted((request.handle is None, request.saved) for request in requests) == [(False, 0), (True, 2)]
