import msgspec
import pytest

from dashboard.plan.picture import Graph, graph, hardware, natural
from dashboard.plan.records import Fleet, FleetInstance, Route
from shared.domain.instance import Role
from tests.dashboard.planner import large_fleet, small_fleet


def of(fleet: dict[str, object], **more: int) -> Graph:
    known = msgspec.convert(fleet, Fleet)
    return graph(known.instances, known.routes, **more)


def test_one_node_an_instance_and_one_link_a_pair() -> None:
    drawn = of(small_fleet())
    assert [node.name for node in drawn.nodes] == ["d0", "d1", "p0", "p1"]
    names = [
        (drawn.nodes[link.prefill].name, drawn.nodes[link.decode].name, round(link.share, 6)) for link in drawn.links
    ]
    assert sorted(names) == [("p0", "d0", 0.35), ("p1", "d0", 0.15), ("p1", "d1", 0.38)]
    assert [round(node.own, 6) for node in drawn.nodes] == [0.0, 0.12, 0.0, 0.0]
    assert [drawn.nodes[place].name for place in drawn.column(Role.DECODE)] == ["d0", "d1"]


@pytest.mark.parametrize("count", [40, 64, 200])
def test_many_are_grouped_by_what_they_are_and_no_share_is_lost(count: int) -> None:
    drawn = of(large_fleet(count))
    assert sum(len(node.members) for node in drawn.nodes) == count
    assert sum(link.share for link in drawn.links) == pytest.approx(1.0)
    assert len(drawn.nodes) == count if count <= 40 else len(drawn.nodes) <= 11
    for node in drawn.nodes:
        assert len({(one.role, hardware(one), one.state) for one in node.members}) == 1


def test_the_lost_are_apart_from_those_that_are_there() -> None:
    lost = [node for node in of(large_fleet()).nodes if node.first.lost]
    assert [node.name for node in lost] == ["decode-a100-41", "prefill-a100-9"]


def test_routes_to_an_instance_that_nobody_knows() -> None:
    drawn = graph([FleetInstance("p0", Role.PREFILL)], [Route("gone", "p0", 2.0), Route("gone", None, 2.0)])
    gone = next(node for node in drawn.nodes if node.name == "gone")
    assert gone.first.lost
    assert gone.own == 0.5
    assert [link.share for link in drawn.links] == [0.5]


def test_shares_of_nothing_are_no_links() -> None:
    assert graph([FleetInstance("d0", Role.DECODE)], [Route("d0", "p0", 0.0)]).links == ()


def test_names_for_people() -> None:
    assert hardware(FleetInstance("a", Role.DECODE, accelerator="A40", tensor_parallel=2, pipeline_parallel=3)) == (
        "A40 TP2 PP3"
    )
    assert sorted(["p10", "p2", "d1", "2x"], key=natural) == ["2x", "d1", "p2", "p10"]
    load = [node.load for node in graph([FleetInstance("p0", Role.PREFILL)], []).nodes]
    assert load == [None]
