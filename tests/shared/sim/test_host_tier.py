"""Host tiers and kept sessions in the simulator: what stays, what loading takes, and what placement learns of it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.instance import Role
from shared.domain.job import JobView
from shared.domain.prompt import PrefixDelta
from shared.policy.dispatch import Choice
from shared.policy.index import ClusterIndex
from shared.policy.prefix_index import PrefixIndex
from shared.sim.cluster import simulate
from shared.sim.memory import KvMemory
from shared.sim.request import Leg, SimRequest
from shared.sim.spec import EngineLimits, HostTier, InstanceSpec, RunSpec, with_words
from shared.sim.workload import Workload, conversations
from tests.shared.sim.clusters import check, instance, workload

TOKEN_S = 1e-4
LIMITS = EngineLimits(batched_tokens=1024, sequences=64, prefix_cache=True)
PROMPTS = ((1, 2, 3, 4, 5), (1, 2, 6, 7), (8, 9, 10), (1, 11))


def tier(tokens: int) -> HostTier:
    return HostTier(tokens, TOKEN_S, double_tokens=1000)


def node(name: str = "n", kv_tokens: int = 1_024, **limits: Any) -> InstanceSpec:
    return instance(name, Role.DECODE, kv_tokens=kv_tokens, limits=replace(LIMITS, **limits))


def make_leg(prefix: tuple[int, ...], tokens: int) -> Leg:
    job = JobView("j", tokens, 1, prefix=prefix)
    return Leg(SimRequest(0, job, 1, prefix), tokens=tokens, output_left=1, prefix=prefix)


@given(st.lists(st.tuples(st.sampled_from(PROMPTS), st.integers(0, 9)), max_size=30), st.integers(0, 5))
def test_what_is_told_of_both_tiers_is_what_they_hold(steps: list[tuple[tuple[int, ...], int]], slots: int) -> None:
    memory = KvMemory(EngineLimits(prefix_cache=True, host=tier(16 * slots)), kv_tokens=16 * 20, prefix_block_tokens=16)
    watched, index = memory.watch_cache(), PrefixIndex(block_tokens=16)
    assert watched is not None
    for number, (prompt, room) in enumerate(steps):
        leg = make_leg(prompt, 16 * len(prompt) + 1)
        assert memory.start(leg, leg.tokens)
        memory.keep_prefix(leg)
        memory.release(leg)
        other = make_leg((), 16 * (memory.free - room))  # leaves so many blocks to the cache
        assert memory.allocate(other, other.tokens)
        memory.trim_cache()
        memory.release(other)
        added, removed, hosted = watched.take_changes()
        assert index.apply("n", PrefixDelta(1, number, added, removed, not number, hosted))
        fresh = PrefixIndex(block_tokens=16)
        snapshot = watched.snapshot()
        fresh.apply("n", PrefixDelta(1, 0, snapshot.added, [], True, snapshot.hosted))
        for one in PROMPTS:
            held = 16 * len(memory.cached(one))
            loaded = round(memory.export_s(one, 0, held) / TOKEN_S)
            for known in (index, fresh):
                assert known.held_tokens("n", one) == held
                assert known.hosted_tokens("n", one, held) == loaded
    assert memory.free == memory.total


def three(limits: dict[str, Any]) -> float:
    """TTFT of a prompt that an instance has computed before another one took its memory."""
    ids = (tuple(range(10)), tuple(range(100, 112)), tuple(range(10)))
    work = replace(workload((0.0, 700, 2), (10.0, 770, 2), (20.0, 700, 2)), prefixes=ids, prefix_block_tokens=64)
    result = simulate(work, [node(**limits)], RunSpec())
    check(result, work)
    return float(result.outcomes.ttft_s[2])


def test_a_prompt_that_left_the_cache_is_loaded_in_its_first_step() -> None:
    """640 of 700 tokens are loaded, and as many of the other prompt are copied for the room that they take."""
    without = three({})
    assert without == pytest.approx(0.010 + (700 - 192) * 1e-3, abs=0.01)  # three blocks were still there
    found = three({"host": tier(4_096)})
    copied = round((found - 0.010 - 0.060) / TOKEN_S)
    assert 448 <= copied <= 2 * 640
    assert copied % 64 == 0
    assert three({"host": tier(0)}) == without


def test_steps_that_are_taken_together_give_the_same_result() -> None:
    limits: dict[str, Any] = {"host": tier(20_000), "session_keep_s": 5.0, "session_share": 0.3}
    nodes, work = [node(name, 40_000, **limits) for name in "ab"], conversations(200, seed=3, per_s=0.05)
    one, other = (simulate(work, nodes, with_words(RunSpec(stepwise=each), "adaptive")) for each in (False, True))
    assert np.allclose(one.outcomes.last_token_s, other.outcomes.last_token_s)
    assert [use.prefill_tokens for use in one.instances] == [use.prefill_tokens for use in other.instances]


def test_a_tier_saves_tokens_and_more_where_placement_knows_it() -> None:
    def computed(limits: dict[str, Any], words: str = "adaptive") -> int:
        work = conversations(400, seed=3, per_s=0.1)
        nodes = [node(name, 40_000, **limits) for name in "abcd"]
        run = with_words(RunSpec(sessions=False), words)
        return sum(use.prefill_tokens for use in simulate(work, nodes, run).instances)

    unaware = "placement=adaptive:host_tier=false+split=adaptive+dispatch=adaptive"
    host = {"host": tier(400_000)}
    assert computed(host) < computed(host, unaware) < computed({})
    assert computed({}, unaware) == computed({})  # without tiers there is nothing to ignore


def turns(session: str, **limits: Any) -> int:
    """Tokens that the second turn of a chat computes, between whose turns other prompts took the memory."""
    others = [tuple(range(start, start + 4)) for start in (100, 200, 300, 400)]
    ids = (tuple(range(10)), *others, tuple(range(11)))
    rows = [(0.0, 640, 2), (10.0, 256, 2), (11.0, 256, 2), (12.0, 256, 2), (13.0, 256, 2), (20.0, 705, 2)]
    work = replace(workload(*rows), prefixes=ids, prefix_block_tokens=64)
    work = replace(work, sessions=(session, "", "", "", "", session))
    result = simulate(work, [node(**limits)], RunSpec())
    check(result, work)
    return result.instances[0].prefill_tokens - 640 - 4 * 256


def test_kv_of_a_session_is_kept_over_its_pause_within_time_and_budget() -> None:
    assert turns("", session_keep_s=30.0, session_share=0.9) == 705
    assert turns("s", session_keep_s=30.0, session_share=0.9) == 65
    assert turns("s", session_keep_s=30.0, session_share=0.3) == 705 - 4 * 64
    assert turns("s", session_keep_s=5.0, session_share=0.9) == 705
    assert turns("s", session_keep_s=30.0, session_share=0.0) == 705


def test_requests_get_the_kept_memory_when_they_need_it() -> None:
    ids = ((1, 2, 3, 4), (5, 6, 7, 8), tuple(range(10, 26)))
    work = replace(workload((0.0, 256, 2), (5.0, 256, 2), (10.0, 1_000, 2)), prefixes=ids, prefix_block_tokens=64)
    work = replace(work, sessions=("s", "t", ""))
    result = simulate(work, [node(session_keep_s=60.0, session_share=0.9)], RunSpec())
    check(result, work)
    assert result.outcomes.ttft_s[2] == pytest.approx(1.010)  # at once


class Asking:
    """Takes the only instance, and notes the sessions."""

    name, uses_prefixes = "asking", True

    def __init__(self) -> None:
        self.sessions: list[str] = []

    def choose(self, job: JobView, index: ClusterIndex, *_: object) -> Choice:
        self.sessions.append(job.session)
        return Choice(index.decode.views[0])


@pytest.mark.parametrize("sessions", [True, False])
def test_requests_carry_the_sessions_of_their_workload(sessions: bool) -> None:
    work: Workload = replace(workload((0.0, 64, 2), (1.0, 64, 2)), sessions=("s", ""))
    asking = Asking()
    run = RunSpec(sessions=sessions)
    simulate(
        work, [node()], replace(run, policies=type(run.policies)(asking, run.policies.split, run.policies.dispatch))
    )
    assert asking.sessions == (["s", ""] if sessions else ["", ""])
