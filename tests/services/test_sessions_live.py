"""The turns of a session on emulated instances, over real sockets: one scheduler knows them, and a hint prefetches."""

from pathlib import Path

from prometheus_client import Counter

from gateway.pipeline import Pipeline
from gateway.sessions import SessionBook, Warmer, session_key
from shared.domain.route import PolicySpec
from shared.explain import explain
from tests.gateway.cluster import make_job, tokens_of
from tests.services.control_plane import until
from tests.services.live_suite import LiveSuite, live_suite, pipelines
from tests.services.test_pulls_live import ANSWER, ANSWERED, FIRST, HELD, PREFILL, SECOND

KEY = session_key("", "user", "chat")


async def first_turn(suite: LiveSuite, gateway: Pipeline, book: SessionBook) -> str:
    """Where its answer was computed, once its scheduler knows that it has ended."""
    warm_up, _ = make_job([7, 8, 9], 2)  # the gateway learns that the policy looks at prefixes
    await gateway.run(warm_up)
    job, steps = make_job(FIRST, ANSWER, session=KEY)
    await gateway.run(job)
    assert tokens_of(steps) == ANSWERED
    book.ended(job)
    await gateway._reporter.flush()
    deciders = [app.state.scheduler.placer.decider for app in suite.schedulers]
    await until(lambda: sum(len(each.ledger.sessions) for each in deciders) == 1, "one scheduler has the session")
    return job.decode_instance


async def test_one_scheduler_knows_the_turns_of_a_session(tmp_path: Path) -> None:
    async with live_suite(tmp_path) as suite:
        await suite.start_instance("d1", "decode")
        await until(lambda: suite.known(3), "all three are ready", timeout_s=20)
        with pipelines(suite, shared=True) as (gateway,):
            last = await first_turn(suite, gateway, SessionBook(1, 1 << 20))
            for end in (3000, 4000, 5000):
                job, _ = make_job([*SECOND, end], 8, session=KEY)
                await gateway.run(job)
                (placement,) = [each for each in job.timeline.decisions if each.kind == "placement"]
                figures = next(one.figures for one in placement.reasons if one.what.startswith("session:"))
                assert last in str(figures["last"])
                told = " ".join(sentence.text for sentence in explain(job.timeline).steps)
                assert "its session's last turn was computed by" in told
                await gateway._reporter.flush()
                last = job.decode_instance


async def test_a_hint_prefetches_the_answer_to_the_prefill_instance(tmp_path: Path) -> None:
    book, counted = SessionBook(10, 1 << 20), Counter("warms", "", ["outcome"], registry=None)
    async with live_suite(tmp_path, schedulers=1, **PREFILL) as suite:
        await suite.change({"split": PolicySpec("full")})
        with pipelines(suite) as (gateway,):
            await first_turn(suite, gateway, book)
            prefixes = suite.schedulers[0].state.scheduler.placer.decider.prefixes
            next_turn, _ = make_job(SECOND, 8, session=KEY)
            for name, tokens in (("d0", HELD), ("p0", HELD)):
                await until(lambda n=name, t=tokens: prefixes.held_tokens(n, next_turn.prefix) >= t, f"{name} holds it")  # type: ignore[misc]
                if name == "d0":
                    warmer = Warmer(gateway._settings, book, gateway._clients, gateway._schedulers, counted)
                    warmer.start("", "chat")
            await until(lambda: counted.labels("pulled")._value.get() == 1, "the hint was followed")
            await gateway.run(next_turn)
            assert len(next_turn.timeline.transfers) == 1, "the hand-over alone: nothing is left to pull"
            assert next_turn.reused.tokens == HELD
            await warmer.close()
