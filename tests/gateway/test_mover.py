"""Jobs that migrate with their KV while they decode, and prompts whose beginning is pulled from its holder."""

import asyncio

import pytest

from gateway.job import Job
from shared.domain.prompt import unpacked
from shared.domain.route import PrefixPull
from shared.errors import EngineFailed, NoRoom, NotFound, PolyphaseError, Stays, WrongRole
from shared.wire.messages import Leave, LeaveCause
from tests.gateway.cluster import PROMPT, Cluster, answer, make_job, running_cluster, tokens_of, until

DRAIN = Leave(LeaveCause.DRAIN)


def decisions(job: Job, kind: str) -> list[str]:
    return [each.chosen for each in job.timeline.decisions if each.kind == kind]


async def migrated(cluster: Cluster, *, carry: bool = True) -> Job:
    """A job of which the first decode instance gives some tokens and the second one the rest."""
    source, target = cluster.decodes[:2]
    source.leave_at(4, DRAIN)
    job = await cluster.completes(12, carry=carry)
    assert decisions(job, "migration") == [target.name]
    assert (job.decode_instance, job.attempt, len(job.losses)) == (target.name, 1, 0)
    return job


async def stayed(cluster: Cluster) -> Job:
    """A job that is to migrate, does not, and gets all of its tokens where it is."""
    stays = asyncio.Event()
    cluster.decodes[0].leave_at(4, DRAIN, again_at=stays)
    job, steps = make_job(PROMPT, 12)
    task = cluster.starts(job)
    await until(lambda: decisions(job, "stay"))
    stays.set()
    await task
    assert tokens_of(steps) == answer(PROMPT, 12)
    return job


async def test_a_job_goes_on_with_its_kv_and_no_token_is_lost_or_sent_twice() -> None:
    async with running_cluster() as cluster:
        source, target = cluster.decodes
        job = await migrated(cluster)
        (pulled,) = target.pulls
        (decode,) = target.decodes
        tokens = [*PROMPT, *answer(PROMPT, 12)]
        assert source.exports[0].start == 0
        # The first token comes from the prefill instance, and four from the source: the KV of the last one is missing.
        assert pulled.handle.tokens == len(PROMPT) + 4
        assert unpacked(pulled.prompt) == tokens[: pulled.handle.tokens + 1]
        assert decode.handle is not None
        assert (decode.handle.start, decode.handle.tokens) == (pulled.handle.tokens, len(PROMPT) + 4)
        assert unpacked(decode.prompt) == tokens[: len(PROMPT) + 5]
        assert (decode.resumes, decode.known, decode.state) == (False, b"", b"")
        await until(
            lambda: {pulled.handle.transfer_id, decode.handle and decode.handle.transfer_id} <= {*source.released}
        )
        assert job.migrated_by == {("drain", "done"): 1}


async def test_a_job_that_cannot_be_carried_goes_on_with_the_samplers_state() -> None:
    async with running_cluster() as cluster:
        await migrated(cluster, carry=False)
        (decode,) = cluster.decodes[1].decodes
        assert unpacked(decode.prompt) == PROMPT
        assert unpacked(decode.known) == answer(PROMPT, 4)
        assert (decode.resumes, decode.state) == (True, b"after 9")


async def test_a_job_migrates_several_times() -> None:
    async with running_cluster() as cluster:
        first, second = cluster.decodes
        first.leave_at(2, DRAIN)
        second.leave_at(3, DRAIN)
        job = await cluster.completes(12)
        assert decisions(job, "migration") == [second.name, first.name, second.name, first.name]
        transfers = [each.transfer_id for each in (*first.exports, *second.exports, *first.leaves, *second.leaves)]
        assert len({*transfers}) == len(transfers)


async def test_the_scheduler_is_told_where_the_job_is_and_may_keep_it_there() -> None:
    async with running_cluster() as cluster:
        cluster.no_target = Stays("no other decode instance has room for the job; it stays")
        asked = asyncio.Event()
        cluster.decodes[0].leave_at(4, Leave(LeaveCause.TPOT, "d9", 0.5), again_at=asked)
        task = asyncio.create_task(cluster.completes(12))
        await until(lambda: cluster.places and cluster.places[-1].job.leaves)
        request = cluster.places[-1]
        assert (request.to, request.job.tpot_s, request.exclude) == ("d9", 0.5, (cluster.decodes[0].name,))
        assert request.job.local_only
        asked.set()
        job = await task
        assert decisions(job, "migration") == []
        assert job.decode_instance == cluster.decodes[0].name


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("no_export", NotFound("no such job decodes there")),
        ("no_export", EngineFailed("the instance died")),
        ("no_pull", NoRoom("it is full")),
        ("no_pull", WrongRole("it drains")),
        ("no_leave", NotFound("its decode has ended")),
    ],
)
async def test_a_job_stays_where_a_step_fails(fault: str, error: PolyphaseError) -> None:
    async with running_cluster() as cluster:
        source, target = cluster.decodes
        setattr(target if fault == "no_pull" else source, fault, error)
        job = await stayed(cluster)
        assert (job.decode_instance, job.attempt, target.decodes) == (source.name, 1, [])
        held = {each.transfer_id for each in source.exports}
        await until(lambda: held <= {*source.released})


async def test_a_job_stays_where_its_kv_does_not_arrive() -> None:
    async with running_cluster() as cluster:
        cluster.decodes[1].arrives = False
        job = await stayed(cluster)
        assert job.migrated_by == {("drain", "stayed"): 1}


async def test_kv_that_is_in_no_prefix_cache_comes_when_the_job_leaves() -> None:
    async with running_cluster() as cluster:
        source, target = cluster.decodes
        source.holds = False
        source.leave_at(4, DRAIN)
        await cluster.completes(12)
        assert not target.pulls
        (decode,) = target.decodes
        assert decode.handle is not None
        assert decode.handle.start == 0


async def test_the_kv_goes_to_another_instance_where_the_target_has_begun_to_drain() -> None:
    async with running_cluster(decodes=3) as cluster:
        source, target, other = cluster.decodes
        source.leave_at(4, DRAIN)
        target.refuse = WrongRole("it drains")
        job = await cluster.completes(12)
        assert (job.decode_instance, job.attempt) == (other.name, 1)
        assert other.decodes[0].handle is not None


@pytest.mark.parametrize("carry", [True, False])
async def test_a_target_that_dies_costs_an_attempt(carry: bool) -> None:
    async with running_cluster() as cluster:
        source, target = cluster.decodes
        source.leave_at(4, DRAIN)

        def fail(_: int) -> None:
            source.before_token = target.before_token = None
            raise EngineFailed("the instance died")

        target.before_token = fail
        job = await cluster.completes(12, carry=carry)
        assert job.attempt == 2
        assert job.migrated_by[("drain", "lost")] == 1


async def test_further_requests_to_leave_are_ignored_meanwhile() -> None:
    async with running_cluster() as cluster:
        source, _ = cluster.decodes
        source.leave_at(4, DRAIN, DRAIN, Leave(LeaveCause.MEMORY))
        job = await cluster.completes(12)
        assert len(decisions(job, "migration")) == 1


async def test_without_migration_instances_do_not_ask() -> None:
    async with running_cluster(migration=False) as cluster:
        await cluster.completes()
        assert not cluster.decodes[0].decodes[0].tell_leaves


@pytest.mark.parametrize("split", [None, 0])
async def test_a_prompts_beginning_is_pulled_from_its_holder(split: int | None) -> None:
    async with running_cluster() as cluster:
        holder = cluster.decodes[1]
        cluster.split, cluster.pull = split, PrefixPull(holder.ref, 3)
        await cluster.completes()
        request = (cluster.prefill.prefills if split is None else cluster.decodes[0].decodes)[0]
        (export,) = holder.exports
        assert (unpacked(export.prompt), export.job_id) == (PROMPT[:3], "")
        assert request.handle is not None
        assert (request.handle.transfer_id, request.handle.tokens) == (export.transfer_id, 3)
        await until(lambda: export.transfer_id in holder.released)


@pytest.mark.parametrize("gone", [True, False])
async def test_without_the_prefix_the_prompt_is_computed(gone: bool) -> None:
    async with running_cluster() as cluster:
        holder = cluster.decodes[1]
        cluster.pull = PrefixPull(holder.ref, 3)
        if gone:
            holder.holds = False
        else:
            holder.no_export = EngineFailed("the instance died")
        job = await cluster.completes()
        assert cluster.prefill.prefills[0].handle is None
        assert decisions(job, "pull") == [""]
        assert job.attempt == 1
