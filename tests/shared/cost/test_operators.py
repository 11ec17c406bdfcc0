from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.cost.library import Library
from shared.cost.operators import Collective, Device, Elementwise, Gemm, Memory, Mlp, Quantisation

DEVICE = Device(flops=100e12, bandwidth=1e12, units=100)
FLAT = Memory(share=0.5, cache_share=0.5, cache_bytes=1e6)
PLAIN = Gemm(
    overhead_s=1e-6,
    compute=0.5,
    tile_penalty=0.0,
    depth_s=0.0,
    split_s=1.0,
    sharpness=12.0,
    weights=FLAT,
    activations=FLAT,
)


def test_a_memory_bound_product_by_hand() -> None:
    # One row: 2 · 4096 · 4096 bytes of weights at 0.5 TB/s, and the vectors.
    moved = 2 * 4096 * 4096 + 2 * 4096 + 2 * 4096
    assert PLAIN.time_s(1.0, 4096, 4096, 2.0, DEVICE) == pytest.approx(1e-6 + moved / 0.5e12, rel=1e-3)


def test_a_compute_bound_product_by_hand() -> None:
    # 4096 × 4096 in tiles of 128 × 128: 1024 tiles are 11 waves of 100 units. Larger tiles waste more of their last
    # wave (512 tiles: 6 waves of twice the work), and smaller ones are slow here.
    waves = 11 * 2 * 128 * 128 * 4096 / (0.5 * 1e12)
    got = replace(PLAIN, tile_penalty=3.0).time_s(4096.0, 4096, 4096, 2.0, DEVICE)
    assert got == pytest.approx(1e-6 + waves, rel=1e-3)
    # Where small tiles cost nothing, hardly any wave is wasted.
    assert PLAIN.time_s(4096.0, 4096, 4096, 2.0, DEVICE) == pytest.approx(2 * 4096**3 / 50e12, rel=0.01)


def test_experts_pad_each_their_own_tiles() -> None:
    apart = PLAIN.time_s(64.0, 1024, 1024, 2.0, DEVICE, count=16.0)
    together = PLAIN.time_s(64.0, 1024, 1024, 2.0, DEVICE)
    assert apart > together  # sixteen weight matrices to read


def test_memory_cold_gains_nothing_from_the_cache() -> None:
    cached = Memory(share=0.5, cache_share=2.0, cache_bytes=1e6)
    assert cached.time_s(1e4, DEVICE) == pytest.approx(1e4 / 2e12)
    assert cached.time_s(1e4, DEVICE, cold=True) == pytest.approx(1e4 / 0.5e12)
    assert cached.time_s(1e9, DEVICE) == pytest.approx(1e9 / 0.5e12)
    slow_when_small = Memory(share=0.8, cache_share=0.6, cache_bytes=1e6)
    assert slow_when_small.time_s(1e4, DEVICE, cold=True) == pytest.approx(1e4 / 0.6e12)


@given(st.floats(1.0, 1e12), st.floats(1.0, 1.5), st.floats(0.65, 8.0))
def test_more_bytes_take_longer(moved: float, more: float, gain: float) -> None:
    memory = Memory(share=0.8, cache_share=0.8 * gain, cache_bytes=3e7)
    assert memory.time_s(moved * more, DEVICE) >= memory.time_s(moved, DEVICE) * (1 - 1e-9)


def test_quantising_is_not_paid_where_it_is_fused() -> None:
    quantised = replace(PLAIN, quantisation=Quantisation(1e-5, 1e-9, 1.0, 4.0, 2.0))
    alone = quantised.time_s(64.0, 4096, 4096, 1.0, DEVICE)
    fused = quantised.time_s(64.0, 4096, 4096, 1.0, DEVICE, cold=True)
    assert alone > fused + 1e-5


def test_numbers_and_arrays_agree() -> None:
    m = np.array([1.0, 7.0, 64.0, 1000.0])
    together = PLAIN.time_s(m, 4096, 1024, 2.0, DEVICE)
    assert together == pytest.approx([PLAIN.time_s(x, 4096, 1024, 2.0, DEVICE) for x in m])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8000), st.integers(1, 500), st.sampled_from(["A100", "H100", "L40S", "4090", "A40", "MI300X"]))
def test_more_rows_never_take_less(library: Library, rows: int, more: int, name: str) -> None:
    accelerator = library.catalogue.get(name)
    device = Device(accelerator.flops("bf16"), accelerator.bandwidth_bytes_s, accelerator.compute_units)
    gemm = library.efficiencies.for_device(accelerator.name).gemm_for("bf16")
    for n, k in ((4096, 4096), (28672, 4096), (1024, 8192)):
        less = gemm.time_s(float(rows), n, k, 2.0, device, cold=True)
        assert gemm.time_s(float(rows + more), n, k, 2.0, device, cold=True) >= less * (1 - 1e-9)


def test_all_reduce_by_hand() -> None:
    one = Collective(latency_s=4e-6, latency_rank_s=1e-6, share=0.25, ring_latency_s=50e-6, ring_share=0.5)
    # 8 ranks: 1.75 times the bytes cross a link. Small: direct. Large: the ring is faster.
    assert one.all_reduce_s(1e4, 8.0, 100e9) == pytest.approx(12e-6 + 1.75e4 / 25e9)
    assert one.all_reduce_s(1e8, 8.0, 100e9) == pytest.approx(50e-6 + 1.75e8 / 50e9)
    contended = replace(one, contention=1.0)
    assert contended.all_reduce_s(1e8, 8.0, 100e9) == pytest.approx(50e-6 + 4 * 1.75e8 / 50e9)
    assert contended.all_reduce_s(1e8, 2.0, 100e9) == one.all_reduce_s(1e8, 2.0, 100e9)
    # Gathering and scattering are two rings, each of half the traffic.
    assert one.gather_scatter_s(1e8, 8.0, 100e9) == pytest.approx(2 * 50e-6 + 1.75e8 / 50e9)


def test_quantisation_that_cannot_be_fused_is_one_more_kernel_of_the_engine() -> None:
    quantisation = Quantisation(1e-5, 1e-9, 1.0, 4.0, 2.0)
    fused, apart = (replace(PLAIN, quantisation=replace(quantisation, fused=one)) for one in (True, False))
    times = [float(gemm.time_s(512.0, 4096.0, 4096.0, 1.0, DEVICE, cold=True)) for gemm in (PLAIN, fused, apart)]
    assert times[0] == times[1]
    work_s = float(quantisation.work_s(512.0, 4096.0, DEVICE.units))
    assert times[2] - times[0] == pytest.approx(PLAIN.overhead_s + work_s)
    assert quantisation.time_s(512.0, 4096.0, DEVICE.units) == pytest.approx(1e-5 + work_s)


def test_mlp_is_its_parts() -> None:
    activation = Elementwise(2e-6, FLAT)
    mlp = Mlp(PLAIN, activation)
    first = PLAIN.time_s(8.0, 512, 128, 2.0, DEVICE)
    second = PLAIN.time_s(8.0, 128, 256, 2.0, DEVICE)
    assert mlp.time_s(8.0, 512, 256, 128, 2.0, DEVICE) == pytest.approx(
        first + second + activation.time_s(8.0 * (512 + 256) * 2.0, DEVICE)
    )
