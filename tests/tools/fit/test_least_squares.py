import numpy as np
import pytest

from shared.cost.library import Library
from shared.cost.operators import VarlenAttention
from shared.errors import InvalidRequest
from tools.fit.forms import all_reduce_form, decode_form, elementwise_form, gemm_form, varlen_form
from tools.fit.least_squares import AllReduceRows, AttentionRows, ElementwiseRows, Floats, GemmRows, fit, mape


def _noisy(times: Floats, seed: int = 3) -> Floats:
    return np.asarray(times * np.random.default_rng(seed).normal(1.0, 0.03, len(times)))


def _gemm_shapes() -> tuple[Floats, Floats, Floats]:
    grid = [(m, n, k) for m in (1, 8, 64, 128, 512, 2048) for n in (512, 4096, 14336) for k in (512, 4096, 8192)]
    m, n, k = (np.array(column, dtype=np.float64) for column in zip(*grid, strict=True))
    return m, n, k


def test_products_are_learned_from_half_of_a_table(library: Library) -> None:
    accelerator = library.catalogue.get("A100")
    form = gemm_form(accelerator, "bf16", quantised=False, cached=False)
    m, n, k = _gemm_shapes()
    truth = library.efficiencies.for_device("A40").gemm_for("bf16")
    exact = form.predict(truth, GemmRows(np.ones(len(m)), m, n, k, "bf16"))
    got = fit(form, GemmRows(_noisy(exact), m, n, k, "bf16"))
    assert got.rows == len(m) == 54
    assert 15 < got.held_out < 40
    assert got.mape < 0.06 < got.naive_mape


def test_the_same_seed_gives_the_same_constants(library: Library) -> None:
    accelerator = library.catalogue.get("A100")
    moved = np.geomspace(1e3, 1e9, 40)
    rows = ElementwiseRows(_noisy(3e-6 + moved / 1.5e12), moved)
    form = elementwise_form(accelerator)
    assert fit(form, rows, seed=5) == fit(form, rows, seed=5)
    assert fit(form, rows).mape < 0.05


def test_all_reduces_are_learned(library: Library) -> None:
    accelerator = library.catalogue.get("H100")
    form = all_reduce_form(accelerator)
    moved, ranks = (x.ravel() for x in np.meshgrid(np.geomspace(128, 5e8, 23), [2.0, 4.0, 8.0]))
    truth = library.efficiencies.for_device("H100-SXM").collective
    exact = form.predict(truth, AllReduceRows(np.ones(len(moved)), moved, ranks))
    assert fit(form, AllReduceRows(_noisy(exact), moved, ranks)).mape < 0.06


def _attention(decodes: bool) -> AttentionRows:
    grid = [(b, c, h) for b in (1, 4, 16, 64, 256) for c in (16, 128, 1024, 8192) for h in (8, 32)]
    b, c, h = (np.array(column, dtype=np.float64) for column in zip(*grid, strict=True))
    none, kv = np.zeros(len(b)), np.minimum(h, 8.0)
    if decodes:
        return AttentionRows(
            seconds=np.ones(len(b)),
            sequences=none,
            tokens=none,
            context=none,
            decodes=b,
            decode_context=c,
            heads=h,
            kv_heads=kv,
            head_dim=128,
            kv_precision="bf16",
            kv_width=2.0,
        )
    return AttentionRows(
        seconds=np.ones(len(b)),
        sequences=np.ones(len(b)),
        tokens=b * 8.0,
        context=c,
        decodes=none,
        decode_context=none,
        heads=h,
        kv_heads=kv,
        head_dim=128,
        kv_precision="bf16",
        kv_width=2.0,
    )


def _with(rows: AttentionRows, seconds: Floats) -> AttentionRows:
    values = {name: getattr(rows, name) for name in rows.__dataclass_fields__}
    return AttentionRows(**{**values, "seconds": seconds})


def test_attention_is_learned(library: Library) -> None:
    accelerator = library.catalogue.get("A100")
    constants = library.efficiencies.for_device("A100-SXM-80")
    decode, rows = decode_form(accelerator), _attention(True)
    got = fit(decode, _with(rows, _noisy(decode.predict(constants.decode_for("bf16"), rows))))
    assert got.mape < 0.08
    prefill, rows = varlen_form(accelerator, mixed=False, packs_groups=False), _attention(False)
    learned = fit(prefill, _with(rows, _noisy(prefill.predict(constants.varlen_for("bf16"), rows))))
    assert learned.mape < 0.08


def test_tables_without_contexts_do_not_judge_the_triangle(library: Library) -> None:
    accelerator = library.catalogue.get("A100")
    form = varlen_form(accelerator, mixed=False, packs_groups=False, contexts=False)
    rows = _attention(False).where(_attention(False).context > 0)
    operator = fit(form, _with(rows, form.naive(rows) * 2.0 + 1e-5)).operator
    assert isinstance(operator, VarlenAttention)
    assert operator.triangle == 0.5


def test_bad_tables_are_named(library: Library) -> None:
    form = elementwise_form(library.catalogue.get("A100"))
    with pytest.raises(InvalidRequest, match="elementwise: 3 rows are too few to fit, 8 are needed"):
        fit(form, ElementwiseRows(np.ones(3), np.ones(3)))
    times = np.ones(20)
    times[7] = -1.0
    with pytest.raises(InvalidRequest, match=r"elementwise: row 7 has a time of -1.0 s"):
        fit(form, ElementwiseRows(times, np.ones(20)))


def test_mape_by_hand() -> None:
    assert mape(np.array([1.1, 0.8]), np.array([1.0, 1.0])) == pytest.approx(0.15)
