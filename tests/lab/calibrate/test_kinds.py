"""From records of steps to kinds of instances."""

from random import Random

import pytest

from lab.calibrate.live import fit_kinds
from shared.cost.library import Library
from shared.cost.step import Batch
from shared.domain.instance import Compatibility, InstanceInfo, KvGeometry, Role
from shared.errors import InvalidRequest
from shared.sim.measured import LiveInstance
from shared.wire.messages import StepRecord

LIBRARY = Library.built_in()


def live(name: str, accelerator: str, threads: int = 1) -> LiveInstance:
    compatibility = Compatibility("abc", "vllm", "1", 2, KvGeometry(32, 8, 128))
    info = InstanceInfo(
        name,
        1,
        "Llama-3-8B",
        compatibility,
        accelerator,
        "bfloat16",
        1,
        16,
        5000,
        4096,
        512,
        "tcp://h:1",
        "http://h:2",
        (),
    )
    return LiveInstance(info, Role.DECODE, "h", threads)


def steps(accelerator: str, slower: float, seed: int) -> list[StepRecord]:
    """Steps of the catalogue's accelerator, all times `slower`."""
    model, rng, now, found = LIBRARY.step_model(accelerator, "Llama-3-8B", dtype="bfloat16"), Random(seed), 1000.0, []
    for number in range(400):
        decodes = rng.randint(0, 12)
        chunks = ((rng.randint(8, 512), 0),) if rng.random() < 0.4 or not decodes else ()
        batch = Batch(chunks, decodes, decodes * rng.randint(50, 800))
        seconds = slower * model.step_time_s(batch)
        now += seconds + 0.001
        found.append(StepRecord(number, now, seconds, 0.0, chunks, decodes, batch.decode_context_tokens))
    return found


def test_each_kind_is_fitted_from_all_of_its_instances() -> None:
    instances = (live("a0", "A100-SXM-80"), live("b0", "A10"), live("a1", "A100-SXM-80"), live("a2", "A100-SXM-80", 2))
    recorded = {
        "a0": steps("A100-SXM-80", 2.0, 1),
        "a1": steps("A100-SXM-80", 2.0, 2),
        "a2": steps("A100-SXM-80", 4.0, 3),
        "b0": steps("A10", 1.5, 4),
    }
    found = {one.kind: one for one in fit_kinds(instances, recorded, LIBRARY)}
    assert {one.instances for one in found.values()} == {("a0", "a1"), ("b0",), ("a2",)}
    fast = found[instances[0].kind]
    assert fast.samples == 800
    assert fast.mape_percent < 15 < fast.naive_mape_percent
    assert fast.rates.prefill is not None
    slow = found[instances[3].kind]
    batch = Batch(((256, 0),), 4, 1600)
    ratio = slow.step_times(LIBRARY).step_time_s(batch) / fast.step_times(LIBRARY).step_time_s(batch)
    assert ratio == pytest.approx(2.0, rel=0.2)
    assert 64 <= fast.saturation_tokens <= 4096


def test_an_instance_that_did_nothing() -> None:
    with pytest.raises(InvalidRequest, match="0 timed steps are too few"):
        fit_kinds((live("a0", "A10"),), {}, LIBRARY)
