"""Requests that decode on emulated instances migrate with their KV, over real sockets: moved by an operator, and away
from an instance that drains. Their answers are so long that none ends by itself.
"""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.job import Job
from services.worker.engines.emulated_tokens import token_at
from services.worker.jobs import decode
from shared.domain.job import JobView, Slo
from shared.domain.kv import TransferOutcome
from shared.domain.policies import KINDS
from shared.domain.route import PolicySpec, Route
from shared.errors import Conflict, NotFound
from shared.explain import explain
from shared.timeline import Span
from shared.wire.messages import TokenStep
from tests.gateway.cluster import make_job, tokens_of
from tests.services.control_plane import until
from tests.services.live_suite import LiveSuite, emptied, live_suite, pipelines

PROMPT, ANSWER = 300, 20_000
DECODE: dict[str, Any] = {"emulated_step_s": 0.004, "kv_cache_bytes": 1 << 35, "max_model_len": 32_768}
BASE = {"placement": "least_load", "split": "full", "dispatch": "power_of_two"}
PATIENT = Slo(tpot_s=60.0)  # a busy machine is no reason to migrate
Made = list[tuple[Job, list[TokenStep]]]


@asynccontextmanager
async def decoding(suite: LiveSuite, count: int) -> AsyncIterator[Made]:
    """So many jobs that decode: every other one is carried, so that its answer so far is prompt where it goes on; the
    others resume behind the tokens of their answers. At the end of the block they are cancelled.
    """
    await suite.change({**dict.fromkeys(KINDS), **{kind: PolicySpec(name) for kind, name in BASE.items()}})
    with pipelines(suite) as (gateway,):
        made = [make_job([number] * PROMPT, ANSWER, carry=number % 2 == 0, slo=PATIENT) for number in range(count)]
        running = [asyncio.create_task(gateway.run(job)) for job, _ in made]
        try:
            await go_on(made)
            yield made
            assert not any(task.done() for task in running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    for job, steps in made:
        assert tokens_of(steps) == [token_at(PROMPT + at) for at in range(len(job.tokens))]
        assert (job.losses, job.failed_instances) == ([], [])
        assert Span.LOST not in {span.span for span in job.timeline.spans}
    for one in suite.instances.values():
        await emptied(one)


async def go_on(made: Made) -> None:
    """Each gets a token after this, from where it decodes now."""
    given = [len(job.tokens) for job, _ in made]
    await until(lambda: all(len(job.tokens) > had for (job, _), had in zip(made, given, strict=True)), "all go on")


async def test_an_operator_moves_requests_whose_answers_go_on(tmp_path: Path) -> None:
    async with live_suite(tmp_path, schedulers=1, decode=DECODE) as suite:
        await suite.start_instance("d1", "decode", **DECODE)
        await until(lambda: suite.known(3), "all three are ready")
        async with decoding(suite, 2) as made, suite.client as monitor:
            for to in ("d1", "d0", "d1"):
                for job, _ in made:
                    source = job.decode_instance
                    if source != to:
                        done = await monitor.move(job.spec.job_id, to=to, who="ann")
                        assert (done.result, done.instance_id, done.to_instance) == ("succeeded", source, to)
                await until(lambda: all(job.decode_instance == to for job, _ in made), f"all at {to}")  # noqa: B023
                await go_on(made)
            with pytest.raises(Conflict, match="decodes on d1 already"):
                await monitor.move(made[0][0].spec.job_id, to="d1")
            with pytest.raises(NotFound, match="'nobody'"):
                await monitor.move("nobody")
        for job, _ in made:
            assert job.migrations >= 2
            assert job.migrated_by[("operator", "done")] >= 1
            told = " ".join(sentence.text for sentence in explain(job.timeline).steps)
            assert "an operator asked for it" in told


async def test_an_instance_that_drains_is_empty_long_before_its_answers_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "DRAIN_NEWS_S", 0.2)
    async with live_suite(tmp_path, schedulers=1, decode=DECODE) as suite:
        async with decoding(suite, 8) as made, suite.client as monitor:
            draining = asyncio.create_task(monitor.drain("d0", timeout_s=60, force=True))
            await until(lambda: suite.instances["d0"].roles.draining, "d0 drains")
            await suite.start_instance("d1", "decode", **DECODE)  # a later notice finds a place
            assert (await draining).result == "succeeded"
            assert suite.instances["d0"].engine.stats().running == 0
            await go_on(made)
        for job, _ in made:
            assert (job.decode_instance, job.migration_cause) == ("d1", "drain")
            assert ("drain", "lost") not in job.migrated_by


async def test_a_prefill_instance_decodes_the_first_tokens_and_a_decode_instance_the_rest(tmp_path: Path) -> None:
    async with live_suite(tmp_path, schedulers=1, **DECODE) as suite:
        decider, keep_tokens = suite.schedulers[0].state.scheduler.placer.decider, 50
        placed = decider.decide

        def keep(job: JobView, exclude: Collection[str], now: float) -> Route:
            """As `adaptive` does where decodes are slow and prompts few."""
            route = placed(job, exclude, now)
            if route.prefill is None:
                return route
            return msgspec.structs.replace(route, prefill=None, decode=route.prefill, split=0, keep_tokens=keep_tokens)

        decider.decide = keep
        async with decoding(suite, 2) as made:
            assert {job.decode_instance for job, _ in made} == {"p0"}
            await until(lambda: all(job.decode_instance == "d0" for job, _ in made), "both have migrated")
            await go_on(made)
        for job, _ in made:
            assert (job.migrations, job.migration_cause) == (1, "kept")
            assert len(job.tokens) > keep_tokens
            (moved,) = [one for one in job.timeline.decisions if one.kind == "migration"]
            told = " ".join(sentence.text for sentence in explain(job.timeline).steps)
            assert (moved.chosen, "decodes the beginning of answers" in told) == ("d0", True)


async def test_an_answer_that_is_kept_to_its_end_needs_no_transfer(tmp_path: Path) -> None:
    async with live_suite(tmp_path, schedulers=1, **DECODE) as suite:
        decider = suite.schedulers[0].state.scheduler.placer.decider
        placed = decider.decide
        decider.decide = lambda *given: msgspec.structs.replace(
            placed(*given), prefill=None, decode=placed(*given).prefill, split=0, keep_tokens=100
        )
        await suite.change({kind: PolicySpec(name) for kind, name in BASE.items()})
        with pipelines(suite) as (gateway,):
            job, steps = make_job([1] * PROMPT, 20)
            await gateway.run(job)
        assert tokens_of(steps) == [token_at(PROMPT + at) for at in range(20)]
        assert (job.decode_instance, job.migrations) == ("p0", 0)
        assert {one.outcome for one in job.timeline.transfers} <= {TransferOutcome.LOCAL}
