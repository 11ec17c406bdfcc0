"""The parts of vLLM and starlette that `gateway.vllm_patches` replaces or wraps are as they were when it was checked.

After an upgrade compare each part that fails here with its patch, correct the patch, and replace the digest.
"""

import ast
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers.decoders
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.admission import Admissions, RequestState, current_request
from gateway.settings import GatewaySettings
from gateway.vllm_patches import LONG_BYTES, TokeniserSlots
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


@pytest.mark.parametrize("name", CHECKED)
def test_a_patched_part_is_the_one_that_was_checked(name: str) -> None:
    assert digest_of(name) == CHECKED[name]


ADMISSION = Admissions(GatewaySettings(schedulers=("s",), model="m"), ()).for_class("default")


class Threads:
    """A pool whose work ends when the test says so."""

    def __init__(self) -> None:
        self.running: list[tuple[Callable[..., Any], Any]] = []
        self.order: list[str] = []

    def submit(self, run: Callable[..., Any], work: Any) -> Future[Any]:
        self.running.append((run, work))
        return Future()

    def end_first(self) -> None:
        run, work = self.running.pop(0)
        run(work)

    def end_all(self) -> None:
        while self.running:
            self.end_first()


def put(slots: TokeniserSlots, threads: Threads, key: str, name: str, size: int = 10) -> Future[Any]:
    state = RequestState(ADMISSION, key, body_bytes=size)

    def submit() -> Future[Any]:
        current_request.set(state)
        return slots.submit(threads.order.append, name)

    return copy_context().run(submit)


def test_long_texts_leave_a_thread_to_short_ones() -> None:
    threads = Threads()
    slots = TokeniserSlots(threads.submit, 2)
    for number in range(3):
        put(slots, threads, "a", f"long {number}", LONG_BYTES + 1)
    assert len(threads.running) == 1
    short = put(slots, threads, "a", "short")
    assert len(threads.running) == 2
    run, work = threads.running.pop()
    run(work)
    assert short.done()
    assert threads.order == ["short"]
    threads.end_all()
    assert threads.order == ["short", "long 0", "long 1", "long 2"]


def test_short_ones_do_not_keep_a_long_one_waiting() -> None:
    for count in (1, 2):
        threads = Threads()
        slots = TokeniserSlots(threads.submit, count)
        for number in range(4):
            put(slots, threads, "a", f"short {number}")
        put(slots, threads, "a", "long", LONG_BYTES + 1)
        threads.end_all()
        assert threads.order.index("long") <= count


def test_the_caller_with_the_least_thread_time_is_next() -> None:
    threads = Threads()
    slots = TokeniserSlots(threads.submit, 1)
    for number in range(4):
        put(slots, threads, "a", f"a{number}")
    put(slots, threads, "b", "b0")
    threads.end_all()
    assert threads.order[:2] == ["a0", "b0"] or threads.order[:3] == ["a0", "a1", "b0"]


def test_what_was_given_up_is_not_run_and_an_error_is_its_callers() -> None:
    threads = Threads()
    slots = TokeniserSlots(threads.submit, 1)
    put(slots, threads, "a", "first")
    gone = put(slots, threads, "a", "gone")
    wrong = slots.submit(lambda: 1 / 0)
    assert gone.cancel()
    threads.end_all()
    assert threads.order == ["first"]
    assert isinstance(wrong.exception(), ZeroDivisionError)
    last = put(slots, threads, "a", "last")
    threads.end_all()
    assert last.done()


BYTES = Tokenizer.from_file(
    str(PROJECT / "models" / "demo" / "tokenizer.json")
)  # its tokens may be parts of characters
PIECES = Tokenizer(models.WordLevel({"▁a": 0, "b": 1, "▁": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5}, unk_token="b"))
PIECES.decoder = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def text(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> str:
    stream = tokenizers.decoders.DecodeStream(ids=prompt, skip_special_tokens=True)
    return "".join(stream.step(tokenizer, token) or "" for token in answer)


@settings(max_examples=200, deadline=None)
@given(st.text(min_size=END), st.text(min_size=1))
def test_characters_of_several_tokens(prompt: str, answer: str) -> None:
    """A prompt that ends within a character is left out: tokenizers repeats the text of all tokens that it has read."""
    ids, more = BYTES.encode(prompt).ids, BYTES.encode(answer).ids
    assert text(BYTES, ids[-END:], more) == text(BYTES, ids, more) == answer


@given(st.lists(st.integers(0, 2), min_size=END + 1), st.lists(st.sampled_from([0, 1, 2, 3, 4, 5]), max_size=9))
def test_spaces_and_bytes_of_pieces(prompt: list[int], answer: list[int]) -> None:
    prompt = [*prompt, 0]
    assert text(PIECES, prompt[-END:], answer) == text(PIECES, prompt, answer)


def test_vllm_takes_it() -> None:
    said = """
import json, tokenizers.decoders
from gateway.vllm_patches import detokenise_from_prompt_ends
seen = []
whole = tokenizers.decoders.DecodeStream
tokenizers.decoders.DecodeStream = lambda ids, skip_special_tokens: seen.append(len(ids)) or whole(ids=ids)
detokenise_from_prompt_ends()
from types import SimpleNamespace
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
tokenizer = AutoTokenizer.from_pretrained("models/demo")
ids = tokenizer("one two three " * 100)["input_ids"]
request = SimpleNamespace(request_id="r", sampling_params=SamplingParams(), prompt_token_ids=ids)
detokenizer = FastIncrementalDetokenizer(tokenizer, request)
detokenizer.update(tokenizer(" four")["input_ids"], False)
print(json.dumps([len(ids), seen, detokenizer.output_text]))
"""
    out = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True, cwd=PROJECT).stdout
    length, seen, output = json.loads(out.splitlines()[-1])
    assert length > END
    assert seen == [END]
    assert output == " four"
