"""What a job would meet on a pair of instances, and what it would do to others."""

from random import Random

import pytest

from shared.policy import registry
from shared.policy.estimate import EVEN, DecodeSide, JobContext, PrefillSide, balanced, pair, slo_cost
from shared.policy.index import ClusterIndex
from shared.policy.output_lengths import Lengths
from shared.policy.placement import Policies, place
from tests.shared.policy.views import ALL, TARGETS, asked, busy, d, p, view


@pytest.mark.parametrize("speed", [0.25, 1.0, 3.0])
@pytest.mark.parametrize(("queued", "queued_there"), [(0, 0), (4000, 0), (0, 4000)])
def test_the_balanced_part_keeps_both_sides_equally_long(speed: float, queued: int, queued_there: int) -> None:
    one, own = asked(3000), Lengths(150.0, 140.0)
    here = PrefillSide(p(speed=speed, queued_prefill_tokens=queued, queued_prefill=queued // 1000))
    view_there = d(queued_prefill_tokens=queued_there, queued_prefill=queued_there // 1000)
    there = DecodeSide(view_there, JobContext(one, own, own, others=one.slo))
    split = balanced(3000, here, there)
    if not 0 < split < 3000:
        assert abs(here.wait_s - there.wait_s) > 0.3  # one of them is through before the other can begin
        return
    assert here.part(split, TARGETS).ready_s == pytest.approx(there.terms(split).rest_s, rel=0.25)  # steps are whole


def test_slo_cost_is_convex_before_the_target_and_flat_beyond() -> None:
    assert slo_cost(0.0) == slo_cost(-1.0) == 0.0
    assert slo_cost(1.0) == pytest.approx(0.5 + 0.1)
    assert slo_cost(0.3) == pytest.approx(0.008 + 0.03, abs=1e-3)
    assert slo_cost(4.0) - slo_cost(3.8) < (slo_cost(1.1) - slo_cost(0.9)) / 3
    assert all(slo_cost(x / 10) < slo_cost(x / 10 + 0.1) for x in range(40))
    assert slo_cost(20.0) - slo_cost(10.0) == pytest.approx(2.0, abs=1e-3)  # later is worse, though both are missed


def test_decodes_on_their_way_count_until_they_come() -> None:
    found = ClusterIndex(view(p(), d("a", 1.01, **busy(30)), d("b", **busy(30))), rng=Random(0))
    chosen = []
    for number in range(20):
        one = asked(job_id=f"{number}")
        routed = place(one, found, ALL, 0.0, Random(0)).route
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
        context = JobContext(one, usual, usual, others=one.slo, spread_s=spread_s)
        return DecodeSide(d(max_seqs=64, **{**load, **more}), context)

    stays_s = 150 * (0.02 + 64 * 1e-4 + 64 * 600 * 2e-7)
    together, apart = side(0.9 * stays_s), side(10 * stays_s)
    assert (together.running, together.over) == (64, 40)
    assert together.terms(0) == side(0.0).terms(0)
    assert (apart.running, apart.over) == (4 + 10, 0)
    assert apart.step_s == pytest.approx(0.02 + 14 * 1e-4 + 14 * 600 * 2e-7)
    assert (together.room_s > 1.0, apart.room_s, apart.memory) == (True, 0.0, EVEN)
    assert side(10 * stays_s, coming=0).running == 64  # those that are there stay


def test_terms_of_a_prefill_instance() -> None:
    queue = {"queued_prefill_tokens": 10_000, "queued_prefill": 10}
    idle, busy_one = PrefillSide(p()).part(800, TARGETS), PrefillSide(p(**queue)).part(800, TARGETS)
    assert idle.others == 0.0
    assert busy_one.ready_s > idle.ready_s + 1.0
    wait_s = PrefillSide(p(**queue)).wait_s
    assert busy_one.others == pytest.approx(10 * (slo_cost(busy_one.ready_s / 2.0) - slo_cost(wait_s / 2.0)))
    assert PrefillSide(p(), saved=640).own_s(800) == pytest.approx(0.02 + 160 * (1e-4 + 1e-9 * (640 + 80)))


def test_terms_of_a_decode_instance() -> None:
    one, own = asked(), Lengths(150.0, 100.0)

    def side(saved: int = 0, **load: object) -> DecodeSide:
        return DecodeSide(d(max_seqs=32, **load), JobContext(one, own, own, others=one.slo), saved)

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


def test_kv_of_another_precision_does_not_join_a_prefix() -> None:
    """A decode instance that holds half of the prompt pulls the other half of an equal precision, else all of it."""
    one, own = asked(800), Lengths(150.0, 140.0)
    here, other = PrefillSide(p()), PrefillSide(p(precision="fp8"))
    there = DecodeSide(d(), JobContext(one, own, own, others=one.slo), saved=400)
    alike, unlike = (pair(side, side.part(800, TARGETS), there, there.terms(800)) for side in (here, other))
    assert (there.saved_beside(here), there.saved_beside(other)) == (400, 0)
    assert unlike.own_pause > alike.own_pause
    assert there.terms(100, there.saved_beside(other)).rest_s > there.terms(100, there.saved_beside(here)).rest_s


@pytest.mark.parametrize(("precision", "saved"), [("", 512), ("fp8", 0)])
def test_a_route_promises_only_prefixes_that_its_kv_joins(precision: str, saved: int) -> None:
    one = asked(800, prefix=tuple(range(12)))
    cluster = ClusterIndex(view(p(precision=precision), d()), rng=Random(0))
    cluster.prefixes.replace("d", 1, one.prefix[:8])
    policies = Policies(registry.placement("least_load"), registry.split("fraction", {"fraction": 0.9}), ALL.dispatch)
    found = place(one, cluster, policies, 0.0, Random(0)).route
    assert found.prefill is not None
    assert found.decode_saved == saved
