"""The bench of KV transports: real processes, little KV."""

import math
import sys
from pathlib import Path
from random import Random

import pytest

from benchmarks.kv import NIXL_OVER_TCP, SCHEMES, run_kv_bench
from benchmarks.kv_quality import ROWS, drawn_tasks, held_out_texts, rouge_of, run_kv_quality_bench
from services.launcher.model_source import PROJECT
from services.worker.kv.wire.nixl_agent import installed


def test_every_transport_is_measured_beside_the_socket() -> None:
    result = run_kv_bench((1,), rounds=3)
    figures, aims = result["figures"], result["aims"]
    assert all(value > 0 for value in figures.values())
    for name in SCHEMES:
        assert {f"{name}_1mb_to_socket_ratio", f"{name}_1mb_import_cpu_ratio"} <= set(figures)
    for codec in ("int8", "int4", "fp8"):
        assert {f"{codec}_encode_gb_per_s", f"{codec}_decode_gb_per_s"} <= set(figures)
    beside = [name for name in figures if NIXL_OVER_TCP in name]
    assert bool(beside) == installed()
    assert len(result["notes"]) == 1
    assert aims["tcp_1mb_to_socket_ratio"]["got"] == figures["tcp_1mb_to_socket_ratio"]
    signs = {name: aim["want"].split()[0] for name, aim in aims.items()}
    assert all(sign == ("<=" if "cpu" in name else ">=") for name, sign in signs.items())


MODELS = PROJECT / "models"


def test_rouge_is_the_f_measure_of_words_in_common() -> None:
    truth = ["the", "cat", "sat", "on", "the", "mat"]
    found = rouge_of([["the", "cat", "lay", "on", "the", "mat"]], [truth])
    assert math.isclose(found["1"], 5 / 6)
    assert math.isclose(found["2"], 3 / 5)
    assert math.isclose(found["l"], 5 / 6)
    assert rouge_of([truth], [truth]) == {"1": 1.0, "2": 1.0, "l": 1.0}
    assert rouge_of([["dog"]], [truth]) == {"1": 0.0, "2": 0.0, "l": 0.0}


def test_rouge_l_keeps_the_order_of_words() -> None:
    found = rouge_of([["b", "a"]], [["a", "b"]])
    assert (found["1"], found["2"], found["l"]) == (1.0, 0.0, 0.5)


def test_an_answer_without_words_is_as_another_one_without() -> None:
    assert rouge_of([[]], [[]]) == {"1": 1.0, "2": 1.0, "l": 1.0}
    assert rouge_of([[]], [["a"]]) == {"1": 0.0, "2": 0.0, "l": 0.0}


def test_the_texts_are_those_that_the_demo_models_training_holds_out(
    prompt_response: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setattr(sys, "path", [*sys.path, str(MODELS)])
    import demo_corpus

    tokenizer = AutoTokenizer.from_pretrained(MODELS / "demo")
    read = {path.stem: demo_corpus.read_exchanges(path) for path in sorted(prompt_response.glob("*.json"))}
    wanted = demo_corpus.build_corpus(read, tokenizer, Random(0)).held_out
    found = held_out_texts(prompt_response, tokenizer)
    assert len(found) == 175
    assert [text[: demo_corpus.SEQUENCE_TOKENS] for text in found] == [example.ids for example in wanted]


def test_tasks_are_written_as_the_chat_template_writes_them() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODELS / "demo")
    tasks = drawn_tasks(tokenizer, 20)
    assert tasks == drawn_tasks(tokenizer, 20)
    for task in tasks:
        text = tokenizer.decode(task.prompt)
        assert text.startswith("<|system|>")
        assert text.endswith("<|end|><|assistant|>")
        assert text.count("<|user|>") == 2
        assert task.answer


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_each_codec_is_measured_over_the_transfer_that_serves(prompt_response: Path) -> None:
    found = run_kv_quality_bench(prompt_response.parent, texts=2, tasks=2)
    rows = found["tables"]["Lossy KV and answers"]
    assert [row["run"] for row in rows] == list(ROWS)
    assert [row["KV bytes"] for row in rows] == ["–", "1.00", "0.55", "0.30", "0.50"]
    figures = found["figures"]
    assert figures["raw_perplexity"] == figures["one_instance_perplexity"]
    assert len({figures[f"{row}_perplexity"] for row in ("raw", "int8", "int4", "fp8")}) == 4  # codecs do something
    assert all(figures[f"{row}_perplexity"] < 1.2 * figures["raw_perplexity"] for row in ("int8", "int4", "fp8"))
    assert figures["raw_answers_identical_share"] == 1.0
