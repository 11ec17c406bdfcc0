"""`polyphase bench models`: one family with each kind of component on real engines, and the table."""

import gc
import os
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import psutil
import pytest

from benchmarks.engine_client import PROCESSES, SPAWNED, Engine
from benchmarks.model_families import FAMILIES, make_model
from benchmarks.models import (
    MIN_FAMILIES,
    REDUCED,
    Cell,
    FamilyResult,
    error_line,
    measure,
    read_result,
    run_models_bench,
    table_of,
)
from shared.errors import InvalidRequest
from shared.model.support import config_of, faults_of_model

GOOD = Cell(25, 25, 1.0)
CELLS = dict.fromkeys(
    ("chunks", "split_1", "split_third", "split_last", "blocks", "flip", "tp_2", "tp_1", "killed"), GOOD
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["Llama", "Gemma-3", "DeepSeek-V2", "Qwen3-Next"])
async def test_a_family_with_each_kind_of_component(name: str) -> None:
    found = await measure(FAMILIES[name], count=REDUCED, tensor_parallel=False)
    assert (found.plain, found.polyphase, found.fault) == ("", "", "")
    assert found.distinct > 25
    assert found.cells.keys() == CELLS.keys() - {"tp_2", "tp_1"}
    assert all(cell.not_pulled == 0 for cell in (*found.cells.values(), *found.zeroed.values()))
    assert found.zeroed.keys() == {kind.value for kind in FAMILIES[name].kinds}


@pytest.mark.slow
async def test_a_family_that_vllm_does_not_run_is_a_result() -> None:
    """Its engines, none of which has started, leave nothing that would block the next family."""
    family = replace(FAMILIES["Llama"], engine={"max_model_len": 1 << 20})
    found = await measure(family, count=1, tensor_parallel=False)
    assert "ValidationError" in found.plain
    assert found.cells == {}
    gc.collect()


@pytest.mark.slow
async def test_an_engine_that_is_left_at_once_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is a fork that has no group of its own yet."""
    engine = Engine("early", make_model(FAMILIES["Llama"], tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr("os.killpg", _no_group)
        await engine.__aexit__()
    assert engine.process.exitcode is not None
    assert not engine.folder.exists()


def _no_group(pid: int, number: int) -> None:
    raise ProcessLookupError(pid)


@pytest.mark.slow
def test_engines_end_with_a_bench_that_is_killed(tmp_path: Path) -> None:
    receiver, sender = SPAWNED.Pipe(duplex=False)
    bench = SPAWNED.Process(target=_start_one, args=(str(tmp_path / "log"), sender))
    bench.start()
    pid = receiver.recv() if receiver.poll(200) else 0
    engine = psutil.Process(pid)  # while it lives
    bench.kill()
    bench.join()
    _, alive = psutil.wait_procs([engine], timeout=60)
    assert not alive


def _start_one(log: str, sender: Connection) -> None:
    engine = PROCESSES.Process(target=_stay, args=(log, sender))
    engine.start()
    engine.join()


def _stay(log: str, sender: Connection) -> None:
    from benchmarks.engine_process import own_process

    own_process(log)
    sender.send(os.getpid())
    threading.Event().wait()


def made(family: str, dtype: str = "float32", **changes: object) -> FamilyResult:
    zeroed = {"heads": Cell(2, 25, 0.1)}
    found = FamilyResult(family, dtype, ["heads"], "0.32.0", "2026-11-26", distinct=99, cells=CELLS, zeroed=zeroed)
    return msgspec.structs.replace(found, **changes)


def test_what_is_a_fault() -> None:
    near = Cell(20, 25, 0.97)
    assert made("Llama").fault == ""
    assert made("Llama", cells=CELLS | {"killed": near}).fault == "killed"
    assert made("Llama", "bfloat16", cells=CELLS | {"split_last": near, "tp_2": near}).fault == ""
    assert made("Llama", "bfloat16", cells=CELLS | {"flip": near}).fault == "flip"
    assert made("Llama", cells=CELLS | {"chunks": Cell(25, 25, 1.0, not_pulled=1)}).fault == "chunks"
    recomputed = CELLS | {"tp_1": Cell(25, 25, 1.0, not_pulled=25)}
    assert made("Mamba-2", cells=recomputed).fault == ""
    assert made("Llama", cells=recomputed).fault == "tp_1"
    assert made("Llama", zeroed={"heads": Cell(13, 25, 0.5)}).fault == "zeroed heads"
    assert made("Llama", polyphase="LayoutError: x").fault == "LayoutError: x"
    assert made("Llama", plain="ValueError: x").fault == ""
    assert Cell(25, 25, 1.0) + Cell(0, 25, 0.5, 1) == Cell(25, 50, 0.75, 1)


def test_files_are_joined_into_a_table(tmp_path: Path) -> None:
    """No family is measured that has a file already."""
    for name in FAMILIES:
        found = made(name, plain="ValueError: no kernel") if name == "OPT" else made(name)
        (tmp_path / f"{name.lower().replace(' (', '-').strip(')').replace('.', '-')}.json").write_bytes(
            msgspec.json.encode(found)
        )
    docs = tmp_path / "models.md"
    docs.write_text("before\n<!-- families: begin -->\nold\n<!-- families: end -->\nafter\n")
    joined = run_models_bench(results=tmp_path, write_docs=tmp_path)
    assert all(aim["met"] for aim in joined["aims"].values())
    assert joined["figures"] == {
        "families": len(FAMILIES),
        "families_run_by_vllm": len(FAMILIES) - 1,
        "families_served": len(FAMILIES) - 1,
    }
    assert len(joined["tables"]["models"]) == len(FAMILIES) >= MIN_FAMILIES
    text = docs.read_text()
    assert text.startswith("before\n<!-- families: begin -->\nMeasured 2026-11-26")
    assert text.endswith("<!-- families: end -->\nafter\n")
    assert "old" not in text
    assert "- OPT: vLLM's CPU backend does not run it: `ValueError: no kernel`" in text
    assert read_result(tmp_path, "Llama") == made("Llama")


def test_the_table_shows_agreement_in_bfloat16_and_what_failed() -> None:
    cells = CELLS | {"killed": Cell(20, 25, 0.97), "tp_2": Cell(error="RuntimeError: no"), "flip": Cell(25, 25, 1, 2)}
    text = table_of([made("DeepSeek-V2", "bfloat16", cells=cells)])
    assert "20/25 (97%)" in text
    assert "2 not pulled" in text
    assert "- DeepSeek-V2, TP 1 → 2: `RuntimeError: no`" in text


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no family Lama; known: Llama"):
        run_models_bench(["Lama"])


def test_the_error_of_an_engines_output_is_found() -> None:
    output = "d died: Traceback (most recent call last):\n  File x\nValueError: Head dimension 96\n[W] cleaning up"
    assert error_line(RuntimeError(output)) == "ValueError: Head dimension 96"
    assert error_line(KeyError("x")) == "KeyError: 'x'"


@pytest.mark.parametrize("name", ["Llama", "Gemma-3", "DeepSeek-V2", "Qwen3-Next", "Mamba-2"])
def test_families_are_models_that_may_be_served(name: str, tmp_path: Path) -> None:
    config = config_of(make_model(FAMILIES[name], tmp_path))
    assert faults_of_model(config) == []
    assert (config["vocab_size"], config["num_hidden_layers"]) == (512, 4)
