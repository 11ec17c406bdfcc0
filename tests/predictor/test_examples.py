import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from predictor.buckets import Buckets
from predictor.examples import (
    ServedTokenizer,
    digest,
    estimate_tokens,
    labels,
    load_examples,
    load_served,
    split_examples,
    split_of,
)
from shared.errors import InvalidRequest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def served() -> ServedTokenizer:
    """One token a known word; the others are unknown."""
    words = ["say", "it", "be", "brief", "yes", "no", "<|user|>"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(["?", *words])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|user|>"])
    return ServedTokenizer(tokenizer, lambda prompt: f"<|user|> {prompt}")


def write(path: Path, records: list[object]) -> Path:
    text = json.dumps(records) if path.suffix == ".json" else "\n".join(map(json.dumps, records)) + "\n"
    path.write_text(text)
    return path


def test_all_forms_of_records(tmp_path: Path, served: ServedTokenizer) -> None:
    write(tmp_path / "a.json", [{"instruction": "say it", "input": "be brief", "response": "yes no"}])
    write(tmp_path / "b.jsonl", [{"prompt": "say", "response": "yes"}, {"prompt": "it", "output_tokens": 900}])
    write(tmp_path / "c.jsonl", [{"prompt": "say", "response": "yes"}])
    found = load_examples([tmp_path], served)
    # An end token counts; special tokens of the template are not seen; duplicates are one.
    assert sorted((one.text, one.prompt_tokens, one.output_tokens) for one in found) == [
        ("it", 2, 900),
        ("say", 2, 2),
        ("say it be brief", 5, 3),
    ]


def test_records_of_a_gateway(tmp_path: Path, served: ServedTokenizer) -> None:
    figures = {"cut": False, "max_tokens": 900}
    lines = [
        {"seen": "say yes\n", "prompt_tokens": 700, "output_tokens": 5, **figures},
        {"seen": "say yes\n", "prompt_tokens": 700, "output_tokens": 9, **figures},
        {"seen": "", "prompt_tokens": 1, "output_tokens": 900, **figures, "cut": True},
    ]
    write(tmp_path / "lengths.jsonl", [*lines[:1], {"prompt": "it", "output_tokens": 3}])
    aside = write(tmp_path / "lengths.jsonl.1", list(lines[1:]))
    found = load_examples([tmp_path], served)
    assert sorted((one.text, one.prompt_tokens, one.output_tokens) for one in found) == [
        ("", 1, 900),
        ("it", 2, 3),
        ("say yes\n", 700, 5),
        ("say yes\n", 700, 9),
    ]
    assert all(one.split == split_of(one.text) for one in found)
    assert found == load_examples([tmp_path / "lengths.jsonl", aside], served)
    write(aside, [*lines, {"seen": "x", "prompt_tokens": 1}])
    with pytest.raises(InvalidRequest, match=r"lengths\.jsonl\.1, record 4: output_tokens"):
        load_examples([tmp_path], served)
    aside.write_text('{"seen": "sa')
    with pytest.raises(InvalidRequest, match=r"lengths\.jsonl\.1:1: not JSON"):
        load_examples([aside], served)


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ("text", "a prompt without an answer"),
        (7, "expected an object"),
        ({"prompt": 3, "response": "x"}, "prompt must be a string"),
        ({"response": "x"}, "no prompt, instruction, messages or conversations among 'response'"),
        ({"prompt": "x"}, "response must be a string"),
        ({"prompt": "x", "output_tokens": -1}, "output_tokens"),
        ({"prompt": "x", "output_tokens": True}, "output_tokens"),
        ({"seen": 3, "prompt_tokens": 1, "output_tokens": 1}, "seen must be a string"),
        ({"seen": "x", "output_tokens": 1}, "prompt_tokens"),
        ({"prompt": "x", "output_tokens": 10**400}, "output_tokens must be a whole number"),
        ({"prompt": "x", "output_tokens": 1, "sample": float("inf")}, "sample must be a whole number"),
    ],
)
def test_bad_records_are_named(tmp_path: Path, served: ServedTokenizer, record: object, complaint: str) -> None:
    file = write(tmp_path / "data.json", [{"prompt": "say", "response": "yes"}, record])
    with pytest.raises(InvalidRequest, match=f"data.json, record 2: .*{complaint}"):
        load_examples([file], served)


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "lengths.jsonl.1"])
def test_only_line_ends_separate_records(tmp_path: Path, served: ServedTokenizer, name: str) -> None:
    record = json.dumps({"prompt": "say\u2028it\u0085be\u2029brief", "response": "yes"}, ensure_ascii=False)
    file = tmp_path / name
    file.write_text(f"\ufeff[{record}]" if name == "data.json" else f"\ufeff{record}\n", encoding="utf-8")
    (found,) = load_examples([file], served)
    assert found.text == "say it be brief"  # of the tokenizer, which splits at them


@pytest.mark.parametrize("text", ["{", '{"prompt": "x"}', "[]"])
def test_bad_files_are_named(tmp_path: Path, served: ServedTokenizer, text: str) -> None:
    (tmp_path / "data.json").write_text(text)
    with pytest.raises(InvalidRequest, match=r"data\.json"):
        load_examples([tmp_path / "data.json"], served)


def test_splits_are_stable_and_share_no_prompt(tmp_path: Path, served: ServedTokenizer) -> None:
    records: list[object] = [
        {"prompt": f"say {'it ' * (number % 40)}", "output_tokens": number} for number in range(2000)
    ]
    forward = load_examples([write(tmp_path / "a.json", records)], served)
    backward = load_examples([write(tmp_path / "b.json", records[::-1])], served)
    assert digest(forward) == digest(backward)
    splits = split_examples(forward)
    texts = [{one.text for one in members} for members in splits.values()]
    assert sum(map(len, texts)) == len(set.union(*texts)) == 40
    assert [split_of("say"), split_of("it")] == [split_of("say"), split_of("it")]
    assert labels(forward[:1], Buckets(200, 4)) == [Buckets(200, 4).of(forward[0].output_tokens)]


def test_splits_have_their_shares() -> None:
    names = [split_of(f"prompt {number}") for number in range(5000)]
    assert names.count("train") / 5000 == pytest.approx(0.8, abs=0.03)
    assert names.count("test") / 5000 == pytest.approx(0.1, abs=0.03)


def test_an_unusable_served_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="no usable tokenizer"):
        load_served(str(tmp_path))


def test_an_uncounted_text_is_estimated() -> None:
    assert [estimate_tokens(text) for text in ("", "four", "fives")] == [0, 1, 2]


def test_the_public_data_is_read(served: ServedTokenizer) -> None:
    folder = Path(os.environ.get("POLYPHASE_DATA", REPOSITORY.parent / "shared" / "data")) / "prompt_response"
    if not folder.is_dir():
        pytest.skip(f"no {folder}; set POLYPHASE_DATA to where the public data is")
    examples = load_examples([folder / "gpteacher_roleplay.json"], served)
    assert len(examples) > 1000
    assert all(one.output_tokens > 1 for one in examples)
