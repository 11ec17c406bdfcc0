"""The papers' experiments in small, rows of the report, and the generated page."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.papers.cronus import CAPACITIES, COLUMNS, SYSTEMS, modelled, run_system, with_values
from benchmarks.papers.report import (
    Check,
    Claim,
    ClaimKind,
    Section,
    as_result,
    claims_of,
    page_text,
    row_of,
    with_prose,
)
from benchmarks.papers.testbed import (
    CONVERSATION,
    AtopWatermark,
    Coefficients,
    Kind,
    Shares,
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
from benchmarks.papers.tetriinfer import interference
from benchmarks.papers.thunderserve import kv_figures
from benchmarks.papers.zte import first_token_s, output_token_s
from shared.cost.network import Link
from shared.cost.step import Batch
from shared.domain.instance import Role
from shared.domain.job import JobView
from shared.errors import NotFound
from shared.plan.methods.papers import batch_cost, estimated_throughput, packed
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
    found = with_values(Coefficients.from_file(), (0.8, 0.9, 0.2, 0.4, 0.4, 0.1, 0.001, 0.0002))
    assert (found.devices["A100-SXM-80"].compute, found.devices["A10"].bandwidth) == (0.8, 0.4)
    assert found.devices["ZTE-GPU-A"] == found.devices["A100-SXM-80"]
    assert found.default.compute == pytest.approx((0.8 * 0.2 * 0.4) ** (1 / 3))
    assert found.engine.sequence_s == 0.0002


def test_engines_of_then_run_prefill_and_decode_apart(testbed: Bed) -> None:
    model = testbed.model("A100", "Llama-3-8B")
    both = model.step_time_s(Batch(((412, 500),), 100, 100_000))
    apart = model.step_time_s(Batch(((412, 500),))) + model.decode_time_s(100, 100_000)
    assert max(model.prefill_time_s(412, 500), model.decode_time_s(100, 100_000)) < both < apart


@pytest.mark.parametrize(("model", "times"), [("Llama-3-8B", 4.0), ("OPT-125M", 1.0)])
def test_gpus_before_ampere_read_shared_heads_again(testbed: Bed, model: str, times: float) -> None:
    """Four times the KV in Llama-3, once in OPT, whose heads share nothing."""
    gpus = (testbed.model("V100-32-PCIe", model), 900 * 0.72), (testbed.model("A100", model), 2039 * 0.815)
    old, new = ((m.decode_time_s(64, 128_000) - m.decode_time_s(64, 64_000)) * bandwidth for m, bandwidth in gpus)
    assert old / new == pytest.approx(times, rel=0.2)


def test_the_watermark_keeps_blocks_free() -> None:
    job, both = JobView("a", 160, 10), AtopWatermark(Greedy())
    for free, total, admitted in ((11, 100, True), (10, 100, False), (10, 10, True)):  # the last instance is empty
        memory = DecodeMemory(free, 16, total)
        assert Watermark().admit(job, memory, 0.0) is admitted
        assert both.admit(job, memory, 0.0) is admitted


def test_instances_and_stages(testbed: Bed) -> None:
    kind = Kind("A100", "Llama-3-8B", limits=EngineLimits(batched_tokens=512), slowed=2.0)
    first, second = instances(testbed, kind, Role.DECODE, 2, "x")
    assert (first.instance_id, second.instance_id, first.model) == ("x-0", "x-1", second.model)
    assert first.model.decode_time_s(4, 400) == 2.0 * testbed.model("A100", "Llama-3-8B").decode_time_s(4, 400)
    assert weighed(first, 3.0).rates.weight == 3.0
    link = Link(1e10, 1e-4)
    halves, whole = (
        staged(testbed, "pp", "Llama-3-8B", stages, Role.DECODE, EngineLimits(), link, link)
        for stages in ((Stage("A100", 16), Stage("A10", 16)), (Stage("A100", 32),))
    )
    assert (halves.lanes, whole.lanes) == (2, 1)
    assert halves.kv_tokens < testbed.kv_tokens("A100", "Llama-3-8B") == whole.kv_tokens
    assert in_turn(halves).model.decode_time_s(8, 800) > 1.2 * halves.model.decode_time_s(8, 800)


def test_huaweis_estimate_packs_batches_by_their_longest(testbed: Bed) -> None:
    requests = [(10, 10), (10, 10), (30, 10), (5, 5)]
    assert list(packed(80, requests)) == [((10, 10), (10, 10)), ((30, 10), (5, 5))]
    assert list(packed(1, requests)) == [(request,) for request in requests]
    cost = batch_cost(testbed.model("A100", "Llama-3-8B"))
    more, less = (estimated_throughput(cost, tokens, [(200, 200)] * 50) for tokens in (20_000, 2_000))
    assert more > less


def test_rows_that_need_no_simulation(testbed: Bed) -> None:
    """A guard on the cost model: what the papers measured of single steps and transfers stays reproduced."""
    missed = []
    for name, figures in (("tetriinfer", interference(testbed)), ("thunderserve", kv_figures(testbed))):
        claims = claims_of(name)
        missed += [key for key, figure in figures.items() if not row_of(key, claims[key], figure).met]
    assert missed == ["hp_ld"]


def test_zte_formulas(testbed: Bed) -> None:
    device, model = testbed.catalogue.get("ZTE-GPU-A"), testbed.geometry("Llama-2-7B")
    assert first_token_s(device, model, 1024, Shares()) == pytest.approx(1024 * 2 * 6.6e9 / 312e12, rel=0.1)
    assert output_token_s(device, model, 1, 0, Shares()) == pytest.approx(13.5e9 / 2.039e12, rel=0.02)


def test_systems_of_cronus_on_a_few_requests(testbed: Bed) -> None:
    workload = synthetic(60, 800, 100)
    rates = {system: requests_per_s(run_system(testbed, COLUMNS[0], system, workload)) for system in SYSTEMS}
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


@pytest.mark.parametrize(
    ("kind", "claimed", "figure", "paper", "ours", "held"),
    [
        ("gain", -50.0, -36.0, "-50", "-36", {"sign": True, "magnitude": True}),
        ("gain", -50.0, -34.0, "-50", "-34", {"sign": True, "magnitude": False}),
        ("gain", -50.0, 40.0, "-50", "+40", {"sign": False, "magnitude": False}),
        ("gain", -50.0, -1.1e-14, "-50", "+0", {"sign": False, "magnitude": False}),
        ("ratio", 2.0, 1.71, "2", "1.71", {"sign": True, "magnitude": True}),
        ("ratio", 2.0, 1.69, "2", "1.69", {"sign": True, "magnitude": False}),
        ("ratio", 0.8, 1.01, "0.8", "1.01", {"sign": False, "magnitude": False}),
        ("slowdown", 8.0, 10.3, "8", "10.3", {"sign": True, "magnitude": True}),
        ("value", 100.0, 131.0, "100", "131", {"magnitude": False}),
        ("about", 0.0, -0.2, "~0", "-0.2", {"magnitude": True}),
        ("range", (16.0, 30.0), 31.0, "16–30", "31", {"magnitude": False}),
        ("range", (10.0,), 30.0, "> 10", "30", {"magnitude": True}),
        ("none", 0.0, 13.0, "", "13", {}),
    ],
)
def test_rows(
    kind: str, claimed: float | tuple[float, ...], figure: float, paper: str, ours: str, held: dict[str, bool]
) -> None:
    row = row_of("k", Claim("F", "x", ClaimKind(kind), claimed), figure)
    assert (row.paper, row.ours) == (paper, ours)
    assert dict(row.checks) == {Check(name): met for name, met in held.items()}
    assert row.met == all(held.values())


GAIN = row_of("gain_1", Claim("Fig 9", "throughput", ClaimKind.GAIN, 17.0), 8.0)


def test_a_miss_has_its_note_in_the_result() -> None:
    formula = row_of("eq", Claim("eq", "y", ClaimKind.NONE, unit="ms"), 2.0)
    result = as_result([with_prose(Section("zte", "ZTE: x", (GAIN, formula)))])
    assert result["aims"]["zte_gain_1_sign"] == {"want": "sign of +17", "got": "+8", "met": True}
    missed = result["aims"]["zte_gain_1_magnitude"]
    assert not missed["met"]
    assert missed["want"] == "11.9 … 22.1"
    assert "GPU A falls behind" in missed["note"]
    assert result["figures"] == {"zte_gain_1_percent": 8.0, "zte_gain_1_paper_percent": 17.0, "zte_eq_ms": 2.0}
    assert len(result["notes"]) == 1


def test_every_paper_has_its_texts() -> None:
    for name in ("cronus", "tetriinfer", "huawei", "thunderserve", "zte"):
        section = with_prose(Section(name, name, ()))
        assert section.setup
        assert section.differs


def test_the_page_shows_rows_marks_and_texts() -> None:
    order = row_of("b", Claim("Fig 7", "ratio", ClaimKind.ORDER, shown="yes"), ("yes", True))
    section = Section("zte", "ZTE: two vendors", (GAIN, order), ("the setup",), ("no expert parallelism",))
    text = page_text([section], "engine: 1")
    assert "| Fig 9 | throughput | +17 % | +8 % | ✔ | ✘ |" in text
    assert "| Fig 7 | ratio | yes | yes | ✔ | – |" in text
    assert "| [ZTE](#zte-two-vendors) | 2 | 2 of 2 | 0 of 1 |" in text
    assert "- **Fig 9, throughput**: no explanation yet." in text
    assert "### Otherwise, or not here\n\n- no expert parallelism\n" in text
    assert "engine: 1" in text
