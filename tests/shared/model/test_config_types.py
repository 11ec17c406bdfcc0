"""Types of models for which no code of a repository is needed: the list is that of the installed libraries."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from vllm.transformers_utils.config import _ARCHITECTURE_TO_MODEL_TYPE, _CONFIG_REGISTRY

from shared.model import support
from shared.model.support import fault_of_remote_code

FILE = Path(support.__file__).with_name("config_types.json")
AUTO_MAP = {"auto_map": {"AutoConfig": "configuration_x.XConfig"}}


def test_the_list_is_that_of_the_installed_libraries() -> None:
    known = {*CONFIG_MAPPING_NAMES, *_CONFIG_REGISTRY, *_ARCHITECTURE_TO_MODEL_TYPE}
    assert json.loads(FILE.read_text()) == sorted(known), "write sorted(known) into the file"


@pytest.mark.parametrize(
    ("config", "needs"),
    [
        ({"model_type": "llama"}, False),
        ({"model_type": "own"}, False),  # without auto_map there is no code: vLLM names what it does not know
        ({"model_type": "own", **AUTO_MAP}, True),
        ({**AUTO_MAP}, True),
        ({"model_type": "deepseek_v3", **AUTO_MAP}, False),  # as its repository has it; transformers has the code
        ({"model_type": "kimi_k2", **AUTO_MAP}, False),  # vLLM has it
        ({"architectures": ["LongcatFlashForCausalLM"], **AUTO_MAP}, False),
        ({"model_type": ["own"], **AUTO_MAP}, True),
    ],
)
def test_only_a_model_that_needs_its_code_is_refused(config: dict[str, Any], needs: bool) -> None:
    assert bool(fault_of_remote_code(config, False)) is needs
    assert not fault_of_remote_code(config, True)
