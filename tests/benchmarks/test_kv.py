"""The benches of KV: real processes, little KV."""

import math
from pathlib import Path
from random import Random

import pytest
from transformers import AutoTokenizer

from benchmarks.kv import NIXL_OVER_TCP, run_kv_bench
from benchmarks.kv_engines import TRANSPORTS, run_kv_engines_bench
from benchmarks.kv_quality import ROWS, demo_script, drawn_tasks, held_out_texts, rouge_of, run_kv_quality_bench
from benchmarks.suite import DEMO_MODEL
from services.worker.kv.wire.nixl_agent import installed


def test_the_transport_is_measured_beside_the_socket() -> None:
    found = run_kv_bench((1,), rounds=3)
    figures, aims = found["figures"], found["aims"]
    assert all(value > 0 for value in figures.values())
    ratios = {"tcp_1mb_to_socket_ratio", "tcp_1mb_to_staged_socket_ratio", "tcp_1mb_import_cpu_ratio"}
    assert ratios <= figures.keys()
    assert any(NIXL_OVER_TCP in name for name in figures) == installed()
    assert aims["tcp_1mb_to_socket_ratio"]["got"] == figures["tcp_1mb_to_socket_ratio"]
    assert all(aim["want"].startswith("<=" if "cpu" in name else ">=") for name, aim in aims.items())


TRUTH = "the cat sat on the mat"


@pytest.mark.parametrize(
    ("given", "truth", "rouge"),
    [
        ("the cat lay on the mat", TRUTH, (5 / 6, 3 / 5, 5 / 6)),
        (TRUTH, TRUTH, (1, 1, 1)),
        ("dog", TRUTH, (0, 0, 0)),
        ("b a", "a b", (1, 0, 1 / 2)),  # the longest common subsequence keeps the order
        ("", "", (1, 1, 1)),
        ("", "a", (0, 0, 0)),
    ],
)
def test_rouge_is_the_f_measure_of_words_in_common(given: str, truth: str, rouge: tuple[float, ...]) -> None:
    found = rouge_of([given.split()], [truth.split()])
    assert all(math.isclose(found[kind], value) for kind, value in zip("12l", rouge, strict=True))


def test_the_texts_are_those_that_the_demo_models_training_holds_out(prompt_response: Path) -> None:
    corpus, tokenizer = demo_script("demo_corpus"), AutoTokenizer.from_pretrained(DEMO_MODEL)
    read = {path.stem: corpus.read_exchanges(path) for path in sorted(prompt_response.glob("*.json"))}
    wanted = corpus.build_corpus(read, tokenizer, Random(0)).held_out
    found = held_out_texts(prompt_response, tokenizer)
    assert len(found) == 175
    assert [text[: corpus.SEQUENCE_TOKENS] for text in found] == [example.ids for example in wanted]


def test_tasks_are_written_as_the_chat_template_writes_them() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
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
    found = run_kv_quality_bench(prompt_response.parent, texts=2, tasks=2, weights=False)
    rows = found["tables"]["Lossy KV and answers"]
    assert [row["run"] for row in rows] == list(ROWS)
    assert [row["KV bytes"] for row in rows] == ["–", "1.00", "0.55", "0.30", "0.50"]
    figures = found["figures"]
    assert figures["raw_perplexity"] == figures["one_instance_perplexity"]
    assert len({figures[f"{row}_perplexity"] for row in ("raw", "int8", "int4", "fp8")}) == 4  # codecs do something
    assert all(figures[f"{row}_perplexity"] < 1.2 * figures["raw_perplexity"] for row in ("int8", "int4", "fp8"))
    assert figures["raw_answers_identical_share"] == 1.0


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_transport_moves_kv_between_engines() -> None:
    """NIXL where it is installed; the test of the codecs moves KV over TCP."""
    transport = TRANSPORTS[-1]
    figures = run_kv_engines_bench((transport,), rounds=1)["figures"]
    names = ("gb_per_s", "to_socket_ratio", "ms")
    assert {f"{transport}_{size}mb_{name}" for size in (1, 8, 64) for name in names} == figures.keys()
    assert all(value > 0 for value in figures.values())
