"""What coding costs is measured for each lossy codec that the model's KV can have."""

import torch

from services.worker.kv.codec_speed import codec_speeds
from shared.domain.instance import KvGeometry


def test_every_lossy_codec_has_its_speeds() -> None:
    rates = codec_speeds(KvGeometry(2, 4, 64), torch.bfloat16)
    assert set(rates) == {"int8", "int4", "fp8"}
    for rate in rates.values():  # between a thousandth and a thousand times of what any machine does
        assert 1e5 < rate.encode_bytes_s < 1e13
        assert 1e5 < rate.decode_bytes_s < 1e13


def test_int4_needs_an_even_head() -> None:
    assert set(codec_speeds(KvGeometry(2, 4, 63), torch.float32)) == {"int8", "fp8"}
