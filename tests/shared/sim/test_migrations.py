"""Migrations of running decodes in the simulator: when their KV arrives, what they wait for, and for which causes."""

from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar

import numpy as np
import pytest

from shared.cost.network import Link
from shared.domain.instance import Role
from shared.domain.job import JobView, Slo
from shared.domain.rates import Rates, StepForm, StepRates
from shared.policy.dispatch import Choice
from shared.policy.index import ClusterIndex, InstanceIds
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult
from shared.sim.spec import EngineLimits, Flip, InstanceSpec, Loss, RunSpec, with_words
from shared.sim.workload import Workload
from tests.shared.sim.clusters import LastByName, Linear, check, instance, policies, workload

TOKEN_S = 0.011  # a step with one decode
FIRST_S = 0.120  # a prompt of 100 tokens computed (110 ms) and sent (10 ms): the decode begins
LAST = RunSpec(policies=policies(dispatch=LastByName()))  # decodes begin on the last instance


def rates(token_s: float = 0.01) -> Rates:
    """Of `Linear`, with that base."""
    form = StepForm(token_s, token_s=0.001, sequence_s=0.001)
    return Rates(step=StepRates(form, form, form))


def cluster(*decodes: str, kv_tokens: int = 16_000) -> list[InstanceSpec]:
    nodes = [instance("p", Role.PREFILL), *(instance(name, Role.DECODE, kv_tokens=kv_tokens) for name in decodes)]
    return [replace(node, rates=rates()) for node in nodes]


def both(work: Workload, specs: list[InstanceSpec], run: RunSpec) -> tuple[SimResult, SimResult]:
    """With migrations and without."""
    results = simulate(work, specs, run), simulate(work, specs, replace(run, migration=False))
    assert results[1].migrations == 0
    for result in results:
        check(result, work, gaps=not run.losses)
    return results


def test_a_decode_leaves_when_its_kv_is_there_and_waits_for_the_rest_alone() -> None:
    """The flip comes in the 81st step. 181 tokens of KV then take 18.1 ms, in which the 83rd step begins. With that the
    decode leaves, and two tokens take 0.2 ms.
    """
    work = workload((0.0, 100, 1000))
    run = replace(LAST, flips=(Flip("d1", FIRST_S + 80.4 * TOKEN_S),))
    moved, stayed = both(work, cluster("d0", "d1"), run)
    assert stayed.outcomes.last_token_s[0] == pytest.approx(FIRST_S + 999 * TOKEN_S)
    assert moved.migrations == 1
    assert moved.outcomes.last_token_s[0] == pytest.approx(FIRST_S + 999 * TOKEN_S + 0.0002, abs=5e-6)
    assert moved.kv_bytes == pytest.approx(100.0 * (100 + 181 + 2))
    assert moved.instances[2].role_s["decode"] == pytest.approx(FIRST_S + 83 * TOKEN_S + 0.006, abs=5e-6)
    assert [use.decode_tokens for use in moved.instances] == [0, 999 - 83, 83]
    assert moved.outcomes.decode_instance.tolist() == [1]
    assert moved.outcomes.attempts.tolist() == [1]
    assert (moved.outcomes.prefill_instance.tolist(), moved.outcomes.split_tokens.tolist()) == ([0], [100])


def test_its_gap_is_measured() -> None:
    """A link of 10 kB/s: 10 ms a token. Four copies are made, of 190 tokens (1.9 s, in which 172 or 173 tokens come),
    and so on; more than 64 are then missing still.
    """
    work = workload((0.0, 100, 2000))
    specs = [replace(node, link=Link(1e4, 0.0, 1.0)) for node in cluster("d0", "d1")]
    run = replace(LAST, flips=(Flip("d1", 2.0),))
    moved, stayed = both(work, specs, run)
    late_s = moved.outcomes.last_token_s[0] - stayed.outcomes.last_token_s[0]
    assert late_s > 0.64
    assert moved.outcomes.longest_gap_s[0] == pytest.approx(late_s + TOKEN_S, rel=1e-4)


def test_a_drain_ends_long_before_the_answers() -> None:
    work = workload(*((0.0, 100, 1000) for _ in range(12)))
    run = replace(LAST, flips=(Flip("d2", 5.0),))
    moved, stayed = both(work, cluster("d0", "d1", "d2"), run)
    assert moved.migrations == 12
    assert moved.instances[3].role_s["decode"] < 6.0  # 12 times some 400 tokens of 0.1 ms
    assert stayed.instances[3].role_s["decode"] > 20.0
    assert np.bincount(moved.outcomes.decode_instance).tolist() != [0, 0, 0, 12]
    assert moved.outcomes.longest_gap_s.max() < 0.4  # none waits for the copies of all others


def test_before_the_memory_is_full_some_leave_and_none_is_preempted() -> None:
    work = workload((0.0, 100, 200), (0.0, 100, 200))
    specs = [*cluster("d0"), replace(instance("d1", Role.DECODE, kv_tokens=480), rates=rates())]
    moved, stayed = both(work, specs, replace(LAST, moves=0))
    assert stayed.outcomes.preemptions.sum() == 1
    assert moved.outcomes.preemptions.sum() == 0
    assert moved.migrations == 1
    assert sorted(moved.outcomes.decode_instance) == [1, 2]
    assert moved.outcomes.last_token_s.max() < stayed.outcomes.last_token_s.max()


def test_a_decode_leaves_a_slow_instance_for_a_clearly_faster_one() -> None:
    slow = replace(instance("slow", Role.DECODE, Linear(base_s=0.1)), rates=rates(0.1))
    work = workload((0.0, 100, 300))
    for target_s, count in ((0.05, 1), (0.2, 0)):
        run = replace(LAST, slo=Slo("default", 2.0, target_s))
        moved, stayed = both(work, [*cluster("fast"), slow], run)
        assert moved.migrations == count
        assert (moved.outcomes.tpot_s[0] < 0.25 * stayed.outcomes.tpot_s[0]) == bool(count)


@dataclass(frozen=True)
class Keep:
    """The prefill instance computes all prompts and keeps so many tokens of each answer."""

    tokens: int
    name: ClassVar[str] = "keep"

    def choose(self, job: JobView, index: ClusterIndex, exclude: InstanceIds, now: float, rng: Random) -> Choice:
        return Choice(index.prefill.views[0], keep_tokens=self.tokens)


@pytest.mark.parametrize(("keep_tokens", "kept"), [(1000, 299), (299, 299), (100, 116)])
def test_a_prefill_instance_keeps_the_first_tokens_of_an_answer(keep_tokens: int, kept: int) -> None:
    """It looks each 0.25 s. After 1.25 s it has decoded 113 tokens; three more come while their KV is copied."""
    work, run = workload((0.0, 100, 300)), RunSpec(policies=policies(placement=Keep(keep_tokens)))
    result = simulate(work, cluster("d0"), run)
    check(result, work)
    assert [use.decode_tokens for use in result.instances] == [kept, 299 - kept]
    assert result.migrations == (kept < 299)
    assert (result.kv_bytes > 0) == (kept < 299)
    assert result.outcomes.first_token_s[0] == pytest.approx(0.110)
    assert result.outcomes.last_token_s[0] == pytest.approx(0.110 + 299 * TOKEN_S, abs=0.002)


def test_kept_answers_leave_when_prompts_come() -> None:
    work = workload((0.0, 100, 1000), *((2.0 + number / 10, 100, 1) for number in range(200)))
    result = simulate(work, cluster("d0"), RunSpec(policies=policies(placement=Keep(2000))))
    check(result, work)
    assert result.migrations == 1
    assert 0 < result.instances[0].decode_tokens < 900


def test_without_another_instance_all_stay() -> None:
    work = workload((0.0, 100, 400), (0.0, 100, 400))
    run = replace(LAST, flips=(Flip("d0", 1.0),), slo=Slo("default", 2.0, 0.001))
    moved, stayed = both(work, cluster("d0", kv_tokens=600), run)
    assert moved.migrations == 0
    assert moved.outcomes.last_token_s.tolist() == stayed.outcomes.last_token_s.tolist()


@pytest.mark.parametrize(("lost", "at_s", "attempts"), [("d0", 1.02, 1), ("d0", 1.0331, 2), ("d1", 1.02, 2)])
def test_losses_on_the_way(lost: str, at_s: float, attempts: int) -> None:
    """The target while the copy is on the way, and then the rest; the source while the copy is on the way."""
    work = workload((0.0, 100, 1000))
    run = replace(LAST, flips=(Flip("d1", FIRST_S + 80.4 * TOKEN_S),), losses=(Loss(lost, at_s, 2.0),))
    result = simulate(work, cluster("d0", "d1"), run)
    check(result, work, gaps=False)
    assert result.outcomes.attempts.tolist() == [attempts]


@pytest.mark.parametrize("seed", range(3))
def test_macro_steps_give_what_stepping_gives(seed: int) -> None:
    rng = np.random.default_rng(seed)
    work = Workload("drawn", np.cumsum(rng.exponential(0.1, 60)), rng.integers(50, 400, 60), rng.integers(50, 300, 60))
    model = Linear(context_s=1.37e-6)
    specs = [instance("p", Role.PREFILL, model)]
    specs += [
        instance(f"d{at}", Role.DECODE, model, kv_tokens=tokens) for at, tokens in enumerate((9_000, 9_000, 3_000))
    ]
    specs = [replace(spec, rates=rates()) for spec in specs]
    run = RunSpec(slo=Slo("default", 2.0, 0.03), flips=(Flip("d1", 3.0217), Flip("d1", 6.0713)))
    macro, steps = (simulate(work, specs, replace(run, stepwise=stepwise)) for stepwise in (False, True))
    check(macro, work)
    assert macro.migrations == steps.migrations > 2
    assert macro.outcomes.decode_instance.tolist() == steps.outcomes.decode_instance.tolist()
    assert macro.outcomes.last_token_s.tolist() == pytest.approx(steps.outcomes.last_token_s.tolist())


def test_answers_of_migrated_decodes_are_kept_for_the_next_turn() -> None:
    """The prompt is two blocks of 64 tokens, the answer fills eight, and the next turn repeats both at the target."""
    limits = EngineLimits(batched_tokens=1024, sequences=64, prefix_cache=True)
    specs = [replace(instance(f"d{at}", Role.DECODE, limits=limits), rates=rates()) for at in range(2)]
    ids = tuple(range(10))
    work = replace(
        workload((0.0, 128, 520), (20.0, 641, 2)),
        prefixes=(ids[:2], ids),
        prefix_block_tokens=64,
        answers=(ids[2:], ()),
    )
    result = simulate(work, specs, with_words(RunSpec(flips=(Flip("d0", 1.0004),)), "adaptive"))
    check(result, work)
    assert result.migrations == 1
    computed = sum(use.prefill_tokens for use in result.instances)
    assert computed == 128 + 1
