"""What a simulated placement knows of prefix caches: what they hold, as old as the broadcasts."""

from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.instance import InstanceView, Role
from shared.domain.job import JobView, Slo
from shared.domain.rates import Rates, StepForm, StepRates
from shared.policy import registry
from shared.policy.dispatch import Choice
from shared.policy.index import ClusterIndex, prefill_rate
from shared.policy.prefix_index import PrefixIndex
from shared.policy.saved_tokens import saved_tokens
from shared.policy.split import SplitChoice
from shared.sim.cluster import simulate
from shared.sim.engine import EngineEvents
from shared.sim.events import EventLoop
from shared.sim.fleet import Fleet, PrefixFeed
from shared.sim.instance import SimInstance
from shared.sim.memory import KvMemory
from shared.sim.metrics import attainment
from shared.sim.outcomes import SimResult
from shared.sim.request import Leg, SimRequest
from shared.sim.spec import EngineLimits, InstanceSpec, Loss, RunSpec
from shared.sim.traces import read_trace
from shared.sim.wires import Wires
from shared.sim.workload import Workload
from tests.shared.sim.clusters import Linear, check, instance, policies, workload

LIMITS = EngineLimits(batched_tokens=256, sequences=64, prefix_cache=True)
PROMPTS = ((1, 2, 3), (1, 2, 4, 5), (6, 7), (1, 8))


def cluster(count: int, **more: object) -> list[InstanceSpec]:
    names = [f"p{at}" for at in range(count)]
    return [instance(name, Role.PREFILL, limits=LIMITS, **more) for name in names] + [  # type: ignore[arg-type]
        instance("d", Role.DECODE, kv_tokens=200_000, limits=LIMITS)
    ]


def test_caches_begin_with_what_came_before_the_run() -> None:
    """Of three prompts in the memory of two, the first is forgotten; a next turn finds its prompt and answer."""
    before = replace(
        workload((0.0, 400, 101), (1.0, 400, 101), (2.0, 400, 101)),
        prefixes=tuple(tuple(range(at, at + 4)) for at in (0, 10, 20)),
        prefix_block_tokens=100,
        answers=((4,), (14,), (24,)),
    )
    turn = replace(workload((0.0, 600, 2)), prefixes=((20, 21, 22, 23, 24, 25),), prefix_block_tokens=100)
    forgotten = replace(turn, prefixes=((0, 1, 2, 3, 4, 5),))
    node = [instance("n", Role.DECODE, kv_tokens=1_120, limits=LIMITS)]
    run = RunSpec(policies=policies(placement=ByPrefix()))
    computed = [simulate(work, node, run, before=before).instances[0].prefill_tokens for work in (turn, forgotten)]
    assert computed == [100, 600]
    assert simulate(turn, node, run).instances[0].prefill_tokens == 600


def test_what_came_before_is_divided_among_instances_and_chats_stay_together() -> None:
    turns = [(0, 1), (10, 11), (0, 1, 2), (10, 11, 12), (20,), (30,)]
    before = replace(
        workload(*((float(at), 100 * len(ids), 1) for at, ids in enumerate(turns))),
        prefixes=tuple(turns),
        prefix_block_tokens=100,
    )
    specs = [instance(name, Role.DECODE, limits=LIMITS) for name in "ab"]
    fleet = Fleet(
        specs, RunSpec(policies=policies(placement=ByPrefix())), EventLoop(), cast(EngineEvents, None), 100, Random(1)
    )
    fleet.fill_caches(before)
    found = [[one.engines[0].memory.matched_tokens(ids) for ids in turns] for one in fleet.instances]
    assert found == [[200, 0, 300, 0, 100, 0], [0, 200, 0, 300, 0, 100]]
    fleet.index(0.0)
    index = fleet.index(0.0).prefixes
    assert [index.held_tokens(name, (10, 11, 12)) for name in "ab"] == [0, 300]


def make_leg(prefix: tuple[int, ...], tokens: int) -> Leg:
    request = cast(SimRequest, SimpleNamespace(job=JobView("j", tokens, 8), split=0))
    return Leg(request, tokens=tokens, output_left=8, prefix=prefix)


class ByPrefix:
    """The instance that would finish the prompt first, less what it holds of it."""

    name = "by_prefix"
    uses_prefixes = True

    def choose(self, job: JobView, index: ClusterIndex, *_: object) -> Choice | None:
        waits_s = {instance_id: key_s for keys in index.backlog.classes() for key_s, _, instance_id in keys}

        def score(view: InstanceView) -> float:
            fresh = job.prompt_tokens - saved_tokens(index.prefixes, view, job)
            return waits_s[view.instance_id] + (prefill_rate(view)[0] or 1.0) * fresh

        best = min(index.candidates.views, key=score, default=None)
        return Choice(best) if best is not None else None


def run(work: Workload, specs: list[InstanceSpec], name: str = "by_prefix", **more: object) -> SimResult:
    chosen = policies(placement=ByPrefix() if name == "by_prefix" else registry.placement(name))
    return simulate(work, specs, RunSpec(policies=chosen, **more))  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(PROMPTS), st.integers(0, 9)), max_size=30))
def test_what_is_told_of_a_cache_is_what_it_matches(steps: list[tuple[bool, tuple[int, ...], int]]) -> None:
    memory = KvMemory(EngineLimits(prefix_cache=True), kv_tokens=16 * 99, prefix_block_tokens=16)
    watched, told = memory.watch_cache(), set[int]()
    assert watched is not None
    for keep, prompt, room in steps:
        leg = make_leg(prompt, 16 * len(prompt) + 1)
        if keep and memory.start(leg, leg.tokens):
            memory.keep_prefix(leg)
        memory.release(leg)
        other = make_leg((), 16 * (memory.free - room))
        assert memory.allocate(other, other.tokens)
        memory.trim_cache()
        memory.release(other)
        added, removed, _ = watched.take_changes()
        told = (told - set(removed)) | set(added)
        for one in PROMPTS:
            known = next((at for at, block in enumerate(one) if block not in told), len(one))
            found = make_leg(one, 16 * len(one) + 1)
            assert memory.start(found, found.tokens)
            assert known == found.cached_tokens // 16
            memory.release(found)


def test_a_prompt_goes_where_its_beginning_is() -> None:
    """Four conversations on four instances, each with a second turn: every one of them finds its first."""
    firsts = [(float(at) / 100, 640, 2) for at in range(4)]
    seconds = [(10.0 + at, 700, 2) for at in range(4)]
    ids = [tuple(range(10 * at, 10 * at + 10)) for at in range(4)]
    prefixes = (*ids, *((*ids[at], 99 + at) for at in (2, 0, 3, 1)))
    work = replace(workload(*firsts, *seconds), prefixes=prefixes, prefix_block_tokens=64)
    result = run(work, cluster(4))
    check(result, work)
    rows = result.outcomes.prefill_instance
    assert sorted(rows[:4]) == [0, 1, 2, 3]
    assert rows[4:].tolist() == [rows[2], rows[0], rows[3], rows[1]]
    assert result.outcomes.ttft_s[4:] == pytest.approx([0.010 + 0.060] * 4)
    assert sum(use.prefill_tokens for use in result.instances) == 4 * 640 + 4 * 60


def test_a_long_backlog_is_no_place_for_a_short_prefix() -> None:
    work = replace(
        workload((0.0, 64, 2), (5.0, 6400, 2), *((5.01, 128, 2) for _ in range(4))),
        prefixes=((1,), (1, *range(50, 149)), *((1,) for _ in range(4))),
        prefix_block_tokens=64,
    )
    rows = run(work, cluster(2)).outcomes.prefill_instance
    assert rows[1] == rows[0]
    assert (rows[2:] == 1 - rows[0]).all()


def turns(*requests: tuple[float, int, int]) -> Workload:
    """Requests with one prompt."""
    return replace(workload(*requests), prefixes=(tuple(range(10)),) * len(requests), prefix_block_tokens=64)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_decode_instance_keeps_what_came_and_has_only_the_rest_sent(streaming: bool) -> None:
    work = turns((0.0, 640, 4), (10.0, 640, 4), (20.0, 700, 4))
    result = run(work, cluster(1), streaming=streaming)
    check(result, work)
    assert result.kv_bytes == pytest.approx(100.0 * (640 + 60))
    assert sum(use.prefill_tokens for use in result.instances) == 640 + 1 + 60


def test_of_a_split_prompt_each_side_keeps_what_it_has() -> None:
    """A quarter of 640 tokens is 160, two whole blocks; the decode instance has all of it in the end."""
    work = turns((0.0, 640, 4), (10.0, 640, 4), (20.0, 640, 4))
    chosen = policies(placement=registry.placement("adaptive"), split=registry.split("fraction", {"fraction": 0.25}))
    result = simulate(work, cluster(1), RunSpec(policies=chosen))
    check(result, work)
    prefill, decode = result.instances
    assert prefill.prefill_tokens == 160 + 2 * (160 - 128)
    assert decode.prefill_tokens == 480
    assert result.kv_bytes == pytest.approx(100.0 * 160)


class FirstAlone:
    """All of the first prompt elsewhere, none of the others."""

    name = "first"
    needs_decode = True
    max_prefills = 0

    def choose(self, job: JobView, *_: object) -> SplitChoice:
        return SplitChoice(job.prompt_tokens if job.job_id == "0" else 0, ())


def test_a_job_that_decodes_where_its_kv_came_before_computes_the_rest_alone() -> None:
    work = turns((0.0, 640, 4), (10.0, 640, 4))
    sent = run(work.head(1), cluster(1))
    both = simulate(work, cluster(1), RunSpec(policies=policies(split=FirstAlone())))
    assert both.kv_bytes == sent.kv_bytes
    assert [use.prefill_tokens for use in both.instances] == [640, 1]


def test_what_died_is_forgotten_and_told_anew() -> None:
    times = [(0.0, 640, 2), (10.0, 640, 2), (20.0, 640, 2), (30.0, 640, 2)]
    prefixes = (tuple(range(10)),) * 4
    work = replace(workload(*times), prefixes=prefixes, prefix_block_tokens=64)
    alone = run(work, cluster(1), losses=(Loss("p0", 5.0, 6.0), Loss("p0", 25.0)), patience_s=1.0)
    assert alone.outcomes.ttft_s[1] == pytest.approx(0.010 * 3 + 0.640)
    assert alone.outcomes.ttft_s[2] == pytest.approx(0.010 + 0.001)


@pytest.mark.parametrize(
    ("broadcast_s", "fresh", "found"), [(0.1, False, True), (60.0, False, False), (60.0, True, True)]
)
def test_knowledge_is_as_old_as_the_broadcast_unless_it_is_to_be_perfect(
    broadcast_s: float, fresh: bool, found: bool
) -> None:
    """By loads of 60 s ago the other instance has less to do; only what the first one holds speaks for that."""
    work = replace(
        workload((0.0, 640, 2), (0.5, 600, 2), (10.0, 640, 2)),
        prefixes=(tuple(range(10)), (77,), tuple(range(10))),
        prefix_block_tokens=64,
    )
    rows = run(work, cluster(2), broadcast_s=broadcast_s, fresh_prefixes=fresh).outcomes
    assert rows.prefill_instance[1] != rows.prefill_instance[0]
    assert (rows.prefill_instance[2] == rows.prefill_instance[0]) is np.bool_(found)
    assert (rows.ttft_s[2] < 0.1) is np.bool_(found)


def test_each_life_of_an_instance_is_an_account_of_its_own() -> None:
    spec = cluster(1)[0]
    wires = Wires([spec.instance_id], [""], [spec.link])
    one = SimInstance(0, spec, RunSpec(), EventLoop(), cast(EngineEvents, SimpleNamespace(admitted=None)), 64, wires)
    news = PrefixFeed([one], 64)

    def keep(*prompt: int) -> list[int]:
        one.engines[0].memory.keep_prefix(make_leg(prompt, 64 * len(prompt)))
        news.update()
        return [news.index.held_tokens("p0", ids) // 64 for ids in ((1, 2, 3), (1, 2, 4))]

    assert keep(1, 2) == [2, 2]
    assert keep(1, 2, 4) == [2, 3]
    one.die(1.0)
    news.update()
    assert news.index.held_tokens("p0", (1, 2, 3)) == 0
    one.revive(2.0)
    news.update()  # as before any decision that could send a prompt there
    assert keep(1) == [1, 1]


def test_an_instance_of_several_lanes_tells_nothing() -> None:
    work = replace(workload((0.0, 640, 2), (5.0, 640, 2)), prefixes=((1,), (1,)), prefix_block_tokens=64)
    check(run(work, cluster(2, lanes=2)), work)


def test_nobody_is_told_where_no_policy_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[PrefixIndex] = []
    monkeypatch.setattr(PrefixFeed, "update", lambda self: told.append(self.index))
    work = replace(workload((0.0, 64, 2)), prefixes=((1,),), prefix_block_tokens=64)
    run(work, cluster(1), "least_load")
    assert not told
    run(work, cluster(1), "by_prefix")
    assert told


def test_on_conversations_it_gets_nearly_all_that_perfect_knowledge_would(traces: Path) -> None:
    work = read_trace(traces / "mooncake" / "conversation_trace.jsonl").head(1500).at_rate(4.0)
    model = instance("m", Role.PREFILL, limits=EngineLimits(batched_tokens=2048, prefix_cache=True)).model
    specs = [
        instance(name, role, replace(model, prefill_s=5e-5, decode_s=1e-5), kv_tokens=400_000, limits=limits)  # type: ignore[type-var]
        for name, role, limits in (
            *((f"p{at}", Role.PREFILL, EngineLimits(batched_tokens=2048, prefix_cache=True)) for at in range(6)),
            *((f"d{at}", Role.DECODE, EngineLimits(batched_tokens=2048)) for at in range(6)),
        )
    ]
    specs = [replace(spec, kv_bytes_per_token=0.01) for spec in specs]

    def hits(result: SimResult) -> int:
        assert result.outcomes.completed.all()
        return int(work.prompt_tokens.sum()) - sum(use.prefill_tokens for use in result.instances)

    plain, known, perfect = (
        run(work, specs, name, fresh_prefixes=fresh)
        for name, fresh in (("least_load", False), ("by_prefix", False), ("by_prefix", True))
    )
    assert hits(known) > 0.95 * hits(perfect)
    assert hits(known) > 1.5 * hits(plain)
    assert np.mean(known.outcomes.ttft_s) < np.mean(plain.outcomes.ttft_s)


SIZES = st.lists(st.tuples(st.sampled_from(PROMPTS), st.integers(0, 3), st.booleans()), min_size=1, max_size=12)


@given(SIZES)
def test_blocks_that_requests_share_are_held_once_and_all_are_free_in_the_end(
    sizes: list[tuple[tuple[int, ...], int, bool]],
) -> None:
    """Ids of 32 tokens in blocks of 16. Each request begins when those before it have their prompts."""
    memory = KvMemory(EngineLimits(prefix_cache=True), kv_tokens=4096, prefix_block_tokens=32)
    legs, seen = [], set[int]()
    for prompt, own, ends in sizes:
        tokens = 32 * len(prompt) + 16 * own + 1
        leg = make_leg(prompt, tokens)
        assert memory.start(leg, tokens)
        leg.computed_tokens = tokens - 1
        memory.keep_prefix(leg)
        legs.append((leg, prompt, own))
        if ends:
            gone, *_ = legs.pop(0)
            memory.release(gone)
        seen = {at for _, prompt, _ in legs for at in prompt}
        assert memory.total - memory.free == 2 * len(seen) + sum(own + 1 for _, _, own in legs)
    for leg, *_ in legs:
        memory.release(leg)
    assert memory.free == memory.total


@pytest.mark.parametrize("coupled", [True, False])
def test_chats_that_share_a_system_prompt_are_not_held_back_while_there_is_memory(coupled: bool) -> None:
    """Each has 2,048 tokens of it and some 200 of its own, 30 and more at a time: together they would come to four
    times the memory, and its blocks are held once.
    """
    rng = np.random.default_rng(1)
    count = 400
    own, answers = rng.integers(50, 400, count), rng.integers(100, 500, count)
    ids = tuple((*range(32), *(10_000 * at + 100 + i for i in range(own[at] // 64))) for at in range(count))
    arrival_s = np.cumsum(rng.exponential(0.07, count))
    work = Workload("chats", arrival_s, 2048 + own, answers, prefixes=ids, prefix_block_tokens=64)
    form = StepForm(0.01, 5e-5, 0.0, 1e-4)
    rates, model = Rates(step=StepRates(form, form, form)), Linear(0.01, 5e-5, 1e-4)
    limits = EngineLimits(prefix_cache=True)
    specs = [
        instance(name, Role.DECODE, model, kv_tokens=16_384, limits=limits, rates=rates)  # type: ignore[arg-type]
        for name in ("d0", "d1")
    ]
    if not coupled:
        specs.append(instance("p", Role.PREFILL, model, kv_tokens=100_000, limits=limits, rates=rates))  # type: ignore[arg-type]
    chosen = policies(
        placement=registry.placement("adaptive"),
        split=registry.split("adaptive"),
        dispatch=registry.dispatch("adaptive"),
    )
    result = simulate(work, specs, RunSpec(policies=chosen, slo=Slo()))
    check(result, work)
    assert attainment(result.outcomes, Slo()).every == 1.0
    assert float(np.quantile(result.outcomes.ttft_s, 0.9)) < 0.5
    decodes = [use for use in result.instances if use.instance_id != "p"]
    assert all(use.peak_kv_share > 0.95 for use in decodes), "its memory is used"
    assert [use.preemptions for use in decodes] == [0, 0]
