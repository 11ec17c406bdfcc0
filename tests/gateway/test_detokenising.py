"""The text of an answer is the same whether its detokeniser has read all of the prompt or only its end."""

import json
import subprocess
import sys

import tokenizers.decoders
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.vllm_patches import PROMPT_END_TOKENS as END
from services.launcher.model_source import PROJECT

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
