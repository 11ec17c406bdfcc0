"""The calibration file: what is written is read back, errors name the file; and the models that it describes."""

from pathlib import Path

import msgspec
import pytest
import yaml

from shared.cost.library import Library
from shared.cost.rates_file import Calibration, ControlPlane, Kind
from shared.cost.step import Batch
from shared.domain.instance import Compatibility, InstanceInfo, KvGeometry
from shared.domain.rates import UNKNOWN_STEPS, CodecRate, LinkRate, Rates
from shared.errors import InvalidRequest, NotFound
from tests.shared.cost.calibrations import FIT, KIND, calibrated


def info(fingerprint: str = "abc", engine: str = "vllm", model: str = "/models/demo") -> InstanceInfo:
    compatibility = Compatibility(fingerprint, engine, "1", 2, KvGeometry(6, 2, 64))
    return InstanceInfo(
        instance_id="p0",
        generation=1,
        model=model,
        compatibility=compatibility,
        accelerator="cpu",
        dtype="float32",
        tensor_parallel=1,
        block_size=32,
        total_blocks=100,
        max_model_len=2048,
        chunk_size=512,
        rpc="tcp://h:1",
        http="http://h:2",
        kv_endpoints=(),
    )


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
    assert Kind.from_info(info(), 1) == KIND
    assert calibration.for_kind(Kind.from_info(info(), 1)).samples == 100
    with pytest.raises(NotFound, match=r"not calibrated: .*threads 4; calibrated: .*threads 1"):
        calibration.for_kind(Kind.from_info(info(), 4))


def test_an_emulated_instance_is_of_the_model_that_it_imitates() -> None:
    kind = Kind.from_info(info("emulated:Llama-3-8B", "emulated"), 1)
    assert (kind.engine, kind.model) == ("emulated", "Llama-3-8B")


def test_step_times_are_those_of_the_fitted_model(library: Library) -> None:
    plain = library.step_model("cpu", "Llama-3-8B", dtype="float32")
    halves = {"compute_factor": 0.5, "bandwidth_factor": 0.25, "step_s": 2e-3, "sequence_s": 1e-4}
    times = calibrated(**halves, scale=1.1, chunk_s=3e-3).step_times(library)
    batch = Batch(((512, 0),), 4, 400)
    assert times.step_time_s(batch) > 1.1 * 2.0 * (plain.step_time_s(batch) - plain.efficiencies.step_s) * 0.9
    assert times.step_time_s(batch) - 1.1 * times.model.step_time_s(batch) == pytest.approx(3e-3)
    assert times.prefill_time_s(64) == times.step_time_s(Batch(((64, 0),)))
    assert times.decode_time_s(2, 200) == pytest.approx(times.step_time_s(Batch((), 2, 200)))
    steps = times.decode_segments(2, 200, 10)
    assert sum(taken for taken, _, _ in steps) == 10
    assert steps[0][1] == pytest.approx(times.decode_time_s(2, 200))
    assert times.times(2.0).step_time_s(batch) == pytest.approx(2.0 * times.step_time_s(batch))


def test_rates_of_an_instance_of_the_kind() -> None:
    known = Rates(UNKNOWN_STEPS, LinkRate(1.0), {"int8": CodecRate(1.0, 2.0)}, price_per_hour=3.0, weight=2.0)
    assert calibrated().applied_to(known) == Rates(FIT, None, known.codecs, 3.0, 2.0)


def test_a_file_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    """Its rates also had the costs of papers, and no source."""
    plain = msgspec.to_builtins(Calibration("2026-01-01", "c", ControlPlane(), (calibrated(),)))
    rates = plain["kinds"][0]["rates"]
    del rates["step"]["source"]
    rates |= {"prefill": {"k_p": 1e-4, "b_p": 0.01}, "chunked": {"k_ctxp": 1e-6, "k_ctxd": 1e-7, "b_c": 0.05}}
    rates["batch"] = {f"p{number}": 0.001 for number in range(1, 9)}
    file = tmp_path / "old.yaml"
    file.write_text(yaml.safe_dump(plain))
    (kind,) = Calibration.read(file).kinds
    assert kind.applied_to(Rates()) == Rates(FIT)
    del rates["step"]  # of a still earlier one
    file.write_text(yaml.safe_dump(plain))
    assert Calibration.read(file).kinds[0].applied_to(Rates(weight=2.0)) == Rates(weight=2.0)
