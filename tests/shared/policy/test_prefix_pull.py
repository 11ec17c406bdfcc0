"""Whether a prefix is computed, pulled from an instance that holds it, or the job goes there."""

from random import Random

import msgspec
import pytest

from shared.domain.cluster import ClusterDelta
from shared.domain.instance import InstanceState, InstanceView
from shared.domain.job import JobView
from shared.domain.prompt import PrefixDelta
from shared.domain.rates import LinkRate
from shared.domain.route import Route
from shared.policy.adaptive import Adaptive, AdaptiveDispatch
from shared.policy.decider import Decider
from shared.policy.estimate import DecodeSide, JobContext, PrefillSide, Pull, local, slo_cost
from shared.policy.index import ClusterIndex
from shared.policy.ledger import Assignment, assignments
from shared.policy.output_lengths import Lengths
from shared.policy.placement import Policies, place
from shared.policy.prefix_index import PrefixIndex
from shared.policy.prefix_pull import (
    EXPORT_SHARE,
    GATHER_BYTES_S,
    LEAST_TOKENS,
    ROUND_TRIPS_S,
    SIDES,
    UNKNOWN_BYTES_S,
    Holder,
    holders_of,
    offer_pulls,
    pull_of,
)
from shared.policy.split import FractionSplit, FullSplit, Split
from tests.shared.policy.views import ALL, TARGETS, asked, busy, d, p, rates, view

BLOCKS = tuple(range(1, 43))  # of 64 tokens: 2688
PROMPT = 2_700
WITHOUT = Policies(Adaptive(pull=False), ALL.split, ALL.dispatch)
KV_BYTES = p().info.kv_bytes_per_token


def long(**more: object) -> JobView:
    return asked(PROMPT, prefix=BLOCKS, **more)


def context(job: JobView) -> JobContext:
    own = Lengths(150.0, 140.0)
    return JobContext(job, own, own, others=TARGETS)


def linked(link: LinkRate) -> InstanceView:
    """A prefill instance with that link."""
    plain = p()
    return InstanceView(
        msgspec.structs.replace(plain.info, rates=rates(link=link)), plain.role, plain.state, plain.load
    )


def cluster(held: dict[str, int], *views: InstanceView) -> ClusterIndex:
    """held: by instance the blocks of the prompt that it holds."""
    prefixes = PrefixIndex()
    for instance_id, blocks in held.items():
        prefixes.replace(instance_id, 1, BLOCKS[:blocks])
    return ClusterIndex(view(*views), rng=Random(0), prefixes=prefixes)


def routed(index: ClusterIndex, job: JobView, policies: Policies = ALL, exclude: frozenset[str] = frozenset()) -> Route:
    return place(job, index, policies, 0.0, Random(0), exclude).route


def pulled(route: Route) -> tuple[str, int] | None:
    return (route.pull.holder.instance_id, route.pull.tokens) if route.pull is not None else None


def figures(route: Route) -> dict[str, float | str]:
    return next(one.figures for one in route.reasons if one.what == "placement:adaptive")


# What a pull takes, by hand.


def test_a_pull_from_an_idle_instance_takes_its_bytes() -> None:
    wire_bytes = 640 * KV_BYTES
    assert Holder(d(), 640).ready_s(p(), 640) == pytest.approx(ROUND_TRIPS_S + wire_bytes / 10e9 + 1e-3)
    slow = d(rates=rates(link=LinkRate(1e6, 1e-3)))
    assert Holder(slow, 640).ready_s(p(), 640) == pytest.approx(ROUND_TRIPS_S + wire_bytes / 1e6 + 1e-3)
    to = linked(LinkRate(10e9, 1e-3, slow={"d": 5e5}))
    assert Holder(d(), 640).ready_s(to, 640) == pytest.approx(ROUND_TRIPS_S + wire_bytes / 5e5 + 1e-3)


def test_a_link_without_a_measurement_counts_as_an_ordinary_one() -> None:
    unmeasured = {"rates": rates(link=None)}
    found = Holder(d("a", **unmeasured), 640).ready_s(d("b", **unmeasured), 640)
    assert found == pytest.approx(ROUND_TRIPS_S + 640 * KV_BYTES / UNKNOWN_BYTES_S)


def test_a_pull_begins_behind_a_step_and_behind_what_the_links_carry() -> None:
    decoding = Holder(d(staged_bytes=4_000_000_000, **busy(10)), 640)
    step_s = 0.02 + 10 * 1e-4 + 10 * 600 * 2e-7
    moved_s = 640 * KV_BYTES / 10e9 + 1e-3
    assert decoding.ready_s(p(), 640) == pytest.approx(ROUND_TRIPS_S + step_s + 0.4 + moved_s)
    inbound = p(inbound_bytes=6_000_000_000)
    assert decoding.ready_s(inbound, 640) == pytest.approx(ROUND_TRIPS_S + step_s + 0.6 + moved_s)
    queued = Holder(p("q", queued_prefill=3, queued_prefill_tokens=3_000), 640)  # a step of a whole chunk
    assert queued.ready_s(p(), 640) == pytest.approx(ROUND_TRIPS_S + 0.02 + 512 * (1e-4 + 1e-9 * 256) + moved_s)


def test_a_holder_that_decodes_gathers_in_a_share_of_its_time() -> None:
    """At a link that is faster than that, the gathering sets the pace."""
    fast = rates(link=LinkRate(1e15))
    to = linked(LinkRate(1e15))
    tokens = 1_000_000
    engine_s = tokens * KV_BYTES / GATHER_BYTES_S
    idle, decoding = Holder(d(rates=fast), tokens), Holder(d(rates=fast, **busy(10)), tokens)
    step_s = 0.02 + 10 * 1e-4 + 10 * 600 * 2e-7
    assert idle.ready_s(to, tokens) == pytest.approx(ROUND_TRIPS_S + engine_s)
    assert decoding.ready_s(to, tokens) == pytest.approx(ROUND_TRIPS_S + step_s + engine_s / EXPORT_SHARE)
    assert idle.others(tokens, context(long())) == 0.0
    longer_s = step_s + engine_s / 150.0
    expected = 10 * (slo_cost(longer_s / 0.1) - slo_cost(step_s / 0.1))
    assert decoding.others(tokens, context(long())) == pytest.approx(expected) != 0.0


def test_prompts_that_wait_at_the_holder_are_delayed() -> None:
    tokens, queue = 1_000_000, {"queued_prefill": 4, "queued_prefill_tokens": 2_000}
    holder = Holder(p("q", **queue), tokens)
    wait_s = 0.02 + 2_000 * (1e-4 + 1e-9 * 1_000)
    engine_s = tokens * KV_BYTES / GATHER_BYTES_S
    expected = 4 * (slo_cost((wait_s + engine_s) / 2.0) - slo_cost(wait_s / 2.0))
    assert holder.others(tokens, context(long())) == pytest.approx(expected)


def pull_to(side_ready_s: float, tokens: int = 2_688, others: float = 0.0) -> Pull:
    return Pull(d(), tokens, tokens, side_ready_s, others)


def test_a_pull_runs_while_the_job_waits_at_a_prefill_instance() -> None:
    side = PrefillSide(p(queued_prefill=2, queued_prefill_tokens=4_000))
    early, late = (side.part(PROMPT, TARGETS, pull_to(seconds)) for seconds in (0.01, side.wait_s + 1.0))
    assert early.ready_s == pytest.approx(side.wait_s + side.own_s(PROMPT, 2_688))
    assert late.ready_s == pytest.approx(side.wait_s + 1.0 + side.own_s(PROMPT, 2_688))
    assert early.others == late.others > 0.0  # those behind it do not wait for its pull
    assert side.own_s(PROMPT, 2_688) == pytest.approx(0.02 + 12 * (1e-4 + 1e-9 * (2_688 + 6)))
    assert side.part(PROMPT, TARGETS, pull_to(0.01, others=0.5)).others == pytest.approx(early.others + 0.5)


def test_a_pull_runs_while_the_job_waits_at_a_decode_instance() -> None:
    side = DecodeSide(d(queued_prefill=2, queued_prefill_tokens=4_000), context(long()))
    own_s = 0.02 + 12 * (1e-4 + 1e-9 * (2_688 + 6))
    early, late = (side.terms(0, pull=pull_to(seconds)) for seconds in (0.01, side.wait_s + 1.0))
    assert early.rest_s == pytest.approx(side.wait_s + own_s)
    assert late.rest_s == pytest.approx(side.wait_s + 1.0 + own_s)
    assert side.terms(0, pull=pull_to(0.01, others=0.5)).others == pytest.approx(early.others + 0.5)
    assert local(side, early).pull == early.pull is not None


# Who pulls, and from whom.


def test_the_longest_run_counts_and_of_equal_ones_who_could_send_it_first() -> None:
    found = cluster({"a": 20, "b": 42, "c": 42, "e": 30}, p("a"), p("b", staged_bytes=10**9), d("c"), d("e"), p("f"))
    held = dict(found.prefixes.holders(BLOCKS, 6))
    assert [one.view.instance_id for one in holders_of(found, held, ())] == ["c", "b", "e"]
    assert [one.view.instance_id for one in holders_of(found, held, {"c"})] == ["b", "e", "a"]
    chosen = pull_of(holders_of(found, held, ()), PrefillSide(p("f")), context(long()))
    assert chosen is not None
    assert (chosen.holder.instance_id, chosen.tokens, chosen.lacks) == ("c", 2_688, 2_688)
    beside = pull_of(holders_of(found, held, ()), PrefillSide(p("a"), 1_280), context(long()))
    assert beside is not None
    assert (beside.tokens, beside.lacks) == (2_688, 1_408)
    assert pull_of(holders_of(found, held, ()), PrefillSide(p("b"), 2_688), context(long())) is None


def test_nothing_is_pulled_for_a_few_tokens_or_over_a_difference_of_precision() -> None:
    found = cluster({"a": 42}, d("a", precision="fp8"), p("f"))
    held = {"a": 2_688}
    holders = holders_of(found, held, ())
    assert pull_of(holders, PrefillSide(p("f")), context(long())) is None
    assert pull_of(holders, PrefillSide(p("f", precision="fp8")), context(long())) is not None
    alike = holders_of(cluster({"a": 42}, d("a"), p("f")), held, ())
    few = 2_688 - LEAST_TOKENS + 16
    assert pull_of(alike, PrefillSide(p("f"), few), context(long())) is None
    assert pull_of(alike, PrefillSide(p("f"), few - 16), context(long())) is not None


def test_only_the_few_sides_that_would_have_the_prompt_first_pull() -> None:
    names = [f"{at}" for at in range(5)]
    queues = [{"queued_prefill": 1 + at, "queued_prefill_tokens": 1_000 * (1 + at)} for at in range(5)]
    sides = [PrefillSide(p(name, **queue)) for name, queue in zip(names, queues, strict=True)]
    offer_pulls([Holder(d(), 2_688)], sides, context(long()))
    assert [side.instance_id for side in sides if side.pull is not None] == names[:SIDES]
    slow = [PrefillSide(p(name)) for name in names]
    offer_pulls([Holder(d(staged_bytes=10**13), 2_688)], slow, context(long()))
    assert not any(side.pull for side in slow)  # to compute it is sooner


STALLED = busy(64)
FULL = Policies(Adaptive(), FullSplit(), AdaptiveDispatch())


def test_of_the_three_ways_the_cheapest_is_taken() -> None:
    """The holder is idle: the job goes there. It is busy: the other pulls. It sends for long: the other computes."""
    held = {"q": 42}
    queue = {"queued_prefill": 30, "queued_prefill_tokens": 30_000}
    there = routed(cluster(held, p("p", queued_prefill=1, queued_prefill_tokens=2_000), p("q"), d(**STALLED)), long())
    assert there.prefill is not None
    assert (there.prefill.instance_id, there.prefill_saved, pulled(there)) == ("q", 2_688, None)
    pulls = routed(cluster(held, p("p"), p("q", **queue), d(**STALLED)), long())
    assert pulls.prefill is not None
    assert (pulls.prefill.instance_id, pulls.prefill_saved, pulled(pulls)) == ("p", 0, ("q", 2_688))
    sending = p("q", staged_bytes=10**12, **queue)
    computes = routed(cluster(held, p("p"), sending, d(**STALLED)), long())
    assert computes.prefill is not None
    assert (computes.prefill.instance_id, pulled(computes)) == ("p", None)


def test_the_reasons_say_what_was_chosen_and_why() -> None:
    queue = {"queued_prefill": 30, "queued_prefill_tokens": 30_000}
    held = {"q": 42}
    pulls = figures(routed(cluster(held, p("p"), p("q", **queue), d(**STALLED)), long()))
    assert (pulls["pull_from"], pulls["pull_tokens"]) == ("q", 2_688)
    assert float(pulls["pull_s"]) < float(pulls["compute_s"])
    own_s = 6 * 0.02 + PROMPT * (1e-4 + 1e-9 * PROMPT / 2)
    rest_s = 0.02 + 12 * (1e-4 + 1e-9 * 2_694)
    assert pulls["compute_s"] == pytest.approx(own_s - rest_s, abs=1e-4)
    computes = figures(routed(cluster(held, p("p"), p("q", staged_bytes=10**12, **queue), d(**STALLED)), long()))
    assert computes["no_pull_from"] == "q"
    assert float(computes["pull_s"]) > 100.0
    there = figures(routed(cluster(held, p("q"), d(**STALLED)), long()))
    assert there["saved_tokens"] == 2_688
    assert not {"pull_from", "no_pull_from"} & there.keys()


def test_a_prefill_instance_pulls_the_turn_before_from_the_decode_instance() -> None:
    route = routed(cluster({"d": 42, "p": 20}, p("p"), d("d", **STALLED)), long(), FULL)
    assert route.prefill is not None
    assert (route.prefill_saved, pulled(route)) == (1_280, ("d", 2_688))
    assert route.decode_saved == 2_688
    assert route.pulled_tokens == 1_408


def test_a_decode_instance_that_computes_the_whole_job_pulls() -> None:
    """Beside prefill instances, and where all instances serve whole jobs."""
    queue = {"queued_prefill": 30, "queued_prefill_tokens": 30_000}
    beside = routed(cluster({"p": 42}, p("p", **queue), d("d")), long())
    assert (beside.prefill, pulled(beside)) == (None, ("p", 2_688))
    coupled = routed(cluster({"a": 42}, d("a", **queue), d("b")), long())
    assert coupled.decode is not None
    assert (coupled.decode.instance_id, pulled(coupled)) == ("b", ("a", 2_688))


@pytest.mark.parametrize("case", ["off", "local only", "excluded", "draining", "dead", "not known"])
def test_no_pull(case: str) -> None:
    job = long(local_only=case == "local only")
    state = {"draining": InstanceState.DRAINING, "dead": InstanceState.DEAD}.get(case, InstanceState.READY)
    queue = {"queued_prefill": 30, "queued_prefill_tokens": 30_000}
    holder = d("a", **queue)
    holder = InstanceView(holder.info, holder.role, state, holder.load)
    held = {} if case == "not known" else {"a": 42}
    exclude = frozenset({"a"} if case == "excluded" else ())
    route = routed(cluster(held, holder, d("b")), job, WITHOUT if case == "off" else ALL, exclude)
    assert route.pull is None
    assert "pull_s" not in figures(route)


def test_without_pulls_and_without_prefixes_decisions_are_the_same() -> None:
    views = [p("p"), p("q", queued_prefill=3, queued_prefill_tokens=3_000), d("d", **busy(20)), d("e", 0.5)]
    for prompt in (100, 800, 3_000):
        job = asked(prompt)
        assert routed(cluster({}, *views), job) == routed(cluster({}, *views), job, WITHOUT)


@pytest.mark.parametrize("split", [FullSplit(), FractionSplit(0.5), FractionSplit(0.99)])
def test_a_part_of_the_prompt_is_longer_than_what_is_pulled_for_it(split: Split) -> None:
    policies = Policies(Adaptive(), split, AdaptiveDispatch())
    route = routed(cluster({"d": 30}, p("p"), d("d", **STALLED)), long(), policies)
    tokens = {"full": PROMPT, "fraction": split.choose(long(), p(), d(), Random(0)).tokens}[split.name]
    assert route.split == tokens
    assert pulled(route) == (("d", 1_920) if tokens > 1_920 else None)


# What a route with a pull counts.


def test_pulled_tokens_are_imported_there_and_exported_here() -> None:
    route = routed(cluster({"d": 42, "p": 20}, p("p"), d("d", **STALLED)), long(), FULL)
    assert route.prefill is not None
    assert route.split == PROMPT
    first, then, holder = assignments(long(), route, 1.0)
    assert (first.instance_id, first.prefill_tokens, first.import_tokens) == ("p", PROMPT - 2_688, 1_408)
    assert (then.instance_id, then.prefill_tokens, then.import_tokens) == ("d", 0, PROMPT - 2_688)
    assert holder == Assignment("d", 1.0, job_id="j", export_tokens=1_408)
    found = cluster({}, p("p"), d("d"))
    for one in (first, then, holder):
        found.book(one)
    there, here = found.prefill.views[0].load, found.decode.views[0].load
    assert (there.queued_prefill, there.queued_prefill_tokens, there.inbound_bytes) == (1, 12, 1_408 * KV_BYTES)
    assert (here.staged_bytes, here.decoding, here.coming) == (1_408 * KV_BYTES, 1, 1)


def test_of_a_whole_job_the_rest_is_computed_and_the_pulled_part_imported() -> None:
    queue = {"queued_prefill": 30, "queued_prefill_tokens": 30_000}
    route = routed(cluster({"a": 42, "b": 20}, d("a", **queue), d("b")), long())
    assert pulled(route) == ("a", 2_688)
    there, holder = assignments(long(), route, 1.0)
    assert (there.instance_id, there.prefill_tokens, there.import_tokens) == ("b", 12, 1_408)
    assert (there.saved_tokens, there.coming) == (1_280, False)
    assert (holder.instance_id, holder.export_tokens, holder.decode_tokens) == ("a", 1_408, 0)


def test_a_scheduler_counts_what_is_pulled_as_held() -> None:
    decider, queue = Decider(0), {"queued_prefill": 30, "queued_prefill_tokens": 30_000}
    assert decider.apply(ClusterDelta.from_view(view(d("a", **queue), d("b"))), 0.0)
    decider.apply_prefixes("a", PrefixDelta(1, 0, added=list(BLOCKS), starts=True))
    route = decider.decide(long(), (), 0.0)
    assert pulled(route) == ("a", 2_688)
    assert decider.expected(long(), route)[0] == 2_688


# Prefixes in host memory.


TOKEN_S = 2e-5  # a fifth of what a prompt token takes to compute


def tiered(side: InstanceView, token_s: float = TOKEN_S) -> InstanceView:
    known = msgspec.structs.replace(side.info.rates, host_token_s=token_s)
    return msgspec.structs.replace(side, info=msgspec.structs.replace(side.info, rates=known))


def hosting(held: dict[str, tuple[int, int]], *views: InstanceView) -> ClusterIndex:
    """held: by instance the blocks of the prompt that it holds, and of these the first ones on its accelerator."""
    prefixes = PrefixIndex()
    for instance_id, (blocks, device) in held.items():
        delta = PrefixDelta(1, 0, list(BLOCKS[:blocks]), starts=True, hosted=list(BLOCKS[device:blocks]))
        assert prefixes.apply(instance_id, delta)
    return ClusterIndex(view(*views), rng=Random(0), prefixes=prefixes)


def test_what_an_instance_loads_is_a_part_of_its_time() -> None:
    job = long()
    plain, loading = PrefillSide(p(), 2_688), PrefillSide(tiered(p()), 2_688, 1_408)
    assert loading.own_s(PROMPT) == pytest.approx(plain.own_s(PROMPT) + 1_408 * TOKEN_S)
    assert loading.own_s(1_280) == pytest.approx(plain.own_s(1_280))  # the first blocks are on the accelerator
    assert loading.own_s(2_000) == pytest.approx(plain.own_s(2_000) + 720 * TOKEN_S)
    here, there = (
        DecodeSide(d(**busy(8)), context(job), 2_688),
        DecodeSide(tiered(d(**busy(8))), context(job), 2_688, loaded=1_408),
    )
    assert there.terms(0).rest_s == pytest.approx(here.terms(0).rest_s + 1_408 * TOKEN_S)
    assert there.terms(0).others > here.terms(0).others  # the decodes there wait meanwhile
    assert there.terms(PROMPT).others > here.terms(PROMPT).others  # also where the rest is imported
    assert there.terms(PROMPT, 0) == here.terms(PROMPT, 0)  # KV of another precision: nothing of its own is of use


def test_a_holder_loads_what_it_sends() -> None:
    plain, loading = Holder(tiered(p()), 2_688), Holder(tiered(p()), 2_688, 1_408)
    assert loading.gather_s(2_688) == pytest.approx(plain.gather_s(2_688) + 1_408 * TOKEN_S)
    assert loading.gather_s(640) == pytest.approx(plain.gather_s(640) + 640 * TOKEN_S)


def test_a_prefix_in_host_memory_is_worth_less_than_one_on_the_accelerator() -> None:
    views = tiered(p("a")), tiered(p("b")), d()
    found = figures(routed(hosting({"a": (42, 42), "b": (42, 10)}, *views), long()))
    assert (found["chosen"], found["saved_tokens"]) == ("a", 2_688)
    assert "host_tokens" not in found
    found = figures(routed(hosting({"b": (42, 10)}, *views), long()))
    assert (found["chosen"], found["saved_tokens"], found["host_tokens"]) == ("b", 2_688, 2_048)
    assert found["host_load_s"] == pytest.approx(2_048 * TOKEN_S)
    slow = tiered(p("a")), tiered(p("b"), 1e-3), d()
    index = hosting({"a": (2, 2), "b": (42, 10)}, *slow)
    assert figures(routed(index, long(), WITHOUT))["chosen"] == "a"  # to compute is quicker


@pytest.mark.parametrize("seed", range(3))
def test_switched_off_or_without_host_memory_decisions_are_as_before(seed: int) -> None:
    """What lies in host memory does not count, and where nothing does, the switch makes no difference."""
    drawn = Random(seed)
    off = Policies(Adaptive(host_tier=False), ALL.split, ALL.dispatch)
    names = [f"n{number}" for number in range(9)]  # more than are looked up
    held = {name: (blocks := drawn.randrange(43), drawn.randrange(blocks + 1)) for name in names}
    device = {name: (known, known) for name, (_, known) in held.items()}
    views = [tiered((p if at % 2 else d)(name, **busy(drawn.randrange(9)))) for at, name in enumerate(names)]
    bare = [
        (p if at % 2 else d)(name, **msgspec.structs.asdict(each.load))
        for at, (name, each) in enumerate(zip(names, views, strict=True))
    ]
    routes = [
        routed(hosting(known, *nodes), long(), policies)
        for known, nodes, policies in (
            (held, views, off),
            (device, views, off),
            (device, views, ALL),
            (device, bare, ALL),
        )
    ]
    assert (
        len(
            {
                (one.prefill and one.prefill.instance_id, one.decode and one.decode.instance_id, one.split, pulled(one))
                for one in routes
            }
        )
        == 1
    )
    assert len({str(figures(one)) for one in routes}) == 1
