"""Train the demo model: a Llama-architecture chat model of 5.5 million parameters, small enough for git.

    python models/train_demo_model.py --data DIR --out models/demo --minutes 75 --threads 2

`DIR` holds GPTeacher's JSON files, lists of {"instruction", "input", "response"}. The script mixes them with
the synthetic tasks of `demo_tasks`, trains for the given time and writes a Hugging Face folder. It saves the
folder every few minutes, so an interrupted run leaves a usable model; `--resume` goes on from its weights.
"""

import argparse
import copy
import logging
import math
import random
import shutil
import time
from pathlib import Path

import torch
from demo_corpus import (
    END,
    PAD,
    SPECIAL_TOKENS,
    SYSTEM,
    Corpus,
    Example,
    batches,
    build_corpus,
    endless_batches,
    padded_width,
    read_exchanges,
)
from demo_tasks import Exchange, load_facts, make_conversation
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

log = logging.getLogger("train_demo_model")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- set role = message['role'] if message['role'] in ['system', 'assistant'] else 'user' -%}"
    "{{- '<|' + role + '|>' + (message['content'] or '') | trim + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
VOCABULARY_SIZE = 4096
PEAK_LEARNING_RATE = 1.5e-3
WARM_UP_STEPS = 100
DROPOUT = 0.1  # on each block's two residual branches; the text is small and seen many times
SAVE_EVERY_S = 300.0


def main() -> None:
    """Parse the arguments, then train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder of GPTeacher's *.json files")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write (it is replaced)")
    parser.add_argument("--minutes", type=float, default=75.0, help="training budget, wall clock")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="start from the weights and tokenizer in --out")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    run(arguments.data, arguments.out, arguments.minutes * 60, arguments.seed, arguments.resume)


def run(data: Path, out: Path, budget_s: float, seed: int, resume: bool) -> None:
    """Prepare tokenizer, text and model, train for `budget_s` seconds and save into `out`."""
    rng = random.Random(seed)
    exchanges = {path.stem: read_exchanges(path) for path in sorted(data.glob("*.json"))}
    if not any(exchanges.values()):
        raise SystemExit(f"no examples in {data}/*.json")
    vocabulary = Tokenizer.from_file(str(out / "tokenizer.json")) if resume else train_bpe(exchanges, rng)
    tokenizer = as_chat_tokenizer(vocabulary)
    corpus = build_corpus(exchanges, tokenizer, random.Random(seed))  # the same division after --resume
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32) if resume else build_model()
    log.info("%d parameters", sum(p.numel() for p in model.parameters()))
    train(model, tokenizer, corpus, rng, budget_s, out)


def train_bpe(exchanges: dict[str, list[Exchange]], rng: random.Random) -> Tokenizer:
    """Train a byte-level BPE on the free text and some synthetic tasks. Each digit is a token."""
    facts = load_facts()
    text = [part for rows in exchanges.values() for exchange in rows for part in exchange]
    text += [part for _ in range(4000) for turn in make_conversation(rng, facts) for part in turn]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def as_chat_tokenizer(vocabulary: Tokenizer) -> PreTrainedTokenizerFast:
    """Add the special tokens' roles and the chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=vocabulary,
        pad_token=SPECIAL_TOKENS[PAD],
        eos_token=SPECIAL_TOKENS[END],
        additional_special_tokens=SPECIAL_TOKENS[SYSTEM:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def build_model() -> LlamaForCausalLM:
    """Return the untrained model: 6 layers, width 256, 4 heads over 2 KV heads of 64, tied embeddings."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config)


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    corpus: Corpus,
    rng: random.Random,
    budget_s: float,
    out: Path,
) -> None:
    """Train until `budget_s` seconds have passed; save every `SAVE_EVERY_S` seconds and at the end."""
    optimizer = build_optimizer(model)
    started = saved = time.monotonic()
    mean_loss, step = 0.0, 0
    for batch in endless_batches(tokenizer, corpus, rng):
        elapsed_s = time.monotonic() - started
        if elapsed_s >= budget_s:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, elapsed_s / budget_s)
        loss = batch_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        mean_loss += (loss.item() - mean_loss) * max(0.01, 1 / step)
        if step % 200 == 0:
            log.info("step %d  %.0f s  loss %.3f", step, elapsed_s, mean_loss)
        if time.monotonic() - saved >= SAVE_EVERY_S:
            save(model, tokenizer, out)
            log.info("saved  held-out loss %.3f", held_out_loss(model, corpus.held_out))
            saved = time.monotonic()
    save(model, tokenizer, out)
    log.info("done  step %d  loss %.3f", step, mean_loss)
    log.info("held-out loss %.3f", held_out_loss(model, corpus.held_out))


def build_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only, and put dropout on the residual branches."""
    for layer in model.model.layers:
        for branch in (layer.self_attn.o_proj, layer.mlp.down_proj):
            branch.register_forward_hook(drop_out)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def drop_out(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Drop whole channels of a sequence: a hook, since Llama's own code has no residual dropout.

    One mask for all positions (Gal and Ghahramani 2016, section 3) costs next to nothing on a CPU.
    """
    if not module.training:
        return output
    mask = torch.empty_like(output[:, :1]).bernoulli_(1 - DROPOUT)
    return output * (mask / (1 - DROPOUT))


def learning_rate(step: int, progress: float) -> float:
    """Return a warm-up by steps, then a cosine over the time budget (`progress` in 0..1) down to 2 %."""
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))
    return PEAK_LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * cosine


def batch_loss(model: LlamaForCausalLM, batch: list[Example]) -> Tensor:
    """Return the weighted mean cross-entropy, nats per token. Padding is on the right: causality hides it."""
    width = padded_width(batch)
    ids = torch.tensor([e.ids + [PAD] * (width - len(e.ids)) for e in batch])
    weights = torch.tensor([[*e.weights[1:], *[0.0] * (width + 1 - len(e.ids))] for e in batch])
    targets = ids.roll(-1, dims=1)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    losses = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def held_out_loss(model: LlamaForCausalLM, held_out: list[Example]) -> float:
    """Return the mean loss on the answers of the held-out free text, in nats per token."""
    answers = [Example(e.ids, [float(weight == 1.0) for weight in e.weights]) for e in held_out]
    total = count = 0.0
    model.eval()
    with torch.no_grad():
        for batch in batches([e for e in answers if any(e.weights)], random.Random(0)):
            tokens = sum(sum(e.weights) for e in batch)
            total += batch_loss(model, batch).item() * tokens
            count += tokens
    model.train()
    return total / count


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the model in bfloat16 to a temporary folder, then put it in the place of `out`."""
    new, old = (out.with_name(out.name + suffix) for suffix in (".new", ".old"))
    shutil.rmtree(new, ignore_errors=True)
    exported = copy.deepcopy(model).to(torch.bfloat16)
    exported.generation_config = GenerationConfig(
        eos_token_id=END, pad_token_id=PAD, do_sample=True, temperature=0.6, top_p=0.9
    )
    exported.save_pretrained(new)
    tokenizer.save_pretrained(new, save_jinja_files=False)
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


if __name__ == "__main__":
    main()
