"""A tiny OPT classifier, trained for real on a task that can be learnt, served, reloaded and broken."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from predictor.checkpoint import META_FILE, read_meta
from predictor.cli import app
from predictor.settings import PredictorSettings
from shared.sim.prediction import Prediction
from tests.predictor.trained import COMMANDS, MANNERS, folder, records, settings

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
__all__ = ["folder", "settings"]


def test_the_metadata_of_a_training(folder: Path) -> None:
    meta = read_meta(folder / "checkpoint")
    assert (meta.bucket_tokens, meta.bucket_count, meta.input_tokens, meta.seed) == (100, 4, 32, 1)
    assert sum(meta.examples.values()) == 600
    assert sum(map(sum, meta.scores.confusion)) == meta.examples["test"] == meta.scores.examples
    assert meta.scores.accuracy > 2 * 0.34 > max(meta.baselines.values())
    assert meta.means == [40.0, 150.0, 250.0, 380.0]
    assert len(meta.data_digest) == 64
    assert meta.class_weights


def test_evaluation_beats_the_baselines(folder: Path) -> None:
    arguments = ["--checkpoint", str(folder / "checkpoint"), "--data", str(folder / "data.jsonl"), "--json"]
    done = CliRunner().invoke(app, ["evaluate", *arguments, "--aim-p99-ms", "20000"])
    report = json.loads(done.output.strip().splitlines()[-1])
    assert done.exit_code == 0
    assert report["ok"]
    assert report["figures"]["accuracy"] == read_meta(folder / "checkpoint").scores.accuracy
    figures = report["figures"]
    assert figures["accuracy"] > max(figures["majority_accuracy"], figures["prompt_length_accuracy"]) + 0.2
    assert figures["mean_error_tokens"] < 0.5 * figures["majority_mean_error_tokens"]
    missed = CliRunner().invoke(app, ["evaluate", *arguments, "--aim-accuracy", "1.1"])
    assert missed.exit_code == 3
    assert not json.loads(missed.output.strip().splitlines()[-1])["ok"]


def test_the_model_card(folder: Path) -> None:
    card = (folder / "checkpoint" / "README.md").read_text()
    meta = read_meta(folder / "checkpoint")
    assert f"| this classifier | {meta.scores.accuracy:.1%} |" in card
    assert f"| commonest bucket | {meta.baselines['majority']:.1%} |" in card
    assert meta.data_digest in card
    assert "- learning_rate: 0.003" in card


def test_a_simulation_reads_an_evaluation(folder: Path, tmp_path: Path) -> None:
    from tools.simulate.sim_file import load_prediction

    arguments = (
        f"--checkpoint {folder}/checkpoint --data {folder}/data.jsonl --out {tmp_path} --aim-p99-ms 20000 --json"
    )
    assert CliRunner().invoke(app, ["evaluate", *arguments.split()]).exit_code == 0
    confusion = read_meta(folder / "checkpoint").scores.confusion
    prediction = load_prediction(tmp_path / "prediction.yaml")
    assert (prediction.width_tokens, prediction.buckets) == (100, 4)
    assert prediction.confusion is not None
    assert prediction.confusion[0] == pytest.approx([count / sum(confusion[0]) for count in confusion[0]])
    assert sum(prediction.confusion[2]) == pytest.approx(1.0), "no answer is of that length"
    Prediction(**prediction.model_dump())
    page = (tmp_path / "evaluation.html").read_text()
    assert "Reliability" in page
    assert "Confusion" in page


def test_a_killed_training_continues(folder: Path, tmp_path: Path) -> None:
    arguments = f"--data {folder}/data.jsonl --out {tmp_path}/made --served-model {folder}/served --from-scratch tiny"
    arguments += " --bucket-tokens 100 --bucket-count 4 --input-tokens 32 --epochs 8 --patience 8 --learning-rate 0.003"
    command = [sys.executable, "-P", "-m", "predictor.cli", "train", *arguments.split(), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline_mono = time.monotonic() + 120
    while not list(tmp_path.glob(".made.training/checkpoint-*/trainer_state.json")):
        assert time.monotonic() < deadline_mono
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait(20)
    assert not (tmp_path / "made").exists()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert "The training continues from" in done.stderr
    assert json.loads(done.stdout.strip().splitlines()[-1])["figures"]["accuracy"] > 0.8
    assert not list(tmp_path.glob(".made*")), "nothing is left behind"


async def test_served_over_http_from_text_and_from_ids(serve: Any, settings: PredictorSettings) -> None:
    served = Tokenizer.from_file(f"{settings.model}/tokenizer.json")
    async with serve(settings) as client:
        about = (await client.post("/v1/model/reload")).json()
        assert (about["source"], about["reads_token_ids"]) == ("classifier", True)
        right = 0
        for record in list(records())[:60]:
            by_text = (await client.post("/v1/predict", json={"prompt": record["prompt"]})).json()
            ids = served.encode(record["prompt"]).ids
            body = {"prompt_token_ids": ids, "prompt_tokens": len(ids)}
            by_ids = (await client.post("/v1/predict", json=body)).json()
            assert by_text["source"] == by_ids["source"] == "classifier"
            assert by_text["bucket"] == by_ids["bucket"]
            right += by_text["lower_tokens"] <= record["output_tokens"] < by_text["upper_tokens"]
        assert right > 48
        for text in ("", "</s>", "<pad>", "x" * 500_000, "\x00 \U0001f600"):
            assert (await client.post("/v1/predict", json={"prompt": text})).status_code == 200
        assert (await client.post("/v1/predict", json={"prompt_token_ids": []})).status_code == 200
        assert (await client.post("/v1/predict", json={"prompt_token_ids": [10**9]})).status_code == 200


def test_a_process_loads_the_checkpoint_while_it_serves(settings: PredictorSettings) -> None:
    environment = {**os.environ, **settings.to_environment(), "POLYPHASE_PREDICTOR_PORT": "0"}
    command = [sys.executable, "-m", "predictor"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr)
            address = next(found[1] for line in lines if (found := re.search(r"running on (http\S+)", line)))
            body = {"prompt": next(one["prompt"] for one in records() if one["output_tokens"] == MANNERS["long"])}
            early = httpx.post(f"{address}/v1/predict", json=body, timeout=30).json()
            assert early["source"] in ("observed", "classifier")
            states = (json.loads(line).get("state") for line in lines)
            assert next(state for state in states if state) == "loaded"
            found = httpx.post(f"{address}/v1/predict", json=body, timeout=30).json()
            assert (found["source"], found["bucket"]) == ("classifier", 3)
        finally:
            process.kill()


@pytest.mark.parametrize("damage", ["weights", "no weights", "tokenizer", "buckets", "no metadata"])
async def test_a_damaged_checkpoint_is_reported_and_serving_continues(
    serve: Any, settings: PredictorSettings, damage: str
) -> None:
    assert settings.checkpoint is not None
    weights = settings.checkpoint / "model.safetensors"
    meta = settings.checkpoint / META_FILE
    if damage == "weights":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif damage == "no weights":
        weights.unlink()
    elif damage == "tokenizer":
        (settings.checkpoint / "tokenizer.json").write_text("{")
    elif damage == "buckets":
        meta.write_text(meta.read_text().replace('"bucket_count": 4', '"bucket_count": 5'))
    else:
        meta.unlink()
    async with serve(settings) as client:
        assert (await client.post("/v1/model/reload")).status_code == 503
        about = (await client.get("/v1/model")).json()
        assert (about["source"], about["checkpoint"]["state"]) == ("observed", "broken")
        assert str(settings.checkpoint) in about["checkpoint"]["error"]
        assert (await client.post("/v1/predict", json={"prompt": "x"})).json()["source"] == "observed"


def ran(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """`polyphase predictor`, without a terminal."""
    done = COMMANDS.run(["predictor", *arguments], {**os.environ, "COLUMNS": "80"})
    assert done.returncode == code, done.stderr
    return done


def test_training_prints_tables_and_no_json_without_the_option(folder: Path, tmp_path: Path) -> None:
    arguments = f"--data {folder}/data.jsonl --served-model {folder}/served --from-scratch tiny --input-tokens 32"
    arguments += " --max-steps 4 --granularity auto --granularity 1000"
    done = ran("train", *arguments.split(), "--out", str(tmp_path / "made"), code=3)
    assert done.stderr == "", "a bar is for a terminal"
    assert '{"' not in done.stdout
    text = " ".join(done.stdout.split())
    assert "buckets of 100 tokens, 4 of them" in text, "a third of the answers has each of three lengths"
    assert "Warning: 100.0% of the training answers fall into one bucket" in text
    assert "--granularity auto would select 100 tokens" in text
    assert "Shares that are right" in text
    read_meta(tmp_path / "made" / "100")
    assert read_meta(tmp_path / "made" / "1000").bucket_count == 10
    again = ran("train", *arguments.split(), "--out", str(tmp_path / "again"), "--json", code=3)
    report = json.loads(again.stdout)
    assert again.stderr == ""
    assert report["granularities"]["1000"]["findings"][0]["code"] == "one_bucket"
    assert not report["ok"]


def test_an_evaluation_prints_a_table(folder: Path) -> None:
    arguments = ["--checkpoint", str(folder / "checkpoint"), "--data", str(folder / "data.jsonl")]
    done = ran("evaluate", *arguments, "--aim-p99-ms", "20000")
    assert done.stderr == ""
    assert '{"' not in done.stdout
    assert "this classifier" in done.stdout
    missed = ran("evaluate", *arguments, "--aim-accuracy", "1.1", code=3)
    assert "--aim-accuracy is 110.0%" in missed.stdout
    assert "Invalid value for '--split'" in ran("evaluate", *arguments, "--split", "dev", code=2).stderr


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--base {folder}/nowhere", "--base '{folder}/nowhere'"),
        ("--from-scratch huge", "--from-scratch 'huge': known sizes are tiny"),
        ("--from-scratch tiny --granularity half", "--granularity must be auto or a whole number"),
        ("--from-scratch tiny --granularity 0", "--granularity must be auto or a whole number"),
        ("--from-scratch tiny --data {folder}/few.jsonl", "2 answers leave none for"),
    ],
)
def test_errors_are_one_line(folder: Path, tmp_path: Path, wrong: str, message: str) -> None:
    (folder / "few.jsonl").write_text("\n".join(json.dumps(one) for one in list(records())[:2]))
    data = [] if "--data" in wrong else ["--data", f"{folder}/data.jsonl"]
    common = ["--out", str(tmp_path / "made"), "--served-model", f"{folder}/served", *data]
    done = ran("train", *common, *wrong.format(folder=folder).split(), code=1)
    assert done.stderr.startswith("polyphase: ")
    assert message.format(folder=folder) in done.stderr
    assert "Traceback" not in done.stderr
