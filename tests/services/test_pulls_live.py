"""The next turn of a chat on emulated instances, over real sockets: the prefill instance pulls the answer before it
from the decode instance, instead of computing it.
"""

from pathlib import Path
from typing import Any

from gateway.pipeline import Pipeline
from services.worker.engines.emulated_tokens import token_at
from shared.domain.kv import TransferOutcome
from shared.domain.route import PolicySpec
from shared.explain import explain
from tests.gateway.cluster import make_job, tokens_of
from tests.services.control_plane import until
from tests.services.live_suite import LiveSuite, live_suite, pipelines

PROMPT, ANSWER, QUESTION = 640, 320, 32
HELD = 896  # in whole blocks of 64 tokens; the last token of an answer is not computed
PREFILL: dict[str, Any] = {"emulated_prefill_s_per_token": 0.001}  # computing the answer would take 0.3 s
FULL = PolicySpec("full")  # else the decode instance would compute the few new tokens
FIRST = [*range(5, 5 + PROMPT)]
ANSWERED = [token_at(PROMPT + at) for at in range(ANSWER)]
SECOND = [*FIRST, *ANSWERED, *range(2000, 2000 + QUESTION)]


async def first_turn(suite: LiveSuite, gateway: Pipeline) -> None:
    """Scheduler and gateway have learned to look at prefixes, and what the decode instance has."""
    placer = suite.schedulers[0].state.scheduler.placer
    job, steps = make_job(FIRST, ANSWER)
    await gateway.run(job)
    assert tokens_of(steps) == ANSWERED
    next_turn, _ = make_job(SECOND, 8)
    await until(
        lambda: placer.decider.prefixes.held_tokens("d0", next_turn.prefix) >= HELD, "the scheduler knows what d0 holds"
    )


async def test_the_answer_before_is_pulled_from_the_decode_instance(tmp_path: Path) -> None:
    async with live_suite(tmp_path, schedulers=1, **PREFILL) as suite:
        await suite.change({"split": FULL})
        with pipelines(suite) as (gateway,):
            await first_turn(suite, gateway)
            job, steps = make_job(SECOND, 8)
            await gateway.run(job)
            assert len(tokens_of(steps)) == 8
            (placement,) = [each for each in job.timeline.decisions if each.kind == "placement"]
            figures = next(reason.figures for reason in placement.reasons if "pull_from" in reason.figures)
            assert (placement.chosen, figures["pull_from"]) == ("p0", "d0")
            assert figures["pull_tokens"] == HELD - PROMPT
            pulled = job.timeline.transfers[0]
            assert (pulled.outcome, pulled.tokens) == (TransferOutcome.PULLED, HELD - PROMPT)
            assert job.reused.tokens == HELD
            told = " ".join(sentence.text for sentence in explain(job.timeline).steps)
            assert "it pulls 256 tokens of it from d0" in told


async def test_without_pulls_the_answer_before_is_computed(tmp_path: Path) -> None:
    async with live_suite(tmp_path, schedulers=1, **PREFILL) as suite:
        await suite.change({"placement": PolicySpec("adaptive", {"pull": False}), "split": FULL})
        with pipelines(suite) as (gateway,):
            await first_turn(suite, gateway)
            job, _ = make_job(SECOND, 8)
            await gateway.run(job)
            assert len(job.timeline.transfers) == 1  # the hand-over
            assert job.reused.tokens == PROMPT
