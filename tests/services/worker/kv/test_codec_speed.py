"""What coding costs is measured for each lossy codec that the model's KV can have."""

import time

import pytest
import torch

from services.worker.kv import codec
from services.worker.kv.codec import codec_speeds
from shared.domain.instance import KvGeometry


def test_every_lossy_codec_has_its_speeds() -> None:
    rates = codec_speeds(KvGeometry(2, 4, 64), torch.bfloat16)
    assert set(rates) == {"int8", "int4", "fp8"}
    for rate in rates.values():  # between a thousandth and a thousand times of what any machine does
        assert 1e5 < rate.encode_bytes_s < 1e13
        assert 1e5 < rate.decode_bytes_s < 1e13


def test_int4_needs_an_even_head() -> None:
    assert set(codec_speeds(KvGeometry(2, 4, 63), torch.float32)) == {"int8", "fp8"}


def test_what_only_the_first_calls_cost_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, lasts_s = 0.0, iter([0.5, 0.4, 0.3, 0.2, *[0.1] * 8, *[0.3] * 7])

    def work() -> None:
        nonlocal now_s
        now_s += next(lasts_s)

    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    assert codec._time_s(work) == pytest.approx(0.1)
    assert next(lasts_s, None) is None
