"""`train` with a base of OPT-125M's size and random weights, in the form of the hub, up to an answer of the service."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from benchmarks.predictor import SERVED, Generator
from predictor.checkpoint import read_meta
from predictor.model import WEIGHTS_FILE
from predictor.settings import PredictorSettings
from tests.predictor.trained import COMMANDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
PARAMETERS = 125_239_296  # of facebook/opt-125m


def make_base(folder: Path) -> int:
    """Random weights and tokenizer files in the form of facebook/opt-125m on the hub; the number of its parameters."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import OPTConfig, OPTForCausalLM

    network = OPTForCausalLM(OPTConfig())  # its defaults are OPT-125M's
    network.save_pretrained(folder)
    tokenizer = ByteLevelBPETokenizer()
    texts = [str(path) for path in sorted((ROOT / "docs").glob("*.md"))]
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer.train(texts, vocab_size=50_265, min_frequency=2, special_tokens=special, show_progress=False)
    tokenizer.save_model(str(folder))
    tokens = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_prefix_space": False, **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return sum(each.numel() for each in network.parameters())


def ran(*arguments: str) -> dict[str, Any]:
    """The JSON that the command prints, and nothing else does."""
    done = COMMANDS.run(["predictor", *arguments, "--json"], os.environ)
    assert done.returncode in (0, 3), done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def test_a_base_of_full_size_is_trained_evaluated_and_served(serve: Any, tmp_path: Path) -> None:
    assert make_base(tmp_path / "base") == PARAMETERS
    drawn = Generator.like_sharegpt().draw(60, 11)
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(one.record()) for one in drawn))
    out, data = tmp_path / "made", f"--data {tmp_path}/data.jsonl --served-model {SERVED}"
    trained = ran("train", *data.split(), *f"--base {tmp_path}/base --out {out} --max-steps 2 --batch-size 4".split())
    meta = read_meta(out)
    assert trained["figures"]["examples"] == meta.examples["test"] == sum(map(sum, meta.scores.confusion))
    assert meta.base == f"{tmp_path}/base"
    with safe_open(out / WEIGHTS_FILE, "np") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    assert shapes["model.decoder.embed_tokens.weight"] == [50272, 768]
    assert len([name for name in shapes if name.endswith("fc1.weight")]) == 12
    assert shapes["score.weight"] == [10, 768]
    judged = ran("evaluate", "--checkpoint", str(out), *data.split(), "--limit", "3")
    assert judged["figures"]["examples"] == 3
    settings = PredictorSettings(checkpoint=out, model=str(SERVED), timeout_ms=20_000, use="classifier")
    async with serve(settings) as client:
        about = (await client.post("/v1/model/reload")).json()
        assert about["checkpoint"]["state"] == "loaded"
        found = (
            await client.post("/v1/predict", json={"prompt": "How long will this be?", "timeout_ms": 60_000})
        ).json()
        assert found["source"] == "classifier"
