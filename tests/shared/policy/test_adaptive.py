"""One decision for placement, split and dispatch."""

from random import Random

import msgspec
import pytest

from shared.domain.estimated import Estimated, RouteKind
from shared.domain.instance import InstanceView
from shared.domain.job import JobView, Slo
from shared.domain.kv import Codec
from shared.domain.rates import LinkRate
from shared.explain.reasons import phrase
from shared.policy.adaptive import HOLDERS_PER_ROLE, RANDOM_DECODES, Adaptive, AdaptiveDispatch, AdaptiveSplit
from shared.policy.dispatch import DispatchPolicy, PowerOfTwo
from shared.policy.estimate import DecodeSide, JobContext, PrefillSide
from shared.policy.index import ClusterIndex
from shared.policy.ledger import assignments
from shared.policy.output_lengths import Lengths, OutputLengths
from shared.policy.placement import Policies, place
from shared.policy.prefix_index import PrefixIndex
from shared.policy.split import FractionSplit, FullSplit, NoSplit, Split
from shared.policy.truth import SURELY, Compared
from tests.shared.policy.views import ALL, TARGETS, asked, busy, d, index, job, p, rates, route, view, way


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
    contexts = (JobContext(one, own, own, others=one.slo) for one in (exact, lossy))
    raw, coded = (DecodeSide(to, context).transfer_s(PrefillSide(p()), 800)[1] for context in contexts)
    assert raw == pytest.approx(800 * p().info.kv_bytes_per_token / 5e5)
    assert raw > 1.0
    assert coded == pytest.approx(raw * 4.75 / 16)


SLOW: dict[str, object] = busy(400, 1000)  # a token takes 0.14 s there, of a target of 0.1 s


def test_an_idle_prefill_instance_keeps_the_answer_where_decodes_are_slow() -> None:
    migrates = asked(migrates=True)
    kept = route(migrates, p(), d(**SLOW))
    assert way(kept) == ("", "p", "none")
    assert kept.keep_tokens == 2 * 150
    assert kept.reasons[-1].figures["keep_tokens"] == 300
    assert "it keeps the answer, at most 300 tokens of it" in phrase(kept.reasons[-1])
    (only,) = assignments(migrates, kept, 0.0)
    assert (only.instance_id, only.prefill_tokens, only.decode_tokens, only.coming) == ("p", 800, 800, False)


@pytest.mark.parametrize(
    ("asks", "prefills"),
    [
        ({}, p()),  # a job that cannot migrate
        ({"migrates": True}, p(busy_share=0.8)),  # prompts are computed there most of the time
        ({"migrates": True}, p(free_blocks=0)),
    ],
)
def test_otherwise_the_answer_is_handed_over(asks: dict[str, bool], prefills: InstanceView) -> None:
    with_keep, without = (
        route(asked(**asks), prefills, d(**SLOW), policies=replace_placement(Adaptive(keep=keep)))
        for keep in (True, False)
    )
    assert with_keep == without
    assert (way(with_keep)[1], with_keep.keep_tokens) == ("d", 0)


def test_an_answer_is_not_kept_for_a_small_gain() -> None:
    assert route(asked(migrates=True), p(), d(**busy(8))).keep_tokens == 0


def test_until_the_decode_instance_has_room_the_answer_is_decoded_where_its_prompt_is_computed() -> None:
    full = d(**busy(64, 900), free_blocks=0, waiting_tokens=60_000)
    kept = route(asked(migrates=True), p(), full)
    assert way(kept) == ("", "p", "none")
    assert kept.has_room
    assert kept.keep_tokens > 2 * 150


def replace_placement(placement: Adaptive) -> Policies:
    return Policies(placement, AdaptiveSplit(), AdaptiveDispatch())


def test_reasons_name_the_terms_and_what_was_predicted() -> None:
    figures = route(asked(), p(), d(**busy(64))).reasons[-1].figures
    terms = ("own_ttft", "own_tpot", "own_pause", "others_prefill", "others_link", "others_decode", "memory")
    assert figures["harm"] == pytest.approx(sum(float(figures[term]) for term in terms), abs=1e-5)
    assert float(figures["ttft_s"]) == pytest.approx(2 * 0.02 + 800 * (1e-4 + 4e-7), rel=0.02)
    after_s = 0.02 + 65 * 1e-4 + (64 * 600 + 800 + 75) * 2e-7  # the answer is 150 tokens long, half of it on average
    assert float(figures["tpot_s"]) == pytest.approx(after_s, rel=0.1)


def test_in_a_burst_both_instances_get_their_part() -> None:
    answers = OutputLengths()
    for number in range(100):
        done = job(800, 1000, job_id=f"done {number}", slo=TARGETS)
        answers.started(done)
        answers.ended(done.job_id, 150)
    found = ClusterIndex(view(p(speed=0.4), d(max_seqs=64)), rng=Random(0))
    found.ledger.output_lengths = answers
    for number in range(120):
        one = asked(job_id=f"{number}")
        routed = place(one, found, ALL, 0.0, Random(0)).route
        found.ledger.add(one, routed)
        for assignment in assignments(one, routed, 0.0):
            found.book(assignment)
    slow, fast = found.prefill.views[0].load, found.decode.views[0].load
    # Of 3.5 prompts' time the slow one has 1; the fast one decodes, too.
    assert 0.2 < slow.queued_prefill_tokens / (120 * 800) < 0.6
    assert slow.queued_prefill_tokens + fast.queued_prefill_tokens == 120 * 800


@pytest.mark.parametrize("split", [FullSplit(), NoSplit(), FractionSplit(0.25)])
def test_a_fixed_split_is_kept_to(split: Split) -> None:
    policies = Policies(Adaptive(), split, AdaptiveDispatch())
    tokens = {"full": 800, "none": 0, "fraction": 200}[split.name]
    for views in ([p(), d()], [p(), d(**busy(64))]):
        assert route(asked(), *views, policies=policies).split == tokens


def test_a_fixed_dispatch_is_kept_to() -> None:
    fixed: DispatchPolicy = PowerOfTwo()
    views = [p(), d("a", 4.0), d("b", **busy(10, heavy_decodes=0))]
    found = index(*views)
    wanted = fixed.choose(asked(), found.decode.views, (), 0.0, Random(0))
    assert wanted is not None
    routed = place(asked(), found, Policies(Adaptive(), AdaptiveSplit(), fixed), 0.0, Random(0)).route
    assert routed.decode == wanted.ref


def test_dispatch_and_split_alone() -> None:
    views = [d("a", **busy(60)), d("b", **busy(4)), d("c", 0.2)]
    choice = AdaptiveDispatch().choose(asked(), views, (), 0.0, Random(0))
    assert choice is not None
    assert choice.instance.instance_id == "b"
    assert AdaptiveDispatch().choose(asked(), views, ("a", "b", "c"), 0.0, Random(0)) is None
    assert AdaptiveSplit().choose(asked(), p(), d(**busy(64)), Random(0)).tokens == 800
    assert AdaptiveSplit().choose(asked(), p(), d(), Random(0)).tokens == 0


def test_targets_decide() -> None:
    """Many decodes or a long queue: a class with a strict TPOT takes the queue, one with a strict TTFT the decodes."""
    views = [d("decodes", **busy(60)), d("queue", queued_prefill_tokens=5_000, queued_prefill=5)]
    soon = msgspec.structs.replace(asked(), slo=Slo("soon", 0.3, 1.0))
    even = msgspec.structs.replace(asked(), slo=Slo("even", 10.0, 0.03))
    assert way(route(soon, *views))[1] == "decodes"
    assert way(route(even, *views))[1] == "queue"


# At which instances `adaptive` looks, and what it makes of those that hold some of the prompt


def test_a_prefix_draws_the_job_to_who_holds_it_unless_that_one_is_much_busier() -> None:
    prefixes = PrefixIndex()
    blocks = tuple(range(1, 11))  # 640 tokens of the 800
    prefixes.replace("q", 1, blocks)
    one = asked(prefix=blocks)

    def chosen(*views: InstanceView) -> str:
        found = ClusterIndex(view(*views), rng=Random(0), prefixes=prefixes)
        routed = place(one, found, ALL, 0.0, Random(0)).route
        return routed.prefill.instance_id if routed.prefill else ""

    stalled = d(**busy(64))
    assert chosen(p("p"), p("q"), stalled) == "q"
    assert chosen(p("p"), p("q", queued_prefill_tokens=60_000, queued_prefill=60), stalled) == "p"


@pytest.mark.parametrize("seed", range(8))
def test_where_all_serve_whole_jobs_the_one_that_would_be_through_first_is_looked_at(seed: int) -> None:
    queue = {"queued_prefill": 10, "queued_prefill_tokens": 20_000}
    others = [d(f"{at:02}", **busy(3), **queue) for at in range(12)]
    assert way(route(asked(), *others, d("short", **busy(4)), seed=seed)) == ("", "short", "none")


def test_beside_those_that_hold_the_prompt_none_are_looked_at_at_random() -> None:
    prefixes, blocks = PrefixIndex(), tuple(range(1, 11))
    views = [p(), d("least", **busy(4)), *(d(f"{at:02}", **busy(8)) for at in range(12))]
    found = ClusterIndex(view(*views), rng=Random(0), prefixes=prefixes)

    def looked_at(asked_for: JobView, seed: int) -> float:
        reasons = place(asked_for, found, ALL, 0.0, Random(seed)).route.reasons
        figures = next(one for one in reasons if one.what == "placement:adaptive").figures
        return float(figures["decode_candidates"])

    assert max(looked_at(asked(), seed) for seed in range(8)) == 1 + RANDOM_DECODES
    for name in ("03", "07"):
        prefixes.replace(name, 1, blocks)
    assert {looked_at(asked(prefix=blocks), seed) for seed in range(8)} == {1 + HOLDERS_PER_ROLE}


@pytest.mark.parametrize(("known", "chosen"), [(42, "holder"), (2, "other-0")])
def test_where_all_serve_whole_jobs_a_holder_is_not_held_to_the_prompt_that_it_has_just_computed(
    known: int, chosen: str
) -> None:
    prefixes, blocks = PrefixIndex(), tuple(range(1, 43))
    prefixes.replace("holder", 1, blocks[:known])
    others = [d(f"other-{at}", prefill_share=0.4, **busy(8)) for at in range(3)]
    views = view(*others, d("holder", prefill_share=0.9, **busy(8)))
    coupled = ClusterIndex(views, rng=Random(0), prefixes=prefixes)
    without = Policies(Adaptive(pull=False), ALL.split, ALL.dispatch)
    assert way(place(asked(2_800, prefix=blocks), coupled, without, 0.0, Random(0)).route) == ("", chosen, "none")


@pytest.mark.parametrize("observed", [1.8, 0.6, 4.0, 0.25])
def test_estimates_that_turned_out_wrong_decide_less(observed: float) -> None:
    """Of two decode instances the emptier one is chosen, unless its times per token were more than twice, or less than
    half, as long as computed.
    """
    found, one = index(d("a", **busy(4)), d("b", **busy(8))), asked()

    def chosen() -> str:
        return way(place(one, found, ALL, 0.0, Random(0)).route)[1]

    assert chosen() == "a"
    for _ in range(SURELY):
        estimated = Estimated(0.1, 0.02, RouteKind.WHOLE, "a", "a")
        found.ledger.errors.add(Compared(estimated, 1000, 0.1 * observed, 0.02 * observed))
        for _ in range(2):
            found.ledger.errors.add(Compared(Estimated(0.1, 0.02, RouteKind.WHOLE, "b", "b"), 1000, 0.1, 0.02))
    assert chosen() == ("b" if not 0.5 < observed < 2.0 else "a")
