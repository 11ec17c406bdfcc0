"""The pipeline over real sockets: what runs where, tokens exactly once, cancellation, and what is left of KV."""

import asyncio
from dataclasses import replace

import pytest

from gateway import job as job_module
from shared.domain.job import FirstTokenOut, Phase, Slo
from shared.domain.kv import KvHandle, TransferOutcome
from shared.domain.prompt import BLOCK_TOKENS, block_hashes, unpacked
from shared.domain.route import InstanceRef, Route
from shared.errors import Busy, DeadlineExceeded, EngineFailed, NotConnected, PolyphaseError, WrongRole
from shared.wire.messages import Reused, TokenStep
from tests.gateway.cluster import PROMPT, Cluster, answer, forever, make_job, next_token, tokens_of, until

SMOOTH = Slo(first_token=FirstTokenOut.SMOOTH)


async def test_the_first_token_comes_from_prefill_and_decode_continues(cluster: Cluster) -> None:
    job = await cluster.completes(8)
    (prefill,), (decode,) = cluster.prefill.prefills, cluster.decodes[0].decodes
    assert (prefill.job.started, decode.job.started, decode.job.max_tokens) == (False, True, 7)
    assert unpacked(decode.prompt) == PROMPT + answer(PROMPT, 1)
    assert decode.handle is not None
    assert decode.handle.tokens == len(PROMPT)
    assert (job.phase, job.finish_reason) == (Phase.COMPLETED, "length")
    assert job.timeline.transfers[0].outcome is TransferOutcome.PULLED
    assert [decision.kind for decision in job.timeline.decisions] == ["placement", "dispatch"]


@pytest.mark.parametrize("split", [1, 3, 4])
async def test_a_partial_split_computes_a_prefix_and_drops_its_token(cluster: Cluster, split: int) -> None:
    cluster.split = split
    await cluster.completes()
    (prefill,), (decode,) = cluster.prefill.prefills, cluster.decodes[0].decodes
    assert (unpacked(prefill.prompt), prefill.want_token) == (PROMPT[:split], False)
    assert (unpacked(decode.prompt), decode.job.started, decode.job.max_tokens) == (PROMPT, False, 6)


async def test_a_split_of_zero_stays_on_the_decode_instance(cluster: Cluster) -> None:
    cluster.split = 0
    await cluster.completes()
    assert not cluster.prefill.prefills
    assert cluster.decodes[0].decodes[0].handle is None


async def test_a_job_that_cannot_be_carried_gets_all_tokens_from_decode(cluster: Cluster) -> None:
    await cluster.completes(carry=False)
    assert not cluster.prefill.prefills[0].want_token
    assert unpacked(cluster.decodes[0].decodes[0].prompt) == PROMPT


async def test_an_answer_of_one_token_needs_no_decode_and_no_export(cluster: Cluster) -> None:
    assert (await cluster.completes(1)).finish_reason == "length"
    assert not cluster.prefill.prefills[0].export
    assert not cluster.decodes[0].decodes


async def test_a_first_token_that_ends_the_answer_ends_the_job_and_leaves_no_kv(cluster: Cluster) -> None:
    cluster.prefill.stop_token = answer(PROMPT, 1)[0]
    job, steps = make_job(PROMPT, 8)
    await cluster.pipeline.run(job)
    assert [step.finish_reason for step in steps] == ["stop"]
    assert not cluster.decodes[0].decodes
    await cluster.prefill.releases(1)


async def test_a_decode_instance_fetches_a_long_prompt_while_it_is_computed(cluster: Cluster) -> None:
    cluster.prefill.chunked = True
    fetched = cluster.decodes[0].prefetched
    cluster.prefill.before_token = lambda _: until(lambda: fetched)
    job = await cluster.completes(4)
    assert fetched == [job.transfer_id]


@pytest.mark.parametrize("twist", [None, 0, 1], ids=["carried", "repeated", "repeated with other arithmetic"])
async def test_a_lost_decode_instance_costs_no_token_and_doubles_none(cluster: Cluster, twist: int | None) -> None:
    """Of the lost instance's last tokens some may not have arrived."""
    carry, (first, other) = twist is None, cluster.decodes
    job, steps = make_job(PROMPT, 10, carry=carry)

    async def die() -> None:
        await until(lambda: steps)
        asyncio.get_running_loop().create_task(first.stop())
        await forever()

    first.before_token = lambda count: die() if count == 4 else asyncio.sleep(0)
    other.twist = twist or 0
    await cluster.pipeline.run(job)
    assert (job.attempt, len(other.decodes), cluster.places[-1].exclude) == (2, 1, ("d0",))
    prefill, known = cluster.prefill.prefills[1], unpacked(other.decodes[0].known)
    assert prefill.job.started, "a resumed job goes before prompts without a token"
    carried = unpacked(prefill.prompt)[len(PROMPT) :]
    had = carried or known
    assert 1 <= len(had) <= 5
    assert (bool(carried), bool(known)) == (carry, not carry)
    right = PROMPT + answer(PROMPT, len(had))
    assert right[len(PROMPT) :] == had
    while len(right) < len(PROMPT) + 10:
        right.append(next_token(right) + (twist or 0))
    assert tokens_of(steps) == right[len(PROMPT) :]


async def test_a_lost_prefill_instance_is_used_again_when_it_is_back(cluster: Cluster) -> None:
    prefill = cluster.prefill

    async def restart() -> None:
        prefill.before_token = None
        await prefill.stop()
        await prefill.start()

    async def die() -> None:
        asyncio.get_running_loop().create_task(restart())
        await forever()

    prefill.before_token = lambda _: die()
    assert (await cluster.completes()).attempt >= 2


@pytest.mark.parametrize("refusal", [WrongRole("draining"), Busy("full"), NotConnected("gone")])
async def test_another_decode_instance_gets_the_same_kv_after_a_refusal(
    cluster: Cluster, refusal: PolyphaseError
) -> None:
    if isinstance(refusal, NotConnected):
        await cluster.decodes[0].stop()
    cluster.decodes[0].refuse = refusal
    job = await cluster.completes()
    assert (len(cluster.prefill.prefills), job.losses) == (1, [])
    assert [each.handle and each.handle.transfer_id for each in cluster.decodes[1].decodes] == [job.transfer_id]


async def test_a_job_waits_for_a_scheduler_that_comes_back(cluster: Cluster) -> None:
    await cluster.scheduler_down()
    job, steps = make_job(PROMPT, 5)
    running = cluster.starts(job)
    await asyncio.sleep(0.2)  # long enough for a first try to fail; the assertion does not depend on it
    await cluster.scheduler_up()
    await asyncio.wait_for(running, 20)
    assert tokens_of(steps) == answer(PROMPT, 5)


async def test_each_call_gets_the_rest_of_the_deadline(cluster: Cluster) -> None:
    cluster.prefill.chunked = True
    await cluster.completes(timeout_s=60.0)
    decode = cluster.decodes[0]
    assert len(decode.timeouts) == 2  # prefetch and decode
    assert all(30 < timeout_s < 60 for timeout_s in (*cluster.prefill.timeouts, *decode.timeouts))


async def test_a_job_ends_with_its_deadline(cluster: Cluster) -> None:
    cluster.decodes[0].before_token = forever
    job, _ = make_job(PROMPT, 5, timeout_s=1.5)
    with pytest.raises(DeadlineExceeded):
        await cluster.pipeline.run(job)
    if cluster.decodes[0].decodes:  # else a busy machine had the time pass before
        await asyncio.wait_for(cluster.decodes[0].cancelled.wait(), 20)


async def test_many_jobs_at_once_do_not_mix(cluster: Cluster) -> None:
    jobs = await asyncio.gather(*(cluster.completes(12, [index, index + 1, 7]) for index in range(50)))
    same_id, _ = make_job(PROMPT, 4, job_id=jobs[0].spec.job_id)
    await cluster.pipeline.run(same_id)
    assert len({request.transfer_id for request in cluster.prefill.prefills}) == 51


async def test_a_bug_of_ours_ends_the_job_in_the_status_table_too(cluster: Cluster) -> None:
    job, _ = make_job(PROMPT, 5)
    job.emit = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        await cluster.pipeline.run(job)
    assert job.phase is Phase.FAILED
    assert (await cluster.last_report()).outcome == "internal_error"


async def test_a_smooth_class_gets_its_first_token_with_the_second(cluster: Cluster) -> None:
    job, steps = make_job(PROMPT, 5, slo=SMOOTH)
    steps_at_decode: list[int] = []
    cluster.decodes[0].before_token = lambda _: steps_at_decode.append(len(steps))
    await cluster.pipeline.run(job)
    assert steps_at_decode[0] == 0
    assert tokens_of(steps) == answer(PROMPT, 5)
    assert job.timeline.output_tokens == 5


def test_a_held_first_token_leaves_once_and_may_complete_a_stop_string() -> None:
    job, steps = make_job(PROMPT, 5, slo=SMOOTH)
    job.phase = Phase.PREFILL
    job.accept(TokenStep([1]))
    assert (steps, job.tokens, job.timeline.first_token_s) == ([], [1], 0.0)
    job.phase = Phase.DECODE

    def ends(step: TokenStep) -> None:
        steps.append(step)
        job.stop()

    job.emit = ends
    job.accept(TokenStep([2]))
    assert (tokens_of(steps), job.finish_reason) == ([1], "stop")


@pytest.mark.parametrize("at", ["prefill", "prefill whose reply crosses the cancellation", "decode"])
async def test_cancelling_a_job_stops_its_calls_and_frees_its_kv(cluster: Cluster, at: str) -> None:
    prefill, decode = cluster.prefill, cluster.decodes[0]
    prefill.chunked, prefill.stubborn = at == "prefill", "crosses" in at
    reached = decode.hang_at(3) if at == "decode" else prefill.hang_at(0)
    job, _ = make_job(PROMPT, 10)
    running = cluster.starts(job)
    await asyncio.wait_for(reached.wait(), 20)
    if prefill.chunked:
        await until(lambda: decode.prefetched)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.wait_for((decode if at == "decode" else prefill).cancelled.wait(), 20)
    holder = decode if prefill.chunked else prefill
    await holder.releases(1)
    assert (holder.released, job.phase) == ([job.transfer_id], Phase.CANCELLED)


async def test_the_prefill_instance_is_told_once_that_its_kv_was_pulled(cluster: Cluster) -> None:
    job = await cluster.completes(4)
    await cluster.prefill.releases(1)
    assert cluster.prefill.released == [job.transfer_id]
    assert not any(decode.released for decode in cluster.decodes)


async def test_a_prefetch_continues_until_the_decode_has_ended(cluster: Cluster) -> None:
    decode, states = cluster.decodes[0], list[tuple[int, int]]()
    cluster.prefill.chunked, decode.fetching = True, asyncio.Event()
    decode.before_token = lambda _: states.append((len(decode.prefetched), len(decode.dropped)))
    await cluster.completes()
    assert states == [(1, 0)] * 5
    await until(lambda: len(decode.dropped) == 1)


async def test_a_prefetch_of_an_instance_that_then_refuses_is_dropped(cluster: Cluster) -> None:
    first, second = cluster.decodes
    cluster.prefill.chunked, first.fetching, first.refuse = True, asyncio.Event(), WrongRole("draining")
    await cluster.completes()
    assert len(second.decodes) == 1
    await first.releases(1)
    assert not second.released
    await cluster.prefill.releases(1)


LONG_PROMPT = [number % 900 for number in range(3 * BLOCK_TOKENS + 5)]


async def test_a_scheduler_gets_prefix_hashes_after_a_route_that_wants_them(cluster: Cluster) -> None:
    for cluster.wants_prefix in (False, True, True, False, False):
        await cluster.completes(4, LONG_PROMPT)
    hashes = block_hashes(LONG_PROMPT)
    assert len(hashes) == 3
    assert [place.job.prefix for place in cluster.places] == [(), (), hashes, hashes, ()]
    assert not any(request.job.prefix for worker in cluster.workers for request in (*worker.prefills, *worker.decodes))


async def test_prefix_hashes_depend_on_the_salt_and_are_computed_once_a_job(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.wants_prefix = True
    await cluster.completes(4, LONG_PROMPT)
    await cluster.completes(4, LONG_PROMPT, salt="s")
    await cluster.completes(4, LONG_PROMPT, local_only=True)  # bypasses the prefix cache
    assert [place.job.prefix for place in cluster.places[1:]] == [block_hashes(LONG_PROMPT, "s"), ()]
    computed: list[object] = []
    monkeypatch.setattr(job_module, "hashes_of", lambda *prompt: computed.append(prompt) or (1, 2))
    cluster.prefill.fail_once(EngineFailed("the first attempt is lost"))
    await cluster.completes(4, LONG_PROMPT)
    assert [place.job.prefix for place in cluster.places[3:]] == [(1, 2), (1, 2)]
    assert len(computed) == 1


async def test_instances_get_the_number_of_tokens_that_they_are_said_to_hold(cluster: Cluster) -> None:
    cluster.saved = 2
    await cluster.completes(4)
    await cluster.completes(4, local_only=True)
    assert [request.saved for request in cluster.prefill.prefills] == [2]
    requests = [request for worker in cluster.decodes for request in worker.decodes]
    assert sorted((request.handle is None, request.saved) for request in requests) == [(False, 0), (True, 2)]


# Cached tokens: prompt tokens that no instance had to compute for a request

TWENTY = list(range(5, 25))


@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize(
    ("split", "prefill", "decode", "cached"),
    [
        (None, 12, 0, 12),  # the KV that the decode instance gets was computed for this request
        (None, 0, 16, 0),  # the tokens that it holds as well were computed all the same
        (None, 16, 16, 16),
        (0, 16, 8, 8),  # the decode instance computes the whole prompt
        (0, 16, 0, 0),
        (8, 4, 0, 4),  # the decode instance computes the rest of the prompt
        (8, 8, 4, 8),
        (8, 4, 16, 4 + 8),  # of the rest the decode instance holds 8 tokens
    ],
)
async def test_tokens_that_no_instance_computed_are_cached(
    cluster: Cluster, split: int | None, prefill: int, decode: int, cached: int, carry: bool
) -> None:
    cluster.split, cluster.prefill.held = split, prefill
    for worker in cluster.decodes:
        worker.held = decode
    job = await cluster.completes(4, TWENTY, carry=carry)
    assert job.reused == Reused(cached, len(TWENTY) - cached)


@pytest.mark.parametrize("carry", [True, False])
async def test_tokens_that_a_lost_attempt_computed_are_not_cached(cluster: Cluster, carry: bool) -> None:
    """The second attempt finds in the prefix cache what the first one has left there."""

    def lost(_: int) -> None:
        cluster.prefill.held = 16
        raise EngineFailed("the instance died")

    cluster.prefill.held = 8
    cluster.decodes[0].held = cluster.decodes[1].held = 0
    cluster.decodes[0].before_token = lost
    job = await cluster.completes(4, TWENTY, carry=carry)
    assert (job.attempt, job.reused) == (2, Reused(8, 12))


def test_the_timeline_says_what_another_precision_computed() -> None:
    job, _ = make_job(PROMPT, 9)
    full, quantised = InstanceRef("d", 1, "tcp://d:1"), InstanceRef("d8", 1, "tcp://d8:1", "fp8")
    handle = KvHandle("t", "p", 1, "f", (), 3, "bfloat16", precision="fp8")
    job.decodes_at(full, None)
    assert job.timeline.decisions == []
    job.decodes_at(full, handle)
    job.tokens += [1, 2]
    job.decodes_at(quantised, None)
    job.decodes_at(quantised, handle)
    decided = [(one.kind, one.chosen, one.reasons[0].figures) for one in job.timeline.decisions]
    assert decided == [
        ("precision", "d", {"prompt": "fp8", "from here": "the model's"}),
        ("precision", "d8", {"tokens so far": "the model's", "from here": "fp8"}),
    ]


@pytest.mark.parametrize("one_precision", [False, True])
def test_a_job_of_one_precision_keeps_that_of_its_first_instance(one_precision: bool) -> None:
    job, _ = make_job(PROMPT, 9)
    job.spec = replace(job.spec, one_precision=one_precision)
    assert (job.view().one_precision, job.view().precision) == (one_precision, None)
    prefill, decode = InstanceRef("p", 1, "tcp://p:1", "fp8"), InstanceRef("d", 1, "tcp://d:1", "fp8")
    job.placed(Route(prefill, decode, 2, "fixed"))
    assert job.view().precision == ("fp8" if one_precision else None)
    job.placed(Route(None, InstanceRef("e", 1, "tcp://e:1"), 0, "fixed"))
    assert job.view().precision == ("fp8" if one_precision else None)
