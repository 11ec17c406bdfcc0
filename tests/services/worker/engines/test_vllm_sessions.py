"""KV that a real engine keeps for sessions: it survives other requests within its budget, and none waits for it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from services.worker.engines.vllm_sessions import KeptSessions
from tests.services.worker.engines.own_engine import found_by
from tests.services.worker.engines.sessions_run import BLOCK, PROMPT

RUN = "tests.services.worker.engines.sessions_run"
IDLE = {"sessions": 0, "kept": 0, "preemptions": 0}


def idle(said: dict[str, int], **more: int) -> dict[str, int]:
    """What an idle engine says: what is kept counts as free."""
    return {**IDLE, "free": said["total"], "total": said["total"], **more}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sessions_are_kept_within_their_budget_and_yield(tmp_path: Path) -> None:
    found = found_by(RUN, tmp_path, 0.5)
    blocks = found["blocks"]
    # A prompt of 10 blocks and an answer of 34 tokens, of which the last one is not computed: 11 whole blocks.
    after = found["after pressure"]
    assert after == idle(after, sessions=1, kept=11, yielded=0)
    assert found["plain again"] == 0, "the pressure was enough to evict what is not kept"
    assert found["next turn"] == 11 * BLOCK

    budget = found["budget"]
    assert budget.pop("budget") == blocks // 2
    assert 3 * PROMPT // BLOCK <= blocks // 2 < 4 * PROMPT // BLOCK
    assert budget == idle(budget, sessions=3, kept=3 * PROMPT // BLOCK, yielded=0), "the oldest one had to leave"

    assert found["needed"]["before"]["sessions"] == 3
    assert found["needed"]["after"] == idle(after, yielded=3), "no request was preempted for them"
    assert found["together"], "no request waited for them"
    assert found["over"] == idle(after, yielded=3), "the time to keep it is over"


@pytest.mark.parametrize(("keep_s", "share"), [(0.0, 0.5), (30.0, 0.0)])
def test_without_time_or_budget_vllm_stays_as_it_is(keep_s: float, share: float) -> None:
    config = SimpleNamespace(has_mamba_layers=False)
    cache = SimpleNamespace(block_pool=SimpleNamespace(num_gpu_blocks=80), enable_caching=True, kv_cache_config=config)
    before = dict(vars(cache))
    kept = KeptSessions(SimpleNamespace(kv_cache_manager=cache, requests={"r": object()}), keep_s, share)
    kept.watch("r", "s")
    kept.advance()
    assert (kept.budget, len(kept), kept.unused, vars(cache)) == (0, 0, 0, before)
