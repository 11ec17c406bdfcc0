"""One decision for placement, split and dispatch."""

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.domain.instance import InstanceView, Role
from shared.domain.job import JobView, LengthPrediction, Slo
from shared.domain.kv import Codec
from shared.domain.rates import LinkRate, Rates, StepForm, StepRates
from shared.domain.route import Route
from shared.policy.adaptive import Adaptive, AdaptiveDispatch, AdaptiveSplit
from shared.policy.answers import Answers, Lengths
from shared.policy.assignment import assignments
from shared.policy.dispatch import DispatchPolicy, LeastInterference
from shared.policy.estimate import DecodeSide, PrefillSide, harm, usual_wait_s
from shared.policy.index import ClusterIndex
from shared.policy.options import balanced, options
from shared.policy.placement import Policies, place
from shared.policy.prefix_index import PrefixIndex
from shared.policy.split import FractionSplit, FullSplit, NoSplit, Split
from tests.shared.policy.views import decode, index, job, prefill, view

ALL = Policies(Adaptive(), AdaptiveSplit(), AdaptiveDispatch())
TARGETS = Slo("default", ttft_s=2.0, tpot_s=0.1)


def rates(speed: float = 1.0, link: LinkRate | None = LinkRate(10e9, 1e-3)) -> Rates:
    """An instance `speed` times as fast as one with steps of 20 ms and 0.1 ms a prompt token."""
    decodes = {"sequence_s": 1e-4 / speed, "context_s": 2e-7 / speed}
    step = StepRates(
        StepForm(0.02 / speed, 1e-4 / speed, 1e-9 / speed),
        StepForm(0.02 / speed, **decodes),
        StepForm(0.02 / speed, 1e-4 / speed, 1e-9 / speed, **decodes),
    )
    return Rates(step=step, link=link)


def p(name: str = "p", speed: float = 1.0, **load: object) -> InstanceView:
    return prefill(name, rates=rates(speed), total_blocks=4000, **load)


def d(name: str = "d", speed: float = 1.0, **load: object) -> InstanceView:
    return decode(name, **{"rates": rates(speed), "total_blocks": 4000, **load})


def busy(decodes: int, context: int = 600, **more: object) -> dict[str, object]:
    return {"decoding": decodes, "running": decodes, "context_tokens": decodes * context, **more}


def asked(prompt: int = 800, **more: object) -> JobView:
    return job(prompt, 1000, slo=TARGETS, prediction=LengthPrediction(0, 100, 200, 0.9, "classifier"), **more)


def route(asked_for: JobView, *views: InstanceView, policies: Policies = ALL, seed: int = 0) -> Route:
    return place(asked_for, index(*views), policies, 0.0, Random(seed))


def way(found: Route) -> tuple[str, str, str]:
    """Prefill instance, decode instance, and how much of the prompt the first one computes."""
    names = (found.prefill.instance_id if found.prefill else "", found.decode.instance_id if found.decode else "")
    return *names, "none" if not found.split else "all" if found.split >= 800 else "part"


@pytest.mark.parametrize(
    ("case", "views", "expected"),
    [
        ("idle: no transfer, nobody disturbed", [p(), d()], ("", "d", "none")),
        ("decodes that a prompt would stall", [p(), d(**busy(64))], ("p", "d", "all")),
        ("the faster of two decode instances", [d("a"), d("b", 2.0)], ("", "b", "none")),
        ("the emptier of two", [d("a", **busy(40)), d("b")], ("", "b", "none")),
        ("a full one waits", [d("a", 2.0, **busy(64, max_seqs=64)), d("b")], ("", "b", "none")),
        ("no memory is no room", [d("a", 2.0, free_blocks=3), d("b", **busy(10))], ("", "b", "none")),
        ("whoever waits for memory is counted", [d("a", waiting_tokens=64_000), d("b", **busy(10))], ("", "b", "none")),
        (
            "a long prefill queue goes around",
            [p("p", queued_prefill_tokens=40_000, queued_prefill=40), p("q"), d(**busy(64))],
            ("q", "d", "all"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_by_example(case: str, views: list[InstanceView], expected: tuple[str, str, str]) -> None:
    assert way(route(asked(), *views)) == expected


@pytest.mark.parametrize("speed", [0.25, 1.0, 3.0])
@pytest.mark.parametrize(("queued", "queued_there"), [(0, 0), (4000, 0), (0, 4000)])
def test_the_balanced_part_keeps_both_sides_equally_long(speed: float, queued: int, queued_there: int) -> None:
    """Source: Cronus 4.2."""
    one, own = asked(3000), Lengths(150.0, 140.0)
    here = PrefillSide.of(p(speed=speed, queued_prefill_tokens=queued, queued_prefill=queued // 1000))
    there = DecodeSide.of(d(queued_prefill_tokens=queued_there, queued_prefill=queued_there // 1000), one, own, own)
    split = balanced(3000, here, there)
    if not 0 < split < 3000:
        assert abs(here.wait_s - there.wait_s) > 0.3  # one of them is through before the other can begin
        return
    assert here.part(split, TARGETS).ready_s == pytest.approx(there.terms(split).rest_s, rel=0.25)  # steps are whole


def test_a_link_that_is_full_keeps_prompts_where_they_decode() -> None:
    stalled = busy(24)
    open_link = route(asked(), p(), d(**stalled, rates=rates()))
    full = route(asked(), p(), d(**stalled, rates=rates(link=LinkRate(1e6, 1e-3)), inbound_bytes=20_000_000))
    assert way(open_link) == ("p", "d", "all")
    assert full.prefill is None


def test_where_loss_is_allowed_the_transfer_counts_as_it_will_be_coded() -> None:
    exact, to = asked(), d(**busy(64), rates=rates(link=LinkRate(5e5)))
    lossy = msgspec.structs.replace(exact, slo=msgspec.structs.replace(TARGETS, lossy_kv=Codec.INT4))
    own = Lengths(150.0, 140.0)
    raw, coded = (DecodeSide.of(to, one, own, own).transfer_s(PrefillSide.of(p()), 800)[1] for one in (exact, lossy))
    assert raw == pytest.approx(800 * p().info.kv_bytes_per_token / 5e5)
    assert raw > 1.0
    assert coded == pytest.approx(raw * 4.75 / 16)


def test_reasons_name_the_terms_and_what_was_predicted() -> None:
    figures = route(asked(), p(), d(**busy(64))).reasons[-1].figures
    terms = ("own_ttft", "own_tpot", "others_prefill", "others_link", "others_decode", "memory")
    assert figures["harm"] == pytest.approx(sum(float(figures[term]) for term in terms), abs=1e-5)
    assert float(figures["ttft_s"]) == pytest.approx(2 * 0.02 + 800 * (1e-4 + 4e-7), rel=0.02)
    after_s = 0.02 + 65 * 1e-4 + (64 * 600 + 800 + 75) * 2e-7  # the answer is 150 tokens long, half of it on average
    assert float(figures["tpot_s"]) == pytest.approx(after_s, rel=0.1)


def test_harm_is_convex_before_the_target_and_flat_beyond() -> None:
    assert harm(0.0) == harm(-1.0) == 0.0
    assert harm(1.0) == pytest.approx(0.5 + 0.1)
    assert harm(0.3) == pytest.approx(0.008 + 0.03, abs=1e-3)
    assert harm(4.0) - harm(3.8) < (harm(1.1) - harm(0.9)) / 3
    assert all(harm(x / 10) < harm(x / 10 + 0.1) for x in range(40))
    assert harm(20.0) - harm(10.0) == pytest.approx(2.0, abs=1e-3)  # later is worse, though both are missed


def test_decodes_on_their_way_count_until_they_come() -> None:
    """A burst between two broadcasts, and after one that cannot show it yet."""
    found = ClusterIndex(view(p(), d("a", 1.01, **busy(30)), d("b", **busy(30))), rng=Random(0))
    chosen = []
    for number in range(20):
        one = asked(job_id=f"{number}")
        routed = place(one, found, ALL, 0.0, Random(0))
        found.ledger.add(one, routed)
        found = ClusterIndex(found.view, found.ledger.coming, rng=Random(0), ledger=found.ledger)
        chosen.append(routed.decode.instance_id if routed.decode else "")
    assert 8 <= chosen.count("a") <= 12
    loads = [each.load for each in found.decode.views]
    assert sum(load.coming for load in loads) == 20
    assert sum(load.coming_tokens for load in loads) == 20 * 800
    assert sum(load.decoding for load in loads) == 60 + 20
    for number in range(20):
        assert found.ledger.arrived(f"{number}") is not None
        assert found.ledger.arrived(f"{number}") is None
    assert not found.ledger.coming


def test_decodes_that_come_one_by_one_are_never_all_there() -> None:
    """100 that come over 50 s, each of which stays for some 6 s: a twelfth of them decodes at a time."""
    one, usual = asked(), Lengths(150.0, 100.0)
    load = busy(104, coming=100, coming_tokens=60_000, free_blocks=0, waiting_tokens=0)

    def side(spread_s: float, **more: object) -> DecodeSide:
        return DecodeSide.of(d(max_seqs=64, **{**load, **more}), one, usual, usual, 0, spread_s=spread_s)

    stays_s = 150 * (0.02 + 64 * 1e-4 + 64 * 600 * 2e-7)
    together, apart = side(0.9 * stays_s), side(10 * stays_s)
    assert (together.running, together.over) == (64, 40)
    assert together == side(0.0)
    assert (apart.running, apart.over) == (4 + 10, 0)
    assert apart.step_s == pytest.approx(0.02 + 14 * 1e-4 + 14 * 600 * 2e-7)
    assert (together.room_s > 1.0, apart.room_s, apart.memory) == (True, 0.0, 0.0)
    assert side(10 * stays_s, coming=0).running == 64  # those that are there stay


def test_the_usual_wait_is_that_of_the_jobs_that_wait() -> None:
    idle, long = PrefillSide.of(p()), PrefillSide.of(p(queued_prefill_tokens=20_000, queued_prefill=20))
    assert usual_wait_s([]) == usual_wait_s([idle]) == 0.0
    assert usual_wait_s([idle, long]) == long.wait_s
    half = PrefillSide.of(p(queued_prefill_tokens=10_000, queued_prefill=10))
    assert usual_wait_s([half, long]) == pytest.approx((10 * half.wait_s + 20 * long.wait_s) / 30)


def test_in_a_burst_both_instances_get_their_part() -> None:
    """Nobody can be in time any more: what is left is to be through soon, and the slow one must not wait alone."""
    answers = Answers()
    for number in range(100):
        done = job(800, 1000, job_id=f"done {number}", slo=TARGETS)
        answers.begun(done)
        answers.ended(done.job_id, 150)
    found = ClusterIndex(view(p(speed=0.4), d(max_seqs=64)), rng=Random(0))
    found.ledger.answers = answers
    for number in range(120):
        one = asked(job_id=f"{number}")
        routed = place(one, found, ALL, 0.0, Random(0))
        found.ledger.add(one, routed)
        for assignment in assignments(one, routed, 0.0):
            found.book(assignment)
    slow, fast = found.prefill.views[0].load, found.decode.views[0].load
    # Of 3.5 prompts' time the slow one has 1; the fast one decodes, too.
    assert 0.2 < slow.queued_prefill_tokens / (120 * 800) < 0.6
    assert slow.queued_prefill_tokens + fast.queued_prefill_tokens == 120 * 800


def test_a_prefix_draws_the_job_to_who_holds_it_unless_that_one_is_much_busier() -> None:
    prefixes = PrefixIndex()
    blocks = tuple(range(1, 11))  # 640 tokens of the 800
    prefixes.replace("q", 1, blocks)
    one = asked(prefix=blocks)

    def chosen(*views: InstanceView) -> str:
        found = ClusterIndex(view(*views), rng=Random(0), prefixes=prefixes)
        routed = place(one, found, ALL, 0.0, Random(0))
        return routed.prefill.instance_id if routed.prefill else ""

    stalled = d(**busy(64))
    assert chosen(p("p"), p("q"), stalled) == "q"
    assert chosen(p("p"), p("q", queued_prefill_tokens=60_000, queued_prefill=60), stalled) == "p"


@pytest.mark.parametrize("split", [FullSplit(), NoSplit(), FractionSplit(0.25)])
def test_a_fixed_split_is_kept_to(split: Split) -> None:
    policies = Policies(Adaptive(), split, AdaptiveDispatch())
    tokens = {"full": 800, "none": 0, "fraction": 200}[split.name]
    for views in ([p(), d()], [p(), d(**busy(64))]):
        assert route(asked(), *views, policies=policies).split == tokens


def test_a_fixed_dispatch_is_kept_to() -> None:
    fixed: DispatchPolicy = LeastInterference()
    views = [p(), d("a", 4.0), d("b", **busy(10, heavy_decodes=0))]
    found = index(*views)
    wanted = fixed.choose(asked(), found.decode.views, (), 0.0, Random(0))
    assert wanted is not None
    routed = place(asked(), found, Policies(Adaptive(), AdaptiveSplit(), fixed), 0.0, Random(0))
    assert routed.decode == wanted.ref


def test_dispatch_and_split_alone() -> None:
    views = [d("a", **busy(60)), d("b", **busy(4)), d("c", 0.2)]
    choice = AdaptiveDispatch().choose(asked(), views, (), 0.0, Random(0))
    assert choice is not None
    assert choice.instance.instance_id == "b"
    assert AdaptiveDispatch().choose(asked(), views, ("a", "b", "c"), 0.0, Random(0)) is None
    assert AdaptiveSplit().choose(asked(), p(), d(**busy(64)), 0.0, Random(0)).tokens == 800
    assert AdaptiveSplit().choose(asked(), p(), d(), 0.0, Random(0)).tokens == 0


instances = st.builds(
    lambda number, role, speed, load, queued, free: (p if role is Role.PREFILL else d)(
        f"i{number}",
        speed,
        **busy(load if role is Role.DECODE else 0),
        queued_prefill_tokens=queued,
        queued_prefill=queued // 500,
        free_blocks=free,
        max_seqs=32,
    ),
    st.integers(0, 99),
    st.sampled_from(Role),
    st.floats(0.1, 10.0),
    st.integers(0, 60),
    st.integers(0, 50_000),
    st.integers(0, 4000),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(instances, min_size=1, max_size=40, unique_by=lambda one: one.instance_id), st.integers(1, 3000))
def test_every_choice_is_possible_and_the_same_again(views: list[InstanceView], prompt: int) -> None:
    if not any(one.role is Role.DECODE for one in views):
        return
    one = asked(prompt)
    routed = route(one, *views, seed=3)
    assert routed == route(one, *views, seed=3)
    assert 0 <= routed.split <= prompt
    assert (routed.prefill is None) == (routed.split == 0)
    by_id = {each.instance_id: each for each in views}
    assert routed.decode is not None
    assert by_id[routed.decode.instance_id].role is Role.DECODE
    assert routed.prefill is None or by_id[routed.prefill.instance_id].role is Role.PREFILL


@settings(max_examples=60, deadline=None)
@given(st.lists(instances, min_size=2, max_size=8, unique_by=lambda one: one.instance_id))
def test_in_a_small_cluster_nothing_that_is_looked_at_is_better(views: list[InstanceView]) -> None:
    one, answers = asked(), Answers()
    decodes = [each for each in views if each.role is Role.DECODE]
    prefills = [each for each in views if each.role is Role.PREFILL]
    if not decodes:
        return
    own, usual = answers.expected(one), answers.all
    sides = [DecodeSide.of(each, one, own, usual) for each in decodes]
    found = options(one, own, [PrefillSide.of(each) for each in prefills], sides)
    harm_of = route(one, *views).reasons[-1].figures["harm"]
    local = [option.total for option in found if option.prefill is None]
    assert float(harm_of) <= min(local) + 1e-5


def test_targets_decide() -> None:
    """Many decodes or a long queue: a class with a strict TPOT takes the queue, one with a strict TTFT the decodes."""
    views = [d("decodes", **busy(60)), d("queue", queued_prefill_tokens=5_000, queued_prefill=5)]
    soon = msgspec.structs.replace(asked(), slo=Slo("soon", 0.3, 1.0))
    even = msgspec.structs.replace(asked(), slo=Slo("even", 10.0, 0.03))
    assert way(route(soon, *views))[1] == "decodes"
    assert way(route(even, *views))[1] == "queue"


def test_terms_of_a_prefill_instance() -> None:
    queue = {"queued_prefill_tokens": 10_000, "queued_prefill": 10}
    idle, busy_one = PrefillSide.of(p()).part(800, TARGETS), PrefillSide.of(p(**queue)).part(800, TARGETS)
    assert idle.others == 0.0
    assert busy_one.ready_s > idle.ready_s + 1.0
    wait_s = PrefillSide.of(p(**queue)).wait_s
    assert busy_one.others == pytest.approx(10 * (harm(busy_one.ready_s / 2.0) - harm(wait_s / 2.0)))
    assert PrefillSide.of(p(), saved=640).own_s(800) == pytest.approx(0.02 + 160 * (1e-4 + 1e-9 * (640 + 80)))


def test_terms_of_a_decode_instance() -> None:
    one, own = asked(), Lengths(150.0, 100.0)

    def side(saved: int = 0, **load: object) -> DecodeSide:
        return DecodeSide.of(d(max_seqs=32, **load), one, own, own, saved)

    assert side().terms(800).rest_s == 0.0
    assert side(saved=640).terms(0).rest_s == side().terms(640).rest_s < side().terms(0).rest_s / 2
    full = side(**busy(40))  # eight wait for a seat; one of 32 ends every 150 steps / 32
    step_s = 0.02 + 32 * 1e-4 + 32 * 600 * 2e-7
    assert full.terms(800).room_s == pytest.approx(9 * 150 * step_s / 32)
    assert full.terms(800).tpot_s == pytest.approx(step_s)
    assert full.terms(800).memory > side(**busy(32)).terms(800).memory == 0.0
    small = side(free_blocks=20, **busy(16))
    assert small.terms(800).room_s == pytest.approx((800 - 320) * 150 * small.after_s / (16 * 600))
    assert small.terms(800).memory > 0.0
    assert side(prefill_share=0.5, **busy(16)).terms(800).tpot_s > side(**busy(16)).terms(800).tpot_s + 0.01
