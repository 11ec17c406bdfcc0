"""A stream that an emulated instance pauses goes on at another one that has room, over real sockets."""

import asyncio
from pathlib import Path

import pytest

from services.worker.engines.emulated_tokens import token_at
from services.worker.jobs import decode
from shared.domain.job import Phase
from shared.domain.policies import KINDS
from shared.domain.route import PolicySpec
from shared.explain import explain
from shared.timeline import Span
from tests.gateway.cluster import make_job, tokens_of
from tests.services.control_plane import until
from tests.services.live_suite import emptied, live_suite, pipelines

PROMPT, ANSWER, STREAMS = 300, 900, 3
SMALL = 64 * 32 * 131_072  # bytes: 64 blocks of 32 tokens, in which all prompts fit and not all answers
BASE = {"placement": "least_load", "split": "full", "dispatch": "power_of_two"}


async def test_paused_streams_move_to_an_instance_that_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "PAUSE_NEWS_S", 0.1)
    async with live_suite(tmp_path, schedulers=1, decode={"kv_cache_bytes": SMALL, "emulated_step_s": 0.004}) as suite:
        await suite.change({**dict.fromkeys(KINDS), **{kind: PolicySpec(name) for kind, name in BASE.items()}})
        await suite.start_instance("d1", "decode", emulated_step_s=0.004)
        await until(lambda: suite.known(3), "all three are ready", timeout_s=20)
        small, large = suite.instances["d0"], suite.instances["d1"]
        async with suite.client as monitor:
            await monitor.drain("d1", timeout_s=20)
            await until(lambda: not suite.known(3), "nothing new goes there")
            with pipelines(suite, migration=False) as (gateway,):  # else none would be paused
                made = [make_job([7] * PROMPT, ANSWER) for _ in range(STREAMS)]
                running = asyncio.gather(*(gateway.run(job) for job, _ in made))
                await until(lambda: small.engine.stats().preemptions > 0, "KV runs short", timeout_s=30)
                await until(lambda: any(job.call.paused is not None for job, _ in made), "the gateway hears of it")
                assert not any(job.moves for job, _ in made), "there is no other place yet"
                await monitor.resume("d1")
                await asyncio.wait_for(running, 60)
        undisturbed = [token_at(PROMPT + at) for at in range(ANSWER)]
        for job, steps in made:
            assert tokens_of(steps) == undisturbed
            assert (job.phase, job.losses, job.failed_instances) == (Phase.COMPLETED, [], [])
        moved = [job for job, _ in made if job.moves]
        assert moved
        for job in moved:
            assert job.moves == 1, "there is room for all of its answer"
            kinds = {span.span for span in job.timeline.spans}
            assert Span.PAUSED in kinds
            assert Span.LOST not in kinds
            told = [one.text for one in explain(job.timeline).steps]
            assert any(text.startswith("It left d0 after ") for text in told)
        assert {job.decode_instance for job in moved} == {"d1"}
        for instance in (small, large):
            await emptied(instance)
