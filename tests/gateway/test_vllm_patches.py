"""The parts of vLLM and starlette that `gateway.vllm_patches` replaces or wraps are as they were when it was checked.

After an upgrade compare each part that fails here with its patch, correct the patch, and replace the digest.
"""

import ast
import hashlib
from importlib.util import find_spec
from pathlib import Path

import pytest

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
