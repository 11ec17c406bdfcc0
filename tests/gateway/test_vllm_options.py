"""`vllm_args`: each option by name and kind before vLLM is imported, and the words that vLLM itself reads them from."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import __version__ as vllm_version
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from gateway.app import _arguments
from gateway.settings import GatewaySettings
from gateway.vllm_options import TABLE, Table, faults_of, table, table_of, words_of

WRITE = "POLYPHASE_WRITE_VLLM_OPTIONS"  # set it to write the table anew, after a new version of vLLM was looked at


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    made: FlexibleArgumentParser = make_arg_parser(FlexibleArgumentParser())
    return made


def installed(parser: FlexibleArgumentParser) -> Table:
    parsers = {
        "reasoning_parser": sorted(ReasoningParserManager.list_registered()),
        "tool_call_parser": sorted(ToolParserManager.list_registered()),
    }
    return table_of(parser, vllm_version, parsers)


def test_the_table_is_of_the_vllm_that_is_installed(parser: FlexibleArgumentParser) -> None:
    found = installed(parser)
    if os.environ.get(WRITE):
        plain = msgspec.to_builtins(found)
        options = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in plain["options"].items())
        head = f'{{"vllm": {json.dumps(found.vllm)},\n"parsers": {json.dumps(plain["parsers"])},\n"options": {{\n'
        TABLE.write_text(f"{head}{options}\n}}}}\n")
        table.cache_clear()
    assert table() == found, f"set {WRITE}=1 and run this test to write the table of the new version"


@pytest.mark.parametrize(
    ("args", "name", "read"),
    [
        ({"default_chat_template_kwargs": {"enable_thinking": False}}, None, {"enable_thinking": False}),
        ({"default-chat-template-kwargs": '{"a": 1}'}, "default_chat_template_kwargs", {"a": 1}),
        ({"allowed_origins": ["http://x", "http://y"]}, None, ["http://x", "http://y"]),
        ({"hf_overrides": {"rope_scaling": {"factor": 2.0}}}, None, {"rope_scaling": {"factor": 2.0}}),
        ({"override_generation_config": {"temperature": 0.5}}, None, {"temperature": 0.5}),
        ({"middleware": ["a.b", "c.d"]}, None, ["a.b", "c.d"]),
        ({"allowed_media_domains": ["x", "y"]}, None, ["x", "y"]),
        ({"limit_mm_per_prompt": {"image": 2}}, None, {"image": 2}),
        ({"enable_log_deltas": False}, None, False),
        ({"no_enable_log_deltas": True}, "enable_log_deltas", False),
        ({"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}, None, True),
        ({"seed": -1}, None, -1),
        ({"max_log_len": 5}, None, 5),
        ({"tokenizer": "-odd"}, None, "-odd"),
        ({"tokenizer": None}, None, None),
    ],
)
def test_what_vllm_reads(parser: FlexibleArgumentParser, args: dict[str, Any], name: str | None, read: object) -> None:
    assert [*faults_of(args)] == []
    parsed = parser.parse_args(words_of({"model": "m", **args}))
    assert getattr(parsed, name or next(iter(args))) == read


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        ({"no_such_option": 1}, "no_such_option: vLLM 0.32.0 has no such option"),
        ({"tool_call_parsr": "x"}, "has no such option; did you mean tool_call_parser?"),
        ({"tool_call_parser": "hermess"}, "not 'hermess'; did you mean hermes?"),
        ({"reasoning-parser": "qwen33"}, "reasoning-parser: must be one of "),
        ({"enable_auto_tool_choice": "yes"}, "enable_auto_tool_choice: must be true or false, not 'yes'"),
        ({"enable_auto_tool_choice": True}, "enable_auto_tool_choice: it needs tool_call_parser"),
        ({"enable_log_outputs": True}, "enable_log_outputs: it needs enable_log_requests"),
        ({"seed": "x"}, "seed: must be a whole number, not 'x'"),
        ({"seed": 1.5}, "seed: must be a whole number, not 1.5"),
        ({"mm_processor_cache_gb": "many"}, "mm_processor_cache_gb: must be a number, not 'many'"),
        ({"chat_template": True}, "chat_template: must be text, not True"),
        ({"chat_template": ["a"]}, "chat_template: must be text, not a list"),
        ({"allowed_origins": 5}, "allowed_origins: must be a mapping or a list, not 5"),
        ({"allowed_origins": "http://x"}, "allowed_origins: must be a mapping or a list, not 'http://x'"),
        ({"middleware": [["a"]]}, "middleware: must be text, not a list"),
        ({"api_key": [{"a": "planted"}]}, "api_key: must be text, not a mapping"),
        ({"api_key": True}, "api_key: must be text, not a truth value"),
        ({"tool_strict_level": "all"}, "tool_strict_level: must be one of auto, function, parameter, not 'all'"),
        ({"model": "x"}, "model: it is a setting of its own, `model` at the top of the file"),
        ({"enable_lora": True}, "enable_lora: adapters are not served: merge the adapter into the weights"),
        ({"lora-modules": ["a=/x"]}, "lora-modules: adapters are not served: merge the adapter into the weights"),
        ({"ssl-keyfile": "x"}, "ssl-keyfile: the gateway has a server of its own"),
        ({"seed.x": 1}, "seed.x: seed takes no keys"),
        (
            {"max_num_batched_tokens": 0.5},
            "max_num_batched_tokens: must be a whole number, also as 16k or 16K, not 0.5",
        ),
        ({"max_num_queued_tokens": "1.5K"}, "max_num_queued_tokens: must be a whole number, also as 16k or 16K"),
    ],
)
def test_what_is_refused(args: dict[str, Any], fault: str) -> None:
    found = "\n".join(faults_of(args))
    assert fault in found
    with pytest.raises(ValueError, match="vllm_args"):
        GatewaySettings(schedulers=("tcp://a:1",), model="m", vllm_args=args)


def test_the_gateway_hands_them_to_vllm() -> None:
    given = {"default-chat-template-kwargs": {"enable_thinking": False}, "allowed_origins": ["http://x"]}
    read = _arguments(GatewaySettings(schedulers=("tcp://a:1",), model="m", dtype="float32", vllm_args=given))
    assert (read.model, read.served_model_name, read.dtype) == ("m", ["m"], "float32")
    assert read.default_chat_template_kwargs == {"enable_thinking": False}
    assert read.allowed_origins == ["http://x"]
    assert read.disable_log_stats


def test_a_parser_of_a_plugin_is_not_known_here() -> None:
    assert [*faults_of({"tool_call_parser": "mine", "tool_parser_plugin": "mine.py"})] == []
    assert [*faults_of({"reasoning_parser": "mine", "reasoning_parser_plugin": "mine.py"})] == []


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 10**6)
    | st.floats(0, 1)
    | st.sampled_from(["", "x", "auto", "{}", "-1"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
    max_leaves=3,
)


@given(name=st.sampled_from(sorted(table().options)), value=_values)
@settings(max_examples=400)
def test_what_passes_is_of_a_form_that_vllm_takes(parser: FlexibleArgumentParser, name: str, value: Any) -> None:
    """The parser ends the process where a word is of the wrong form; structures of its own it reads strictly."""
    option = table().options[name]
    if [*faults_of({name: value})] or option.kind in ("json", "custom") or option.json:
        return
    parser.parse_args(words_of({"model": "m", name: value}))


def test_the_settings_import_no_vllm() -> None:
    code = "import sys, gateway.settings as g; g.GatewaySettings(schedulers=('a',), model='m', vllm_args={'seed': 1});"
    code += "sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(root)}, check=False)
    assert done.returncode == 0
