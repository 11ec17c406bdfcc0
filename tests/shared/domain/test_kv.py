import pytest
import torch

from services.worker.kv.codec import payload_bytes
from shared.domain.kv import Codec, default_staging, wire_share


@pytest.mark.parametrize(("kv", "longest", "staging"), [(4000, 100, 1000), (4000, 1500, 1500), (0, 7, 7)])
def test_a_quarter_of_the_kv_waits_and_at_least_the_longest_prompt(kv: int, longest: int, staging: int) -> None:
    assert default_staging(kv, longest) == staging


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_a_value_takes_on_the_wire_is_what_the_codec_makes_of_it(
    codec: Codec, head_dim: int, dtype: torch.dtype
) -> None:
    shape = (2, 2, 32 * 512, 4, head_dim)  # long, and in whole groups: units and scales of fp8 vanish
    values = 2 * 2 * 32 * 512 * 4 * head_dim
    bits = 8.0 * payload_bytes(shape, dtype, codec) / values
    assert bits == pytest.approx(8.0 * dtype.itemsize * wire_share(codec, dtype.itemsize, head_dim), rel=1e-3)


def test_bits_of_a_value_with_scales_and_zeros() -> None:
    shape = (1, 2, 32 * 4096, 1, 128)
    bits = {codec: 8.0 * payload_bytes(shape, torch.bfloat16, codec) / (2 * 32 * 4096 * 128) for codec in Codec}
    assert bits[Codec.INT8] == pytest.approx(8.75, abs=1e-4)
    assert bits[Codec.INT4] == pytest.approx(4.75, abs=1e-4)
    assert bits[Codec.FP8] == pytest.approx(8.0, abs=1e-4)
