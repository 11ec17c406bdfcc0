"""vLLM's parts that the gateway patches are the ones that were checked; its options are read without importing it.

After an upgrade compare each part that fails here with its patch in `gateway.vllm_patches`, correct the patch, and
replace the digest.
"""

import ast
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import tokenizers.decoders
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from vllm import SamplingParams
from vllm import __version__ as vllm_version
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser

from gateway.admission import Admissions, RequestState, current_request
from gateway.app import _arguments
from gateway.settings import GatewaySettings
from gateway.vllm_options import TABLE, faults_of, table, table_of, words_of
from gateway.vllm_patches import LONG_BYTES, TokeniserSlots, detokenise_from_prompt_ends
from gateway.vllm_patches import PROMPT_END_TOKENS as END
from services.launcher.model_source import PROJECT

OPENAI, ENGINE = "vllm.entrypoints.openai", "vllm.v1.engine"
CHECKED = {
    f"{OPENAI}.chat_completion.serving:OpenAIServingChat.create_chat_completion": "8910b3e7e19a",
    f"{OPENAI}.chat_completion.serving:OpenAIServingChat.chat_completion_stream_generator": "cf83e77907c4",
    f"{OPENAI}.chat_completion.batch_serving:OpenAIServingChatBatch.create_batch_chat_completion": "6f279780b9ce",
    f"{OPENAI}.completion.serving:OpenAIServingCompletion.create_completion": "7b3ebac25229",
    f"{OPENAI}.completion.serving:OpenAIServingCompletion.completion_stream_generator": "4252ddcae8a3",
    f"{OPENAI}.responses.serving:OpenAIServingResponses.create_responses": "9f6ec1f36273",
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.create_messages": "f2b672491970",
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.message_stream_converter": "f12c6cb0b30a",
    "vllm.entrypoints.generate.generative_scoring.serving:ServingGenerativeScoring._build_prompts": "9f861ab60742",
    "vllm.renderers.chat_utils:BaseMultiModalItemTracker._validate_add": "62f8302fb358",
    "vllm.renderers.base:BaseRenderer.__init__": "d5b80356b9dc",
    "vllm.renderers.base:BaseRenderer._process_mm_uuids": "429e28158c84",
    "vllm.renderers.base:BaseRenderer._process_multimodal": "f6b1d99fdbb3",
    "vllm.multimodal.audio:resample_audio_torchaudio": "1477a5de196e",
    "vllm.multimodal.audio:resample_audio_scipy": "3f6e24ac644d",
    "vllm.multimodal.audio:AudioResampler": "097dbf516952",
    "vllm.multimodal.cache.factories:_get_cache_type": "98daf9d03270",
    "vllm.multimodal.media.connector:MediaConnector.load_from_url": "f080a092d379",
    "vllm.multimodal.media.connector:MediaConnector.load_from_url_async": "07735f9f2531",
    f"{ENGINE}.core_client:EngineCoreClient.make_async_mp_client": "47c880d6d6be",
    f"{ENGINE}.async_llm:AsyncLLM.__init__": "ac66341550c8",
    f"{ENGINE}.async_llm:AsyncLLM.add_request": "6f592692b992",
    f"{ENGINE}.async_llm:AsyncLLM._add_request": "65fa9737a638",
    f"{ENGINE}.async_llm:AsyncLLM._run_output_handler": "39cbfb3f342f",
    f"{ENGINE}.output_processor:OutputProcessor.process_outputs": "daef16825986",
    f"{ENGINE}.output_processor:OutputProcessor.abort_requests": "a4be432f6fc9",
    f"{ENGINE}.output_processor:OutputProcessor._finish_request": "ac3f00643562",
    f"{ENGINE}.output_processor:OutputProcessor.propagate_error": "5b5fe5bc9302",
    f"{ENGINE}.detokenizer:FastIncrementalDetokenizer": "eeee254a3c64",
    f"{ENGINE}.detokenizer:BaseIncrementalDetokenizer": "23245f2ca763",
    f"{ENGINE}.input_processor:InputProcessor._validate_params": "37ae3e0f471f",
    "vllm.v1.structured_output.backend_xgrammar:validate_xgrammar_grammar": "659d831616dc",
    "vllm.entrypoints.serve.tokenize.protocol:TokenizeCompletionRequest.build_tok_params": "a4f90ba0e61e",
    "vllm.entrypoints.serve.tokenize.protocol:TokenizeChatRequest.build_tok_params": "a4f90ba0e61e",
    "starlette.requests:Request.json": "e863bf53df40",
}


def digest_of(name: str) -> str:
    """A digest of the source of `module:attribute`, as it is on disk: this process may have patched the module."""
    module, _, attribute = name.partition(":")
    spec = find_spec(module)
    assert spec is not None, f"there is no module {module}"
    assert spec.origin is not None
    text = Path(spec.origin).read_text()
    node: ast.AST = ast.parse(text)
    for part in attribute.split("."):
        nodes = [each for each in ast.iter_child_nodes(node) if getattr(each, "name", "") == part]
        assert nodes, f"there is no {name}"
        node = nodes[-1]
    return hashlib.sha256((ast.get_source_segment(text, node) or "").encode()).hexdigest()[:12]


def test_patched_parts_are_the_ones_that_were_checked() -> None:
    assert {name: digest_of(name) for name in CHECKED} == CHECKED


# The threads that tokenise

ADMISSION = Admissions(GatewaySettings(schedulers=("s",), model="m"), ()).for_class("default")


class Threads:
    """Threads with tokeniser slots; their work ends when the test says so."""

    def __init__(self, slots: int) -> None:
        self.running: list[tuple[Callable[..., Any], Any]] = []
        self.order: list[str] = []
        self.slots = TokeniserSlots(self._submit, slots)

    def _submit(self, run: Callable[..., Any], work: Any) -> Future[Any]:
        self.running.append((run, work))
        return Future()

    def put(self, name: str, size: int = 10) -> Future[Any]:
        """The first character of the name is the caller."""
        state = RequestState(ADMISSION, name[0], body_bytes=size)

        def submit() -> Future[Any]:
            current_request.set(state)
            return self.slots.submit(self.order.append, name)

        return copy_context().run(submit)

    def end(self, at: int = 0) -> None:
        run, work = self.running.pop(at)
        run(work)

    def end_all(self) -> list[str]:
        while self.running:
            self.end()
        return self.order


def test_long_texts_leave_a_thread_to_short_ones() -> None:
    threads = Threads(2)
    for number in range(3):
        threads.put(f"a long {number}", LONG_BYTES + 1)
    assert len(threads.running) == 1
    short = threads.put("a short")
    assert len(threads.running) == 2
    threads.end(1)
    assert short.done()
    assert threads.end_all() == ["a short", "a long 0", "a long 1", "a long 2"]


@pytest.mark.parametrize("slots", [1, 2])
def test_short_texts_do_not_keep_a_long_one_waiting(slots: int) -> None:
    threads = Threads(slots)
    for number in range(4):
        threads.put(f"a short {number}")
    threads.put("a long", LONG_BYTES + 1)
    assert threads.end_all().index("a long") <= slots


def test_the_caller_with_the_least_thread_time_is_next() -> None:
    threads = Threads(1)
    for name in ("a0", "a1", "a2", "a3", "b0"):
        threads.put(name)
    assert threads.end_all().index("b0") <= 2


def test_cancelled_work_is_not_run_and_an_error_is_its_callers() -> None:
    threads = Threads(1)
    threads.put("a first")
    cancelled, wrong = threads.put("a cancelled"), threads.slots.submit(lambda: 1 / 0)
    assert cancelled.cancel()
    assert threads.end_all() == ["a first"]
    assert isinstance(wrong.exception(), ZeroDivisionError)
    last = threads.put("a last")
    threads.end_all()
    assert last.done()


# Detokenising from the end of a prompt

MODEL = PROJECT / "models" / "demo"
BYTES = Tokenizer.from_file(str(MODEL / "tokenizer.json"))  # its tokens may be parts of characters
PIECES = Tokenizer(models.WordLevel({"▁a": 0, "b": 1, "▁": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5}, unk_token="b"))
PIECES.decoder = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def text(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> str:
    """Up to the token at which tokenizers gives up, where there is one: vLLM then starts a new stream."""
    stream = tokenizers.decoders.DecodeStream(ids=prompt, skip_special_tokens=True)
    text = ""
    for token in answer:
        try:
            text += stream.step(tokenizer, token) or ""
        except Exception as error:
            if "Invalid prefix" not in str(error):
                raise
            return f"{text} and an error"
    return text


@settings(max_examples=200, deadline=None)
@given(st.text(min_size=END), st.text(min_size=1))
def test_the_end_of_a_prompt_is_enough_for_characters_of_several_tokens(prompt: str, answer: str) -> None:
    """A prompt that ends within a character is left out: tokenizers repeats the text of all tokens that it has read."""
    ids, more = BYTES.encode(prompt).ids, BYTES.encode(answer).ids
    assert text(BYTES, ids[-END:], more) == text(BYTES, ids, more) == answer


@given(st.lists(st.integers(0, 2), min_size=END + 1), st.lists(st.sampled_from([0, 1, 2, 3, 4, 5]), max_size=9))
def test_the_end_of_a_prompt_is_enough_for_spaces_and_bytes(prompt: list[int], answer: list[int]) -> None:
    prompt = [*prompt, 0]
    assert text(PIECES, prompt[-END:], answer) == text(PIECES, prompt, answer)


def test_vllms_detokeniser_reads_only_the_end_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    lengths, whole = list[int](), tokenizers.decoders.DecodeStream

    def counting(ids: list[int], skip_special_tokens: bool) -> Any:
        lengths.append(len(ids))
        return whole(ids=ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(tokenizers.decoders, "DecodeStream", counting)  # undone with the patch
    detokenise_from_prompt_ends.__wrapped__()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer("one two three " * 100)["input_ids"]
    request: Any = SimpleNamespace(request_id="r", sampling_params=SamplingParams(), prompt_token_ids=ids)
    detokenizer = FastIncrementalDetokenizer(tokenizer, request)
    detokenizer.update(tokenizer(" four")["input_ids"], False)
    assert len(ids) > END
    assert (lengths, detokenizer.output_text) == ([END], " four")


# Options: `vllm_args`

WRITE = "POLYPHASE_WRITE_VLLM_OPTIONS"  # set it to write the table anew, after a new version of vLLM was looked at


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    made: FlexibleArgumentParser = make_arg_parser(FlexibleArgumentParser())
    return made


def test_the_table_is_of_the_vllm_that_is_installed(parser: FlexibleArgumentParser) -> None:
    parsers = {
        "reasoning_parser": sorted(ReasoningParserManager.list_registered()),
        "tool_call_parser": sorted(ToolParserManager.list_registered()),
    }
    found = table_of(parser, vllm_version, parsers)
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
def test_vllm_reads_options_as_they_are_meant(
    parser: FlexibleArgumentParser, args: dict[str, Any], name: str | None, read: object
) -> None:
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
        ({"enable_lora": True}, "enable_lora: it is a setting of its own, `lora` at the top of the file"),
        ({"lora-modules": ["a=/x"]}, "lora-modules: it is a setting of its own, `lora` at the top of the file"),
        ({"ssl-keyfile": "x"}, "ssl-keyfile: the gateway has a server of its own"),
        ({"seed.x": 1}, "seed.x: seed takes no keys"),
        (
            {"max_num_batched_tokens": 0.5},
            "max_num_batched_tokens: must be a whole number, also as 16k or 16K, not 0.5",
        ),
        ({"max_num_queued_tokens": "1.5K"}, "max_num_queued_tokens: must be a whole number, also as 16k or 16K"),
    ],
)
def test_wrong_options_are_refused(args: dict[str, Any], fault: str) -> None:
    found = "\n".join(faults_of(args))
    assert fault in found
    with pytest.raises(ValueError, match="vllm_args"):
        GatewaySettings(schedulers=("tcp://a:1",), model="m", vllm_args=args)


def test_the_gateway_passes_options_to_vllm() -> None:
    given = {"default-chat-template-kwargs": {"enable_thinking": False}, "allowed_origins": ["http://x"]}
    read = _arguments(GatewaySettings(schedulers=("tcp://a:1",), model="m", dtype="float32", vllm_args=given))
    assert (read.model, read.served_model_name, read.dtype) == ("m", ["m"], "float32")
    assert read.default_chat_template_kwargs == {"enable_thinking": False}
    assert read.allowed_origins == ["http://x"]
    assert read.disable_log_stats


def test_parsers_of_plugins_are_not_checked() -> None:
    assert [*faults_of({"tool_call_parser": "mine", "tool_parser_plugin": "mine.py"})] == []
    assert [*faults_of({"reasoning_parser": "mine", "reasoning_parser_plugin": "mine.py"})] == []


_leaves = st.none() | st.booleans() | st.integers(-3, 10**6) | st.floats(0, 1) | st.sampled_from(["", "x", "{}", "-1"])
_keys = st.sampled_from(["a", "b"])
_values = st.recursive(
    _leaves, lambda part: st.lists(part, max_size=2) | st.dictionaries(_keys, part, max_size=2), max_leaves=3
)


@given(name=st.sampled_from(sorted(table().options)), value=_values)
@settings(max_examples=400)
def test_vllms_parser_accepts_all_options_that_pass(parser: FlexibleArgumentParser, name: str, value: Any) -> None:
    """The parser ends the process where a word is of the wrong form; structures of its own it reads strictly."""
    option = table().options[name]
    if [*faults_of({name: value})] or option.kind in ("json", "custom") or option.json:
        return
    parser.parse_args(words_of({"model": "m", name: value}))


def test_the_settings_import_no_vllm() -> None:
    code = "import sys, gateway.settings as g; g.GatewaySettings(schedulers=('a',), model='m', vllm_args={'seed': 1});"
    code += "sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=False).returncode == 0
