"""`engine_args`: what an instance cannot follow, and what vLLM does not have, is refused by name."""

import json
import os
from dataclasses import fields

import pytest
from pydantic import ValidationError

from services.worker.engine_args import NAMES, REFUSED, Names, faults_of, known
from tests.services.worker.test_settings import settings

WRITE = "POLYPHASE_WRITE_ENGINE_ARGS"  # set it to write the names anew, after a new version of vLLM was looked at


def test_the_names_are_of_the_vllm_that_is_installed() -> None:
    from vllm import __version__
    from vllm.engine.arg_utils import EngineArgs

    found = {each.name for each in fields(EngineArgs) if each.init and not each.name.startswith("_")}
    if os.environ.get(WRITE):
        NAMES.write_text(json.dumps({"vllm": __version__, "names": sorted(found)}, indent=0) + "\n")
        known.cache_clear()
    assert known() == Names(__version__, frozenset(found)), f"set {WRITE}=1 and run this test to write the names"


@pytest.mark.parametrize("name", [name for refusal in REFUSED for name in refusal.names])
def test_each_refused_argument_exists_and_is_refused_with_its_reason(name: str) -> None:
    (refusal,) = (each for each in REFUSED if name in each.names)
    assert name in known().names
    assert list(faults_of({name: "anything"})) == [f"{name}: {refusal.reason}"]
    assert not [fault for each in refusal.harmless for fault in faults_of({name: each})]


def test_true_is_not_the_number_one() -> None:
    assert list(faults_of({"data_parallel_size": True}))


def test_a_name_that_vllm_does_not_have_is_refused_with_what_was_meant() -> None:
    (fault,) = faults_of({"gpu_memory_utilisation": 0.5})
    assert fault.endswith("has no such engine argument; did you mean gpu_memory_utilization?")


def test_what_is_not_refused_passes() -> None:
    args = {"gpu_memory_utilization": 0.5, "quantization": "fp8", "speculative_config": {"method": "ngram"}, "seed": 3}
    assert not list(faults_of(args))


def test_settings_refuse_all_of_them_at_once() -> None:
    with pytest.raises(ValidationError) as refused:
        settings(engine_args={"enable_lora": True, "block_size": 64, "swap": 1})
    lines = refused.value.errors()[0]["msg"].removeprefix("Value error, ").split("\n")
    assert [line.split(": ")[:2] for line in lines] == [
        ["engine_args", "enable_lora"],
        ["engine_args", "block_size"],
        ["engine_args", "swap"],
    ]
