"""The demo model's text: free text and synthetic tasks as token ids with loss weights, in batches."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from demo_tasks import Exchange, load_facts, make_conversation
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
PAD, END, SYSTEM, USER, ASSISTANT = range(len(SPECIAL_TOKENS))  # their ids
SEQUENCE_TOKENS = 512  # longer examples are cut
BATCH_TOKENS = 2048  # rows x columns of one batch, padding included
PROMPT_LOSS_WEIGHT = 0.2  # of a token that the model only has to read; an answer's token counts 1
SYNTHETIC_PER_EPOCH = 5000
# Part of a file's examples in each epoch, by the end of its name; files not named here are used whole. Prose
# matters most to a reader, and the toolformer examples are uniform, with long prompts.
EPOCH_SHARES = {"codegen": 0.5, "toolformer": 0.2}
HELD_OUT_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation as token ids, and the loss weight of each as a target."""

    ids: list[int]
    weights: list[float]


@dataclass(frozen=True, slots=True)
class Corpus:
    """The free text, encoded and divided."""

    train: dict[str, list[Example]]  # by the name of the file
    held_out: list[Example]


def read_exchanges(path: Path) -> list[Exchange]:
    """Read a file of GPTeacher as pairs: what the user says, what the assistant answers."""
    records: list[dict[str, str]] = json.loads(path.read_text(encoding="utf-8"))
    return [(f"{r['instruction']}\n{r['input']}".strip(), r["response"].strip()) for r in records]


def build_corpus(
    exchanges: dict[str, list[Exchange]], tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> Corpus:
    """Encode the free text and hold some of it out. The same seed gives the same division."""
    corpus = Corpus({}, [])
    for name, rows in exchanges.items():
        examples = [encode(tokenizer, [row], "") for row in rows]
        rng.shuffle(examples)
        held_out = int(len(examples) * HELD_OUT_SHARE)
        corpus.held_out.extend(examples[:held_out])
        corpus.train[name] = examples[held_out:]
    return corpus


def encode(tokenizer: PreTrainedTokenizerFast, turns: list[Exchange], system_prompt: str) -> Example:
    """Encode a conversation exactly as `CHAT_TEMPLATE` writes it, cut after `SEQUENCE_TOKENS`."""
    ids: list[int] = []
    weights: list[float] = []
    segments = [(SYSTEM, system_prompt, PROMPT_LOSS_WEIGHT)] if system_prompt else []
    for request, answer in turns:
        segments += [(USER, request, PROMPT_LOSS_WEIGHT), (ASSISTANT, answer, 1.0)]
    for role, text, weight in segments:
        content = [*tokenizer.encode(text, add_special_tokens=False), END]
        ids += [role, *content]
        weights += [0.0, *[weight] * len(content)]  # the server writes the role tokens, never the model
    return Example(ids[:SEQUENCE_TOKENS], weights[:SEQUENCE_TOKENS])


def endless_batches(tokenizer: PreTrainedTokenizerFast, corpus: Corpus, rng: random.Random) -> Iterator[list[Example]]:
    """Yield batches epoch after epoch: a share of each file's examples, and new synthetic tasks."""
    facts = load_facts()
    while True:
        epoch: list[Example] = []
        for name, examples in corpus.train.items():
            share = EPOCH_SHARES.get(name.rpartition("_")[2], 1.0)
            epoch += rng.sample(examples, int(len(examples) * share))
        for _ in range(SYNTHETIC_PER_EPOCH):
            system_prompt = rng.choice(facts["system_prompts"]) if rng.random() < 0.3 else ""
            epoch.append(encode(tokenizer, make_conversation(rng, facts), system_prompt))
        yield from batches(epoch, rng)


def batches(examples: list[Example], rng: random.Random) -> list[list[Example]]:
    """Group examples of similar length into batches of at most `BATCH_TOKENS` padded tokens, shuffled."""
    ordered = sorted(examples, key=lambda example: len(example.ids) * rng.uniform(0.9, 1.1))
    result: list[list[Example]] = [[]]
    for example in ordered:
        if padded_width([*result[-1], example]) * (len(result[-1]) + 1) > BATCH_TOKENS:
            result.append([])
        result[-1].append(example)
    rng.shuffle(result)
    return result


def padded_width(batch: list[Example]) -> int:
    """Return the columns of a batch: a multiple of 32, since new shapes cost the CPU kernels a set-up."""
    return max(math.ceil(len(example.ids) / 32) * 32 for example in batch)
