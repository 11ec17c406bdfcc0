"""A learnable task, and a tiny OPT classifier trained on it through the command line."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from predictor.cli import app
from predictor.settings import PredictorSettings
from tests.commands import Commands

COMMANDS = Commands("predictor.cli", "predictor.fine_tune", "predictor.evaluate")
THINGS = ["cats", "dogs", "rivers", "stars", "bridges", "poems", "ships", "clocks", "maps", "songs", "trees", "storms"]
MANNERS = {"short": 40, "plain": 150, "long": 380}  # requested manner -> output tokens


def records() -> Iterator[dict[str, Any]]:
    for number in range(600):
        manner = list(MANNERS)[number % 3]
        thing, other = THINGS[number % 12], THINGS[(number // 12) % 12]
        prompt = f"Tell me about {thing} and {other}, number {number}. The answer should be {manner}."
        yield {"prompt": prompt, "output_tokens": MANNERS[manner]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, the served model's tokenizer, and a checkpoint trained on them through the command line."""
    from predictor.fine_tune import train_tokenizer

    base = tmp_path_factory.mktemp("length")
    data = list(records())
    (base / "data.jsonl").write_text("\n".join(map(json.dumps, data)))
    (base / "served").mkdir()
    train_tokenizer((record["prompt"] for record in data), "tiny").save(str(base / "served" / "tokenizer.json"))
    (base / "served" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    arguments = (
        f"--data {base}/data.jsonl --out {base}/checkpoint --served-model {base}/served --from-scratch tiny"
        " --bucket-tokens 100 --bucket-count 4 --input-tokens 32 --max-steps 75 --learning-rate 0.003"
        " --seed 1 --class-weights --json"
    )
    done = CliRunner().invoke(app, ["train", *arguments.split()])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output.strip().splitlines()[-1])
    assert report["ok"]
    assert report["figures"]["accuracy"] > 0.8  # chance and the commonest bucket: about 1/3
    return base


@pytest.fixture
def settings(folder: Path, tmp_path: Path) -> PredictorSettings:
    shutil.copytree(folder / "checkpoint", tmp_path / "checkpoint")
    return PredictorSettings(
        checkpoint=tmp_path / "checkpoint", model=str(folder / "served"), timeout_ms=20_000, queue_depth=64
    )
