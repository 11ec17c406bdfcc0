from random import Random

from shared.domain.instance import InstanceState, Role
from shared.domain.rates import ChunkedCost, PartialPrefillCost, Rates
from shared.policy.assignment import Assignment
from shared.policy.index import ClusterIndex
from shared.policy.placement import LeastLoad
from tests.shared.policy.views import decode, index, job, prefill, view

CHUNKED = Rates(PartialPrefillCost(1e-4, 0.01), ChunkedCost(0.0, 1e-6, 0.0256))


def waits(cluster: ClusterIndex) -> dict[str, float]:
    return {instance_id: waits_s for keys in cluster.backlog.classes() for waits_s, _, instance_id in keys}


def test_a_cluster_is_coupled_iff_no_instance_has_the_prefill_role() -> None:
    assert index(decode("a")).coupled
    assert index().coupled
    mixed = index(decode("a"), prefill("b", state=InstanceState.STARTING))
    assert not mixed.coupled
    assert (mixed.placing, len(mixed.candidates)) == (Role.PREFILL, 0)


def test_bookings_show_in_loads_and_backlogs_whenever_the_backlog_is_built() -> None:
    for early in (True, False):
        cluster = index(prefill("p", rate=1e-3, base=0.5), decode("d", free_blocks=10))
        if early:
            assert waits(cluster) == {"p": 0.0}
        cluster.book(Assignment("p", 0.0, prefill_tokens=100))
        cluster.book(Assignment("d", 0.0, prefill_tokens=20, decode_tokens=33, heavy=True))
        cluster.book(Assignment("nobody", 0.0, prefill_tokens=20, decode_tokens=33))
        assert waits(cluster) == {"p": 0.6}
        p, d = cluster.prefill.views[0].load, cluster.decode.views[0].load
        assert (p.queued_prefill, p.queued_prefill_tokens, p.decoding) == (1, 100, 0)
        assert (d.queued_prefill_tokens, d.decoding, d.heavy_decodes, d.context_tokens, d.free_blocks) == (
            20,
            1,
            1,
            33,
            7,
        )
        assert cluster.turn == 3


def test_each_dispatcher_has_its_own_view_of_a_broadcast() -> None:
    cluster = index(prefill("p"), decode("d", free_blocks=10))
    first, second = cluster.for_dispatch(), cluster.for_dispatch()
    first.book(Assignment("d", 0.0, decode_tokens=16))
    assert [i.decode.views[0].load.free_blocks for i in (cluster, first, second)] == [10, 9, 10]
    cluster.book(Assignment("d", 0.0, decode_tokens=32))
    assert [i.decode.views[0].load.free_blocks for i in (cluster, first, second)] == [8, 9, 10]
    assert (cluster.turn, first.turn, second.turn) == (1, 1, 0)
    assert second.view is cluster.view


def test_in_a_coupled_cluster_decodes_slow_prefill_down() -> None:
    # A step of 512 tokens takes 25.6 ms + 1 us a context token; 256 decodes leave room for 256 prompt tokens.
    idle = decode("idle", rates=CHUNKED)
    busy = decode("busy", rates=CHUNKED, decoding=256, context_tokens=25_600)
    cluster = index(idle, busy)
    assert abs(cluster.backlog.cost_s("idle", 1000) - 0.05) < 1e-9
    assert abs(cluster.backlog.cost_s("busy", 1000) - 0.2) < 1e-9
    choice = LeastLoad().choose(job(1000), cluster, (), 0.0, Random(0))
    assert choice is not None
    assert choice.instance.instance_id == "idle"


def test_in_a_coupled_cluster_a_booked_job_counts_as_prefill_and_as_decode() -> None:
    cluster = index(decode("a", rates=CHUNKED), decode("b", rates=CHUNKED))
    for _ in range(10):
        choice = LeastLoad().choose(job(500, 10), cluster, (), 0.0, Random(0))
        assert choice is not None
        cluster.book(Assignment(choice.instance.instance_id, 0.0, prefill_tokens=500, decode_tokens=500))
    assert [v.load.decoding for v in cluster.candidates.views] == [5, 5]
    assert all(waits_s > 0 for waits_s in waits(cluster).values())


def test_what_is_worked_out_once_a_broadcast_is_shared() -> None:
    cluster = index(decode("a"))
    made = cluster.cached("k", list)
    assert cluster.cached("k", list) is made
    assert cluster.for_dispatch().cached("k", list) is made
    assert ClusterIndex(view(), rng=Random(0)).cached("k", list) is not made
