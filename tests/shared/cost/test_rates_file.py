"""The calibration file: what is written is read back, errors name the file; and the models that it describes."""

from pathlib import Path

import msgspec
import pytest

from shared.cost.library import Library
from shared.cost.rates_file import CalibratedKind, Calibration, ControlPlane, Kind, merged_rates, scaled_rates
from shared.cost.step import Batch
from shared.domain.instance import Compatibility, InstanceInfo, KvGeometry
from shared.domain.rates import ChunkedCost, HuaweiCost, PartialPrefillCost, Rates
from shared.errors import InvalidRequest, NotFound

RATES = Rates(PartialPrefillCost(1e-4, 0.01), ChunkedCost(1e-6, 1e-7, 0.05), HuaweiCost(1, 2, 3, 4, 5, 6, 7, 8))
KIND = Kind("vllm", "cpu", "demo", "float32", 1, 1)


def calibrated(**more: object) -> CalibratedKind:
    values: dict[str, object] = {
        "kind": KIND,
        "geometry": "Llama-3-8B",
        "instances": ("p0", "d0"),
        "samples": 100,
        "mape_percent": 12.5,
        "naive_mape_percent": 90.0,
        "bias_percent": -0.5,
        "compute_factor": 0.5,
        "bandwidth_factor": 0.25,
        "step_s": 2e-3,
        "sequence_s": 1e-4,
        "scale": 1.1,
        "chunk_s": 3e-3,
        "slowdown": (1.0, 1.25),
        "saturation_tokens": 256,
        "rates": RATES,
        **more,
    }
    return CalibratedKind(**values)  # type: ignore[arg-type]


def info(fingerprint: str = "abc", engine: str = "vllm", model: str = "/models/demo") -> InstanceInfo:
    compatibility = Compatibility(fingerprint, engine, "1", 2, KvGeometry(6, 2, 64))
    addresses = ("tcp://h:1", "http://h:2", ())
    return InstanceInfo("p0", 1, model, compatibility, "cpu", "float32", 1, 32, 100, 2048, 512, *addresses)


def test_a_file_is_read_back(tmp_path: Path) -> None:
    before = Calibration("2026-01-01", "2 × prefill", ControlPlane(0.005, 0.001, 0.002, 0.003, 1e9), (calibrated(),))
    file = tmp_path / "calibration.yaml"
    file.write_text(before.to_yaml())
    assert Calibration.read(file) == before
    assert "polyphase calibrate live" in file.read_text().splitlines()[0]


@pytest.mark.parametrize(("text", "said"), [("kinds: 3", "kinds"), ("[1]", "mapping"), ("date: [", "not valid YAML")])
def test_a_wrong_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=rf"wrong\.yaml.*{said}"):
        Calibration.read(file)


def test_a_kind_is_found_by_what_an_instance_is() -> None:
    calibration = Calibration("d", "c", ControlPlane(), (calibrated(),))
    assert Kind.of(info(), 1) == KIND
    assert calibration.of(Kind.of(info(), 1)).samples == 100
    with pytest.raises(NotFound, match=r"not calibrated: .*threads 4; calibrated: .*threads 1"):
        calibration.of(Kind.of(info(), 4))


def test_an_emulated_instance_is_of_the_model_that_it_imitates() -> None:
    kind = Kind.of(info("emulated:Llama-3-8B", "emulated"), 1)
    assert (kind.engine, kind.model) == ("emulated", "Llama-3-8B")


def test_step_times_are_those_of_the_fitted_model(library: Library) -> None:
    plain = library.step_model("cpu", "Llama-3-8B", dtype="float32")
    times = calibrated().step_times(library)
    batch = Batch(((512, 0),), 4, 400)
    assert times.step_time_s(batch) > 1.1 * 2.0 * (plain.step_time_s(batch) - plain.efficiencies.step_s) * 0.9
    assert times.step_time_s(batch) - 1.1 * times.model.step_time_s(batch) == pytest.approx(3e-3)
    assert times.prefill_time_s(64) == times.step_time_s(Batch(((64, 0),)))
    assert times.decode_time_s(2, 200) == pytest.approx(times.step_time_s(Batch((), 2, 200)))
    steps = times.decode_segments(2, 200, 10)
    assert sum(taken for taken, _, _ in steps) == 10
    assert steps[0][1] == pytest.approx(times.decode_time_s(2, 200))
    assert times.times(2.0).step_time_s(batch) == pytest.approx(2.0 * times.step_time_s(batch))


def test_rates_scale_and_keep_their_price() -> None:
    twice = scaled_rates(RATES, 2.0)
    assert twice.prefill == PartialPrefillCost(2e-4, 0.02)
    assert twice.batch == HuaweiCost(2, 4, 6, 8, 10, 12, 14, 16)
    assert scaled_rates(Rates(), 2.0) == Rates()
    chunked = scaled_rates(RATES, 1.0, 0.008, 400)
    assert chunked.prefill == PartialPrefillCost(1e-4 + 2e-5, 0.014)
    assert chunked.chunked == ChunkedCost(1e-6, 1e-7, 0.058)
    assert chunked.batch == HuaweiCost(1, 2.008, 3, 4, 5, 6, 7, 8)
    known = Rates(price_per_hour=3.0, weight=2.0)
    assert merged_rates(known, RATES) == msgspec.structs.replace(RATES, price_per_hour=3.0, weight=2.0)
