"""`polyphase bench kv_quality`: what lossy KV and quantised weights do to answers (ThunderServe, Tables 2, 6 and 7).
Perplexity, right answers, and how much of an answer stays as it is, of the demo model with each codec, and with weights
in int8 where the prompt is computed, or everywhere.

One engine computes a prompt and exports its KV, the other imports it and decodes. Perplexity is teacher-forced: the
importing engine is made to produce the text that follows, and reports at each step how likely that token was. The
prompts are conversations that the demo model's training held out, and new random tasks. One request at a time: a batch
changes bfloat16's last bits.
"""

import importlib
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from benchmarks.kv_engines import EnginePair, Order, engine_pair
from benchmarks.model_families import int8_copy
from benchmarks.results import Aim, Result, at_least, at_most
from benchmarks.suite import DEMO_MODEL
from shared.domain.kv import Codec
from shared.errors import InvalidRequest, Unavailable

TEXTS, TASKS = 80, 120
ANSWER_TOKENS = 64
PROMPT_TOKENS, SCORED_TOKENS = (48, 400), 64  # of a text: the first half is the prompt, at most so many are scored
ROWS: dict[str, Codec | None] = {"one instance": None, **{codec.value: codec for codec in Codec}}
PLAIN, RAW = "one instance", Codec.RAW.value  # without a transfer; exact
INT8_PREFILL, INT8 = "int8 prefill", "int8 weights"  # mixed precision; quantised weights alone
FLOAT_PREFILL, FLOAT = "float32 prefill", "float32"  # its KV is rounded where it is imported; without a transfer
# ThunderServe finds perplexities within 1 % (Table 6), accuracies within 2 points (Table 2) and ROUGE of about 0.95
# (Table 7) with 4 bits.
PERPLEXITY, RIGHT, ROUGE = 1.01, 0.02, 0.9
TRAINING_SEED = 0  # of models/train_demo_model.py, which divides the texts by it
TASK_SEED = 20_261_126
END = 1  # `<|end|>`


@dataclass(frozen=True, slots=True)
class Task:
    """A conversation whose last answer is known."""

    prompt: list[int]
    answer: str


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one row. logprobs: of each scored token. free: words of greedy answers to the first halves of texts."""

    logprobs: list[float]
    free: list[list[str]]
    tasks: list[str]
    wire_bytes: int

    @property
    def perplexity(self) -> float:
        return exp(-fmean(self.logprobs))


def run_kv_quality_bench(data: Path, texts: int = TEXTS, tasks: int = TASKS, *, weights: bool = True) -> Result:
    """data: holds `prompt_response/`, GPTeacher's files. weights: whether other precisions are measured, too."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    low, high = PROMPT_TOKENS
    chosen = [t for t in held_out_texts(data / "prompt_response", tokenizer) if low <= len(t) // 2 <= high]
    if len(chosen) < texts:
        raise InvalidRequest(
            f"{data}/prompt_response: {len(chosen)} held-out texts of {2 * low} tokens and more, need {texts}"
        )
    chosen = Random(1).sample(chosen, texts)
    drawn = drawn_tasks(tokenizer, tasks)
    settings: dict[str, Any] = {"model": str(DEMO_MODEL), "kv_cache_bytes": 32 << 20}
    with engine_pair(**settings, lossy_kv=True) as pair:
        measured = {row: _measure(pair, codec, chosen, drawn, tokenizer) for row, codec in ROWS.items()}
    with TemporaryDirectory(prefix="polyphase-int8-") as folder:
        int8 = {"weights": str(int8_copy(DEMO_MODEL, Path(folder)))} if weights else {}
        if int8:
            with engine_pair(int8, **settings) as pair:
                measured[INT8_PREFILL] = _measure(pair, Codec.RAW, chosen, drawn, tokenizer)
            with engine_pair(**settings, **int8) as pair:
                measured[INT8] = _measure(pair, None, chosen, drawn, tokenizer)
            wide = {"dtype": "float32"}
            with engine_pair(wide, **settings) as pair:
                measured[FLOAT_PREFILL] = _measure(pair, Codec.RAW, chosen, drawn, tokenizer)
            with engine_pair(**settings, **wide) as pair:
                measured[FLOAT] = _measure(pair, None, chosen, drawn, tokenizer)
    return _result(measured, drawn, texts)


def _measure(
    pair: EnginePair, codec: Codec | None, texts: Sequence[list[int]], tasks: Sequence[Task], tokenizer: Any
) -> Measured:
    logprobs, free, wire = list[float](), list[list[str]](), 0

    def answer(prompt: list[int]) -> str:
        found = pair.answer(Order(prompt, ANSWER_TOKENS, stops=[END]), codec)
        return str(tokenizer.decode(found.tokens, skip_special_tokens=True))

    for text in texts:
        prompt, rest = text[: len(text) // 2], text[len(text) // 2 :][:SCORED_TOKENS]
        scored = pair.answer(Order(prompt, len(rest), forced=rest), codec)
        if scored.tokens != rest:
            raise Unavailable(f"{codec}: the engine has produced other tokens than it was given")
        logprobs += scored.logprobs
        wire += scored.transfer.wire_bytes if scored.transfer is not None else 0
        free.append(answer(prompt).split())
    return Measured(logprobs, free, [answer(task.prompt).strip() for task in tasks], wire)


def _result(measured: dict[str, Measured], tasks: Sequence[Task], texts: int) -> Result:
    figures: dict[str, float] = {}
    rows: list[dict[str, object]] = []
    plain, raw = measured[PLAIN], measured[RAW]
    truth = [task.answer for task in tasks]
    right = {row: fmean(map(str.__eq__, each.tasks, truth)) for row, each in measured.items()}
    for row, each in measured.items():
        name = row.replace(" ", "_")
        same = fmean(one == other for one, other in zip(each.free, plain.free, strict=True))
        rouge = rouge_of(each.free, plain.free)
        figures |= {
            f"{name}_perplexity": round(each.perplexity, 3),
            f"{name}_tasks_right_share": round(right[row], 3),
            f"{name}_answers_identical_share": round(same, 3),
            **{f"{name}_rouge_{kind}": round(value, 3) for kind, value in rouge.items()},
        }
        rows.append(
            {
                "run": row,
                "KV bytes": f"{each.wire_bytes / raw.wire_bytes:.2f}" if each.wire_bytes else "–",
                "perplexity": f"{each.perplexity:.3f}",
                "tasks right": f"{right[row]:.3f}",
                "answers identical": f"{same:.3f}",
                **{f"ROUGE-{kind.upper()}": f"{value:.3f}" for kind, value in rouge.items()},
            }
        )
    aims: dict[str, Aim] = {}
    aims[f"{RAW}_answers_identical_share"] = at_least(1.0, figures[f"{RAW}_answers_identical_share"])
    lossy = [each.value for each in Codec if each.lossy]
    for row in [*lossy, *(row for row in (INT8_PREFILL, FLOAT_PREFILL) if row in measured)]:
        name = row.replace(" ", "_")
        aims |= {
            f"{name}_perplexity_ratio": at_most(PERPLEXITY, measured[row].perplexity / raw.perplexity, 4),
            f"{name}_tasks_lost_share": at_most(RIGHT, round(right[RAW] - right[row], 3)),
            f"{name}_rouge_l": at_least(ROUGE, figures[f"{name}_rouge_l"]),
        }
    notes = [
        f"{len(plain.logprobs)} tokens of {texts} held-out conversations scored after their first halves; greedy "
        f"answers of {ANSWER_TOKENS} tokens to these, those of one instance being ROUGE's truth; {len(tasks)} tasks."
    ]
    return {"figures": figures, "aims": aims, "tables": {"Lossy KV and answers": rows}, "notes": notes}


# Overlap of answers.

Words = Sequence[str]


def rouge_of(given: Sequence[Words], truth: Sequence[Words]) -> dict[str, float]:
    """Mean F-measures of words in common: single words (1), pairs (2), and the longest common subsequence (l)."""
    pairs = list(zip(given, truth, strict=True))

    def grams(words: Words, size: int) -> Counter[Any]:
        return Counter(zip(*(words[at:] for at in range(size)), strict=False))

    def overlap(one: Words, other: Words, size: int) -> float:
        found = grams(one, size), grams(other, size)
        return _f_measure((found[0] & found[1]).total(), found[0].total(), found[1].total())

    def mean(measure: Any, *more: int) -> float:
        return fmean(1.0 if one == other else measure(one, other, *more) for one, other in pairs)  # both may be empty

    return {"1": mean(overlap, 1), "2": mean(overlap, 2), "l": mean(_longest)}


def _longest(one: Words, other: Words) -> float:
    best = [0] * (len(other) + 1)  # length of the longest common subsequence with so many words of `other`
    for word in one:
        before = 0
        for at, against in enumerate(other, start=1):
            before, best[at] = best[at], before + 1 if word == against else max(best[at], best[at - 1])
    return _f_measure(best[-1], len(one), len(other))


def _f_measure(common: int, one: int, other: int) -> float:
    return 2 * common / (one + other) if one + other else 0.0


# Prompts, by the scripts that trained the demo model.


def held_out_texts(folder: Path, tokenizer: Any) -> list[list[int]]:
    """Conversations of GPTeacher's files that the demo model's training held out, as token ids.

    Raises InvalidRequest where there are none.
    """
    corpus, rng, texts = demo_script("demo_corpus"), Random(TRAINING_SEED), list[list[int]]()
    for path in sorted(folder.glob("*.json")):
        rows = corpus.read_exchanges(path)
        rng.shuffle(rows)
        texts += [written(tokenizer, [row]) for row in rows[: int(len(rows) * corpus.HELD_OUT_SHARE)]]
    if not texts:
        raise InvalidRequest(f"{folder}: no *.json file of GPTeacher's; see --data")
    return texts


def drawn_tasks(tokenizer: Any, count: int) -> list[Task]:
    """New tasks of the kinds that the demo model has learned to answer, each the second of two turns."""
    module, rng, tasks = demo_script("demo_tasks"), Random(TASK_SEED), list[Task]()
    facts, names = module.load_facts(), list(module.TASKS)
    weights = [weight for _, weight in module.TASKS.values()]
    for _ in range(count):
        before, (request, answer) = (module.TASKS[name][0](rng, facts) for name in rng.choices(names, weights, k=2))
        system = rng.choice(facts["system_prompts"])
        prompt = written(tokenizer, [before, (request, "")], system)[:-1]  # without the end of the answer
        tasks.append(Task(prompt, answer.strip()))
    return tasks


def demo_script(name: str) -> ModuleType:
    """A script of the demo model's training; the folder is no package, and its scripts import each other."""
    folder = str(DEMO_MODEL.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def written(tokenizer: Any, turns: list[tuple[str, str]], system: str = "") -> list[int]:
    """A conversation as the chat template writes it."""
    segments = [("<|system|>", system)] if system else []
    for turn in turns:
        segments += zip(("<|user|>", "<|assistant|>"), turn, strict=True)
    ids: list[int] = []
    for role, text in segments:
        ids += [tokenizer.convert_tokens_to_ids(role), *tokenizer.encode(text, add_special_tokens=False), END]
    return ids
