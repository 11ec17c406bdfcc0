"""TetriInfer, Figures 2 to 5: how requests in one batch slow each other down. Only the step model is needed.

Light prefill: 18 prompt tokens. Heavy prefill: 512. Light decode: 20–100 tokens, so 48 of context on average (18 + half
of 60). Heavy decode: more than 512 tokens, so 274 (18 + half of 512). Source: sections 2.2.1–2.2.3.
"""

from lab.papers.chart import Chart
from lab.papers.clusters import change
from lab.papers.rows import Row, between, factor, gain, order
from lab.papers.testbed import Testbed
from shared.cost.linear import saturation_tokens
from shared.cost.step import Batch, StepModel

LIGHT, HEAVY = (18, 0), (512, 0)
LIGHT_CONTEXT, HEAVY_CONTEXT = 48, 274
ACCELERATOR, MODEL, DEGREE = "V100-32-PCIe", "OPT-13B", 2


def micro_rows(testbed: Testbed) -> tuple[tuple[Row, ...], Chart]:
    """The rows, and a chart of the slow-downs."""
    model = testbed.model(ACCELERATOR, MODEL, DEGREE)
    threshold = saturation_tokens(model.prefill_time_s)
    rows = (
        order(
            "saturation",
            "Fig 2",
            "tokens a step at which prefill saturates (ChunkSize)",
            "512",
            str(threshold),
            threshold == 512,
        ),
        *_slowdowns(model),
        *_mixed_decodes(model),
    )
    factors = [row for row in rows if row.unit == "x" and row.claimed is not None]
    chart = Chart(
        "tetriinfer_interference",
        "TetriInfer, Figs 3–4: slow-down beside others in the batch",
        "x",
        tuple(row.what for row in factors),
        {"paper": [row.claimed or 0.0 for row in factors], "ours": [row.figure or 0.0 for row in factors]},
    )
    return rows, chart


def _slowdowns(model: StepModel) -> tuple[Row, ...]:
    def beside(alone: Batch, together: Batch) -> float:
        return model.step_time_s(together) / model.step_time_s(alone)

    light, heavy, decode = Batch((LIGHT,)), Batch((HEAVY,)), _decodes((), 1)
    return (
        factor("lp_7lp", "Fig 3a", "light prefill, 7 light beside it", 2.0, beside(light, Batch((LIGHT,) * 8))),
        factor("lp_63lp", "Fig 3a", "light prefill, 63 light beside it", 8.0, beside(light, Batch((LIGHT,) * 64))),
        between(
            "lp_hp",
            "Fig 3b",
            "light prefill, 7 heavy beside it",
            "x",
            10.0,
            float("inf"),
            beside(light, Batch((LIGHT, *(HEAVY,) * 7))),
        ),
        factor(
            "hp_lp", "Fig 3c", "heavy prefill, 63 light beside it", 3.0, beside(heavy, Batch((HEAVY, *(LIGHT,) * 63)))
        ),
        factor(
            "ld_hp", "Fig 4b", "light decode, a heavy prefill beside it", 5.0, beside(decode, _decodes((HEAVY,), 1))
        ),
        factor(
            "lp_ld", "Fig 4c", "light prefill, 127 light decodes beside it", 2.5, beside(light, _decodes((LIGHT,), 127))
        ),
        factor(
            "hp_ld", "Fig 4d", "heavy prefill, 127 light decodes beside it", 2.5, beside(heavy, _decodes((HEAVY,), 127))
        ),
    )


def _mixed_decodes(model: StepModel) -> tuple[Row, ...]:
    """A batch of 128, half of it heavy, against all light."""
    all_light = model.decode_time_s(128, 128 * LIGHT_CONTEXT)
    half_heavy = model.decode_time_s(128, 64 * (LIGHT_CONTEXT + HEAVY_CONTEXT))
    what = "batch of 128, half heavy"
    return (
        gain("dd_throughput", "Fig 5", f"{what}: throughput", -16.0, change(all_light, half_heavy)),
        gain("dd_latency", "Fig 5", f"{what}: latency", 23.0, change(half_heavy, all_light)),
    )


def _decodes(chunks: tuple[tuple[int, int], ...], count: int) -> Batch:
    return Batch(chunks, count, count * LIGHT_CONTEXT)
