"""The papers' experiments in small, rows of the report, and the generated page."""

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.papers import report
from benchmarks.papers.cronus import CAPACITIES, SYSTEMS, Column, modelled, run_system
from benchmarks.papers.cronus_fit import with_values
from benchmarks.papers.report import Chart, Check, Row, Section, as_result, told_in_words, write_docs
from benchmarks.papers.testbed import (
    CONVERSATION,
    AtopWatermark,
    Coefficients,
    Kind,
    Stage,
    Watermark,
    azure,
    in_turn,
    instances,
    requests_per_s,
    sharegpt,
    staged,
    weighed,
)
from benchmarks.papers.testbed import Testbed as Bed  # pytest would collect a name in Test
from benchmarks.papers.tetriinfer import micro_rows
from benchmarks.papers.thunderserve import kv_rows
from benchmarks.papers.zte import Discounts, decode_memory_bytes, first_token_s, output_token_s, prefill_memory_bytes
from shared.cost.linear import huawei_of
from shared.cost.network import Link
from shared.cost.step import Batch
from shared.domain.instance import Role
from shared.domain.job import JobView
from shared.errors import NotFound
from shared.plan.methods.papers import estimated_throughput, packed
from shared.policy.decode_admission import DecodeMemory, Greedy
from shared.sim.spec import EngineLimits
from shared.sim.workload import synthetic


@pytest.fixture(scope="module")
def testbed() -> Bed:
    return Bed()


def test_the_stated_coefficients_meet_the_stage_capacities(testbed: Bed) -> None:
    """On requests of the trace's mean lengths, so near to what the whole trace gives."""
    workload = synthetic(300, 1014, 247, prompt_cv=1.0, output_cv=0.9, longest_tokens=5000)
    for capacity in CAPACITIES:
        if capacity.role is Role.PREFILL:
            assert modelled(testbed, workload, capacity) == pytest.approx(capacity.measured, rel=0.15)


def test_a_fit_gives_each_gpu_its_shares_and_the_rest_the_mean() -> None:
    known = Coefficients.from_file()
    found = with_values(known, (0.8, 0.9, 0.2, 0.4, 0.4, 0.1, 0.001, 0.0002))
    assert (found.devices["A100-SXM-80"].compute, found.devices["A10"].bandwidth) == (0.8, 0.4)
    assert found.devices["ZTE-GPU-A"] == found.devices["A100-SXM-80"]
    assert found.default.compute == pytest.approx((0.8 * 0.2 * 0.4) ** (1 / 3))
    assert found.engine.sequence_s == 0.0002


def test_engines_of_then_run_prefill_and_decode_apart(testbed: Bed) -> None:
    model = testbed.model("A100", "Llama-3-8B")
    both = model.step_time_s(Batch(((412, 500),), 100, 100_000))
    apart = model.step_time_s(Batch(((412, 500),))) + model.decode_time_s(100, 100_000)
    assert max(model.prefill_time_s(412, 500), model.decode_time_s(100, 100_000)) < both < apart


def test_gpus_before_ampere_read_shared_heads_again(testbed: Bed) -> None:
    """Four times the KV in Llama-3, once in OPT, whose heads share nothing."""
    grown = {}
    for name in ("Llama-3-8B", "OPT-125M"):
        old = testbed.model("V100-32-PCIe", name)
        new = testbed.model("A100", name)
        grown[name] = [m.decode_time_s(64, 128_000) - m.decode_time_s(64, 64_000) for m in (old, new)]
    bandwidths = 900 * 0.72, 2039 * 0.815
    llama, opt = (old / new * bandwidths[0] / bandwidths[1] for old, new in grown.values())
    assert llama == pytest.approx(4.0, rel=0.2)
    assert opt == pytest.approx(1.0, rel=0.2)


def test_the_watermark_keeps_blocks_free() -> None:
    policy, job = Watermark(), JobView("a", 160, 10)
    assert policy.admit(job, DecodeMemory(11, 16, 100), 0.0).admitted
    assert not policy.admit(job, DecodeMemory(10, 16, 100), 0.0).admitted
    assert policy.admit(job, DecodeMemory(10, 16, 10), 0.0).admitted  # an empty instance
    both = AtopWatermark(Greedy())
    assert both.admit(job, DecodeMemory(11, 16, 100), 0.0).admitted
    assert not both.admit(job, DecodeMemory(10, 16, 100), 0.0).admitted


def test_instances_and_stages(testbed: Bed) -> None:
    kind = Kind("A100", "Llama-3-8B", limits=EngineLimits(batched_tokens=512), slowed=2.0)
    first, second = instances(testbed, kind, Role.DECODE, 2, "x")
    assert (first.instance_id, second.instance_id, first.model) == ("x-0", "x-1", second.model)
    plain = testbed.model("A100", "Llama-3-8B")
    assert first.model.decode_time_s(4, 400) == 2.0 * plain.decode_time_s(4, 400)
    assert weighed(first, 3.0).rates.weight == 3.0
    link = Link(1e10, 1e-4)
    halves = (Stage("A100", 16), Stage("A10", 16))
    spec = staged(testbed, "pp", "Llama-3-8B", halves, Role.DECODE, EngineLimits(), link, link)
    assert spec.lanes == 2
    assert spec.kv_tokens < testbed.kv_tokens("A100", "Llama-3-8B")
    assert in_turn(spec).model.decode_time_s(8, 800) > 1.2 * spec.model.decode_time_s(8, 800)
    whole = (Stage("A100", 32),)
    assert staged(testbed, "tp", "Llama-3-8B", whole, Role.DECODE, EngineLimits(), link, link).lanes == 1


def test_batches_are_packed_by_their_longest() -> None:
    requests = [(10, 10), (10, 10), (30, 10), (5, 5)]
    assert list(packed(80, requests)) == [((10, 10), (10, 10)), ((30, 10), (5, 5))]
    assert list(packed(1, requests)) == [(request,) for request in requests]


def test_more_memory_is_more_estimated_throughput(testbed: Bed) -> None:
    cost = huawei_of(testbed.model("A100", "Llama-3-8B"))
    requests = [(200, 200)] * 50
    assert estimated_throughput(cost, 20_000, requests) > estimated_throughput(cost, 2_000, requests)


def test_rows_that_need_no_simulation(testbed: Bed) -> None:
    """A guard on the cost model: what the papers measured of single steps and transfers stays reproduced."""
    micro, chart = micro_rows(testbed)
    assert [row.key for row in (*micro, *kv_rows(testbed)) if not row.met] == ["hp_ld"]
    assert chart.groups


def test_zte_formulas(testbed: Bed) -> None:
    device, model = testbed.catalogue.get("ZTE-GPU-A"), testbed.geometry("Llama-2-7B")
    all_of_it = Discounts(1.0, 1.0, 1.0)
    one = first_token_s(device, model, 1024, all_of_it)
    assert one == pytest.approx(1024 * 2 * 6.6e9 / 312e12, rel=0.1)
    assert first_token_s(device, model, 1024, all_of_it, ranks=2) > one / 2
    assert output_token_s(device, model, 1, 0, all_of_it) == pytest.approx(13.5e9 / 2.039e12, rel=0.02)
    assert prefill_memory_bytes(model, 0) == model.weight_bytes(2.0)
    assert decode_memory_bytes(model, 10, 1000) > 10 * 1000 * model.kv_bytes_per_token() + model.weight_bytes(2.0)


def test_systems_of_cronus_on_a_few_requests(testbed: Bed) -> None:
    workload = synthetic(60, 800, 100)
    rates = {s: requests_per_s(run_system(testbed, Column("A10", "Llama-3-8B"), s, workload)) for s in SYSTEMS}
    assert rates["Cronus"] > rates["Disagg L-H"] > rates["Disagg H-L"]
    assert rates["Cronus"] > rates["PP"]


def test_lengths_come_from_public_tables(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="holds `traces/`"):
        sharegpt(tmp_path, 10)
    path = tmp_path / CONVERSATION
    path.parent.mkdir(parents=True)
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3000,44\n2023-11-16 18:15:47,10,5\n")
    whole, cut = azure(tmp_path, CONVERSATION, 5), azure(tmp_path, CONVERSATION, 5, 2048)
    assert (whole.prompt_tokens.tolist(), cut.prompt_tokens.tolist()) == ([3000, 10], [2004, 10])
    assert np.all(cut.output_tokens == whole.output_tokens)
    assert len(replace(whole, name="x")) == 2


def held(row: Row) -> dict[Check, bool]:
    return dict(row.checks)


def test_a_gain_needs_its_sign_and_thirty_percent() -> None:
    near = report.gain("k", "Fig 1", "x", -50.0, -36.0)
    assert held(near) == {Check.SIGN: True, Check.MAGNITUDE: True}
    assert held(report.gain("k", "Fig 1", "x", -50.0, -34.0)) == {Check.SIGN: True, Check.MAGNITUDE: False}
    assert held(report.gain("k", "Fig 1", "x", -50.0, 40.0)) == {Check.SIGN: False, Check.MAGNITUDE: False}
    assert near.paper == "-50"
    nothing = report.gain("k", "Fig 1", "x", -50.0, -1.1e-14)  # a sum in another order
    assert (nothing.ours, held(nothing)[Check.SIGN]) == ("+0", False)
    assert report.points("k", "F", "x", 0.0, -1.1e-14, 5.0).ours == "+0"


def test_the_gain_of_a_ratio_is_its_distance_from_one() -> None:
    assert held(report.ratio_gain("k", "T", "x", 2.0, 1.71)) == {Check.SIGN: True, Check.MAGNITUDE: True}
    assert held(report.ratio_gain("k", "T", "x", 2.0, 1.69)) == {Check.SIGN: True, Check.MAGNITUDE: False}
    assert held(report.ratio_gain("k", "T", "x", 0.8, 1.01)) == {Check.SIGN: False, Check.MAGNITUDE: False}
    assert held(report.ratio_gain("k", "T", "x", 0.8, 0.75)) == {Check.SIGN: True, Check.MAGNITUDE: True}


def test_other_kinds_of_rows() -> None:
    assert held(report.factor("k", "F", "x", 8.0, 10.3)) == {Check.SIGN: True, Check.MAGNITUDE: True}
    assert held(report.value("k", "T", "x", "ms", 100.0, 116.0, 0.15)) == {Check.MAGNITUDE: False}
    assert held(report.points("k", "F", "x", 0.0, -9.0, 10.0)) == {Check.MAGNITUDE: True}
    assert held(report.between("k", "F", "x", "%", 16.0, 30.0, 31.0)) == {Check.MAGNITUDE: False}
    assert report.between("k", "F", "x", "x", 10.0, float("inf"), 30.0).paper == "> 10"
    assert report.informative("k", "T", "x", "ms", "12", 13.0).met


def test_misses_stay_with_their_note() -> None:
    section = Section(
        "zte",
        "ZTE: x",
        (report.gain("gain_1", "Fig 9", "x", 17.0, 8.0), report.informative("eq", "eq", "y", "ms", "1", 2.0)),
    )
    result = as_result([told_in_words(section)])
    assert result["aims"]["zte_gain_1_sign"] == {"want": "sign of +17", "got": "+8", "met": True}
    missed = result["aims"]["zte_gain_1_magnitude"]
    assert not missed["met"]
    assert missed["want"] == "11.9 … 22.1"
    assert "GPU A falls behind" in missed["note"]
    assert result["figures"] == {"zte_gain_1_percent": 8.0, "zte_gain_1_paper_percent": 17.0, "zte_eq_ms": 2.0}
    assert len(result["notes"]) == 1


def test_words_of_every_paper_can_be_read() -> None:
    for name in ("cronus", "tetriinfer", "huawei", "thunderserve", "zte"):
        section = told_in_words(Section(name, name, ()))
        assert section.setup
        assert section.differs


CHART = Chart("bars", "Bars & more", "x", ("a", "b"), {"paper": (1.0, -2.0), "ours": (1.5, 0.0)})


def test_a_chart_is_well_formed_and_repeatable() -> None:
    tree = ElementTree.fromstring(CHART.svg())
    bars = [e for e in tree.iter("{http://www.w3.org/2000/svg}rect") if len(e)]
    assert len(bars) == 4
    heights = [float(bar.attrib["height"]) for bar in bars]  # group by group: 1, 1.5, -2, 0
    assert heights[2] > heights[1] > heights[0] > heights[3]
    zero = float(bars[0].attrib["y"]) + heights[0]
    assert abs(float(bars[2].attrib["y"]) - zero) < 0.2  # a negative bar hangs from zero
    assert CHART.svg() == CHART.svg()


def test_the_page_shows_rows_marks_and_charts(tmp_path: Path) -> None:
    section = Section(
        "zte",
        "ZTE: two vendors",
        (report.gain("a", "Fig 9", "throughput", 17.0, 8.0), report.order("b", "Fig 7", "ratio", "yes", "yes", True)),
        (CHART,),
        ("how it was set up",),
        ("no expert parallelism",),
    )
    page, chart = write_docs(tmp_path, [section], "engine: 1")
    text = page.read_text(encoding="utf-8")
    assert "| Fig 9 | throughput | +17 % | +8 % | ✔ | ✘ |" in text
    assert "| Fig 7 | ratio | yes | yes | ✔ | – |" in text
    assert "| [ZTE](#zte-two-vendors) | 2 | 2 of 2 | 0 of 1 |" in text
    assert "![Bars & more](papers/bars.svg)" in text
    assert "### Otherwise, or not here\n\n- no expert parallelism\n" in text
    assert "engine: 1" in text
    assert chart == tmp_path / "papers" / "bars.svg"
