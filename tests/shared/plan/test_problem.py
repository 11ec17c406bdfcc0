"""Requests of a run and of the estimate's sample, where the workload names prefixes and where it does not."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from shared.plan.problem import Problem, Requests, Sample, crowd, repeated
from shared.sim.workload import Workload, conversations, synthetic
from tests.shared.plan.problems import inventory, problem

CHATS = conversations(1200, seed=2)
ROOM = 10**9  # tokens: caches of any size


def asked(workload: Workload = CHATS, host_kv_bytes: int = 0, **more: object) -> Problem:
    stock = inventory(("a", "A100-SXM-80", 2))
    pools = tuple(replace(pool, host_kv_bytes=host_kv_bytes) for pool in stock.pools)
    return replace(problem(replace(stock, pools=pools), longest_tokens=16_384, **more), workload=workload)


def saved_share(found: Requests, tokens: int = ROOM) -> float:
    return float(found.oracle_tokens(tokens).sum() / found.workload.prompt_tokens.sum())


def between_turns(workload: Workload) -> float:
    """Requests of others between two turns of a chat, on average."""
    assert workload.sessions is not None
    last: dict[str, int] = {}
    found = []
    for at, name in enumerate(workload.sessions):
        if name in last:
            found.append(at - last[name])
        last[name] = at
    return float(np.mean(found))


def test_requests_without_prefixes_are_the_first_of_the_workload() -> None:
    work = synthetic(100, 500, 50, prompt_cv=0.5, seed=1)
    for other in (asked(work), replace(asked(), workload=replace(CHATS, name="c"), prefix_cache=False)):
        found = other.requests(250, 7.0)
        assert found.before is None
        assert found.workload.prefixes is found.workload.sessions is None
        size = len(other.workload)
        assert found.workload.prompt_tokens.tolist() == other.workload.prompt_tokens[np.arange(250) % size].tolist()
        assert (other.sample.held == 0).all()


def test_a_repetition_finds_nothing_of_the_one_before() -> None:
    """Otherwise each request after the first pass would find its whole prompt."""
    few = CHATS.head(60)
    once, often = crowd(few, 60, 0.0, ROOM), crowd(few, 600, 0.0, ROOM)
    assert often.before is None
    assert saved_share(often) == pytest.approx(saved_share(once))
    prefixes, sessions = often.workload.prefixes, often.workload.sessions
    assert prefixes is not None
    assert sessions is not None
    assert not set(prefixes[0]) & {block for ids in prefixes[60:] for block in ids}
    assert max(Counter(sessions).values()) == max(Counter(few.sessions or ()).values())
    assert repeated(few, 600).prefixes is not None  # the plain repetition would


def test_at_a_higher_rate_there_are_more_chats_at_a_time_not_faster_ones() -> None:
    slow, fast = (crowd(CHATS, times * 400, times * CHATS.rate, ROOM) for times in (1, 3))  # as many seconds of both
    assert between_turns(fast.workload) == pytest.approx(3 * between_turns(slow.workload), rel=0.25)
    size = 300_000  # tokens; a chat's are forgotten while more of others come between its turns
    assert saved_share(fast, size) < saved_share(slow, size) - 0.1


def test_what_came_before_fills_the_caches() -> None:
    found = crowd(CHATS, 300, CHATS.rate, ROOM)
    assert found.before is not None
    empty = Requests(found.workload)
    assert saved_share(found) > saved_share(empty) + 0.1
    every = crowd(CHATS, len(CHATS), CHATS.rate, ROOM)  # the whole workload: nothing is left for before
    assert every.before is None


def test_caches_remember_the_last_ones_and_as_much_as_they_hold() -> None:
    whole, part = (crowd(CHATS, 300, CHATS.rate, tokens).before for tokens in (ROOM, 200_000))
    assert whole is not None
    assert part is not None
    assert part.prefixes == (whole.prefixes or ())[-len(part) :]
    assert len({block for ids in part.prefixes or () for block in ids}) * 64 < 220_000
    seen: set[int] = set()
    for ids in reversed(whole.prefixes or ()):
        assert set(ids) - seen  # each is the last one that uses some block
        seen |= set(ids)


def test_the_sample_knows_what_caches_and_host_memory_hold() -> None:
    device, tiered = asked().sample, asked(host_kv_bytes=10**11).sample
    share = device.held.sum() / device.prompts.sum()
    assert 0.5 < share < 0.95
    assert (device.hosted == 0).all()
    crowded = asked(cache_rate=40 * CHATS.rate), asked(cache_rate=40 * CHATS.rate, host_kv_bytes=10**11)
    held, kept = (one.sample.held.sum() / one.sample.prompts.sum() for one in crowded)
    assert held < share
    assert kept > held
    assert tiered.hosted.sum() <= tiered.held.sum()
    assert (crowded[1].sample.hosted <= crowded[1].sample.held).all()
    assert crowded[1].sample.hosted.sum() > 0


def test_host_memory_is_counted_for_each_accelerator() -> None:
    without, with_it = asked().cache_tokens, asked(host_kv_bytes=13_107_200_000).cache_tokens
    assert without[0] == without[1] == with_it[0]
    assert with_it[1] - with_it[0] == 2 * 100_000  # Llama-3-8B: 131,072 bytes a token


def test_a_share_of_each_prompt_may_be_held() -> None:
    sample = Sample.from_workload(synthetic(100, 1000, 50)).with_held_share(0.3)
    assert set((sample.held / sample.prompts).round(3).tolist()) == {0.3}
