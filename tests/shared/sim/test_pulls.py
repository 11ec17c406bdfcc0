"""Pulls of prefixes in the simulator: when they arrive, what they cost the holder, and what happens where they fail."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shared.cost.network import Link
from shared.domain.instance import Role
from shared.domain.job import JobView
from shared.domain.kv import EXPORT_SHARE
from shared.errors import InvalidRequest
from shared.policy.dispatch import Choice
from shared.policy.estimate import Pull
from shared.policy.index import ClusterIndex
from shared.policy.prefix_pull import GATHER_BYTES_S
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult
from shared.sim.spec import EngineLimits, InstanceSpec, Loss, RunSpec, with_words
from shared.sim.workload import Workload, conversations
from tests.shared.sim.clusters import Linear, check, drawn, instance, policies, several, workload

LIMITS = EngineLimits(batched_tokens=256, sequences=64, prefix_cache=True)
IDS = tuple(range(10))  # of 64 tokens: 640


class Told:
    """Each request where `at` says, with the pull that `pulls` says: its holder and tokens."""

    name = "told"
    uses_prefixes = True

    def __init__(self, at: Mapping[str, str], pulls: Mapping[str, tuple[str, int]]) -> None:
        self._at, self._pulls = at, pulls

    def choose(self, job: JobView, index: ClusterIndex, *_: object) -> Choice | None:
        views = {view.instance_id: view for view in (*index.prefill.views, *index.decode.views)}
        chosen = views.get(self._at[job.job_id])
        if chosen is None:
            return None
        found = self._pulls.get(job.job_id)
        pull = Pull(views[found[0]], found[1], found[1], 0.0, 0.0) if found is not None and found[0] in views else None
        estimate: Any = SimpleNamespace(
            pull=pull, prefill=None, decode=None, lead_steps=0, ttft_s=0.0, hold_s=0.0, estimated=None
        )
        return Choice(chosen, estimate=estimate)


def cluster(*names: str, role: Role = Role.PREFILL) -> list[InstanceSpec]:
    nodes = [instance(name, role, limits=LIMITS) for name in names]
    return [*nodes, instance("d", Role.DECODE, kv_tokens=200_000, limits=LIMITS)] if role is Role.PREFILL else nodes


def told(
    work: Workload, specs: list[InstanceSpec], at: str, pulls: Mapping[str, tuple[str, int]], **more: Any
) -> SimResult:
    """at: instances of the requests, in order."""
    placement = Told({str(row): name for row, name in enumerate(at.split())}, pulls)
    result = simulate(work, specs, RunSpec(policies=policies(placement=placement), **more))
    check(result, work, gaps=not more.get("losses"))
    return result


def with_prefixes(*requests: tuple[float, int, int], ids: tuple[int, ...] = IDS) -> Workload:
    return replace(workload(*requests), prefixes=(ids,) * len(requests), prefix_block_tokens=64)


def test_a_pulled_prefix_takes_its_time_on_the_wire() -> None:
    """640 tokens of 100 bytes at 1 MB/s, then 60 tokens in one step; and the decode instance imports as ever."""
    work = with_prefixes((0.0, 640, 2), (10.0, 700, 2))
    result = told(work, cluster("p", "q"), "p q", {"1": ("p", 640)})
    assert result.outcomes.ttft_s[1] == pytest.approx(0.064 + 0.010 + 0.060, abs=1e-5)
    assert (result.pulls, result.pulled_tokens) == (1, 640)
    assert [use.prefill_tokens for use in result.instances] == [640, 60, 0]
    assert result.kv_bytes == pytest.approx(100.0 * (640 + 60 + 640))  # to d, what it lacks; and to q
    again = with_prefixes((0.0, 640, 2), (10.0, 700, 2), (20.0, 700, 2))
    result = told(again, cluster("p", "q"), "p q q", {"1": ("p", 640)})
    assert result.outcomes.ttft_s[2] == pytest.approx(0.070)  # q and p now hold it


def test_a_pull_runs_while_the_request_waits() -> None:
    """Before it q computes 512 tokens, in steps of 266 ms from 9.9 s on."""
    work = replace(with_prefixes((0.0, 640, 2), (9.9, 512, 2), (10.0, 700, 2)), prefixes=(IDS, (), IDS))
    result = told(work, cluster("p", "q"), "p q q", {"2": ("p", 640)})
    assert result.outcomes.ttft_s[2] == pytest.approx(9.9 + 2 * 0.266 - 10.0 + 0.070)


def test_others_go_ahead_of_a_request_whose_prefix_comes() -> None:
    work = replace(with_prefixes((0.0, 640, 2), (10.0, 700, 2), (10.001, 100, 2)), prefixes=(IDS, IDS, ()))
    result = told(work, cluster("p", "q"), "p q q", {"1": ("p", 640)})
    assert result.outcomes.ttft_s[2] == pytest.approx(0.110)
    assert result.outcomes.ttft_s[1] == pytest.approx(0.111 + 0.070)  # the step under way ends first


def test_an_instance_pulls_what_it_lacks() -> None:
    """q holds four blocks and pulls the other six."""
    work = replace(with_prefixes((0.0, 640, 2), (5.0, 256, 2), (10.0, 700, 2)), prefixes=(IDS, IDS[:4], IDS))
    result = told(work, cluster("p", "q"), "p q q", {"2": ("p", 640)})
    assert result.pulled_tokens == 384
    assert result.outcomes.ttft_s[2] == pytest.approx(0.0384 + 0.070, abs=1e-5)


@pytest.mark.parametrize(("held", "seconds"), [(0, 0.030 + 0.700), (5, 0.032 + 0.020 + 0.380)])
def test_what_the_holder_has_evicted_is_computed(held: int, seconds: float) -> None:
    """Placement believes that p holds ten blocks; it holds none, or five."""
    work = replace(
        with_prefixes((0.0, 640, 2), (10.0, 700, 2)), prefixes=(IDS[:held] + tuple(range(90, 100 - held)), IDS)
    )
    result = told(work, cluster("p", "q"), "p q", {"1": ("p", 640)})
    assert result.outcomes.ttft_s[1] == pytest.approx(seconds, abs=1e-5)
    assert (result.pulls, result.pulled_tokens) == (bool(held), 64 * held)


@pytest.mark.parametrize(("lost", "at_s"), [("p", 10.03), ("q", 10.03), ("q", 10.08)])
def test_a_pull_whose_holder_or_puller_dies(lost: str, at_s: float) -> None:
    """Without the holder the prompt is computed. Without the puller the request starts anew, on d, which has imported
    the first one's KV.
    """
    work = with_prefixes((0.0, 640, 2), (10.0, 700, 2))
    losses = (Loss(lost, at_s, at_s + 1.0),)
    result = told(work, cluster("p", "q"), "p q", {"1": ("p", 640)}, losses=losses)
    after_s = 0.064 + 0.730 if lost == "p" else at_s - 10.0 + 0.070
    assert result.outcomes.ttft_s[1] == pytest.approx(after_s, abs=1e-4)


def test_where_all_instances_serve_whole_requests_they_pull_too() -> None:
    work = with_prefixes((0.0, 640, 2), (10.0, 700, 2))
    result = told(work, cluster("a", "b", role=Role.DECODE), "a b", {"1": ("a", 640)})
    assert result.outcomes.ttft_s[1] == pytest.approx(0.064 + 0.070, abs=1e-5)
    assert [use.prefill_tokens for use in result.instances] == [640, 60]


def test_a_whole_prompt_but_its_last_token_is_pulled() -> None:
    work = with_prefixes((0.0, 640, 2), (10.0, 641, 2))
    for role, step_s in ((Role.PREFILL, 0.011), (Role.DECODE, 0.011)):
        result = told(work, cluster("a", "b", role=role), "a b", {"1": ("a", 640)})
        assert result.outcomes.ttft_s[1] == pytest.approx(0.064 + step_s, abs=1e-5)


def test_a_pull_waits_for_the_end_of_the_holders_step_and_takes_a_share_of_its_time() -> None:
    """KV of 1 MB a token: 640 tokens are gathered in 32 ms of the holder's time, a fifth of it while it decodes."""
    link = Link(1e12, 0.0, 1.0)
    specs = [replace(spec, kv_bytes_per_token=1e6, link=link) for spec in cluster("a", "b", role=Role.DECODE)]
    gather_s = 640 * 1e6 / GATHER_BYTES_S
    work = replace(with_prefixes((0.0, 640, 2), (5.0, 64, 1_000), (10.0, 700, 2)), prefixes=(IDS, (), IDS))
    alone = told(work, specs, "a a b", {})
    pulls = told(work, specs, "a a b", {"2": ("a", 640)})
    longer_s = pulls.outcomes.last_token_s[1] - alone.outcomes.last_token_s[1]
    assert longer_s == pytest.approx(gather_s)
    begins_s = 10.0 + (5.0 + 0.074 - 10.0) % 0.011  # the end of its step
    assert pulls.outcomes.first_token_s[2] == pytest.approx(begins_s + gather_s / EXPORT_SHARE + 0.070, abs=1e-3)
    gap_s = float(pulls.outcomes.longest_gap_s[1])
    assert gap_s == pytest.approx(0.011 / (1.0 - EXPORT_SHARE), abs=1e-4)


# Chats, under `adaptive`.

WITHOUT = "placement=adaptive:pull=false+split=adaptive+dispatch=adaptive"


def chats(count: int = 120, per_s: float = 3.0) -> Workload:
    made = conversations(count, seed=3, per_s=per_s)
    return replace(made, prompt_tokens=np.minimum(made.prompt_tokens, 12_000))


def adaptive(work: Workload, words: str = "adaptive", **more: Any) -> SimResult:
    fast = Linear(base_s=0.005, prefill_s=1e-4, decode_s=1e-4)
    specs = several(2, 2, model=fast, kv_tokens=60_000, limits=replace(LIMITS, batched_tokens=1_024))
    specs = [replace(spec, link=Link(1e8, 1e-4, 1.0)) for spec in specs]
    return simulate(work, specs, with_words(RunSpec(**more), words))


def same(one: SimResult, other: SimResult) -> bool:
    return all(
        np.allclose(getattr(one.outcomes, name), getattr(other.outcomes, name), rtol=0, atol=1e-6)
        for name in ("first_token_s", "last_token_s", "prefill_instance", "decode_instance")
    )


def test_single_steps_give_the_same_result() -> None:
    work = chats()
    glides, steps = adaptive(work), adaptive(work, stepwise=True)
    check(glides, work)
    assert glides.pulls == steps.pulls > 0
    assert same(glides, steps)


def test_chats_find_more_with_pulls_than_without() -> None:
    work = chats()
    with_pulls, without = adaptive(work), adaptive(work, WITHOUT)
    assert without.pulls == 0
    computed = [sum(use.prefill_tokens for use in result.instances) for result in (with_pulls, without)]
    assert computed[0] < computed[1]


def test_without_prefixes_nothing_changes() -> None:
    work = drawn(200, seed=5)
    assert same(adaptive(work), adaptive(work, WITHOUT))


@pytest.mark.parametrize("known", [True, False])
def test_a_decode_instance_keeps_the_answer(known: bool) -> None:
    """The answer's first 128 tokens fill two blocks; its last token is never computed."""
    ids = (*IDS, 20, 21, 22)
    work = replace(
        workload((0.0, 640, 129), (10.0, 800, 2)),
        prefixes=(IDS, ids),
        prefix_block_tokens=64,
        answers=((20, 21), ()) if known else None,
    )
    result = told(work, cluster("a", role=Role.DECODE), "a a", {})
    assert [use.prefill_tokens for use in result.instances] == [640 + 800 - (768 if known else 640)]


def test_answers_need_prompts() -> None:
    with pytest.raises(InvalidRequest, match="answers of 1 requests, not 2 with prefixes"):
        replace(workload((0.0, 640, 129), (10.0, 800, 2)), answers=((1,),))
