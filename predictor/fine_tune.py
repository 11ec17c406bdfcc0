"""Fine-tunes the classifier with the Hugging Face Trainer, from a base model or from a new small OPT network. Imports
torch and transformers.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoTokenizer,
    EarlyStoppingCallback,
    OPTConfig,
    OPTForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from predictor.buckets import Buckets
from predictor.evaluate import OnProgress, silent
from predictor.examples import Example, labels
from predictor.model import encode_ends
from shared.errors import InvalidRequest

SIZES = {  # of new networks: layers, hidden size, heads, vocabulary
    "tiny": (2, 64, 2, 1024),
    "small": (2, 128, 4, 4096),
    "medium": (4, 256, 4, 8192),
    "base": (12, 768, 12, 16384),
}
BOS, PAD = "</s>", "<pad>"


def train_tokenizer(texts: Iterable[str], size: str) -> Tokenizer:
    """A byte-level BPE over the training prompts, beginning each text with `</s>` as OPT's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES[size][3],
        special_tokens=[BOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def new_network(tokenizer: Tokenizer, size: str, input_tokens: int, bucket_count: int) -> Any:
    """An untrained OPTForSequenceClassification of that size."""
    layers, hidden, heads, _ = SIZES[size]
    bos, pad = tokenizer.token_to_id(BOS), tokenizer.token_to_id(PAD)
    return OPTForSequenceClassification(
        OPTConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=hidden,
            word_embed_proj_dim=hidden,
            ffn_dim=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=input_tokens,
            num_labels=bucket_count,
            bos_token_id=bos,
            eos_token_id=bos,
            pad_token_id=pad,
        )
    )


Row = dict[str, Any]
CONSOLE = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class FineTuning:
    """Settings of a training. from_scratch: a size of SIZES, instead of `base`. patience: epochs without a lower loss
    on the validation split that end the training. device: cpu, cuda, or auto.
    """

    buckets: Buckets
    base: str = "facebook/opt-125m"
    from_scratch: str = ""
    input_tokens: int = 128
    epochs: float = 3.0
    max_steps: int = -1
    batch_size: int = 32
    learning_rate: float = 5e-5
    class_weights: bool = False
    seed: int = 0
    patience: int = 2
    bf16: bool = False
    device: str = "auto"


def start(train: list[Example], plan: FineTuning) -> tuple[Any, Tokenizer]:
    """The network to fine-tune and its tokenizer. Raises InvalidRequest for an unavailable device or base."""
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("--device cuda: torch sees no CUDA device")
    set_seed(plan.seed)
    disable_progress_bar()  # of loading and writing weights
    set_verbosity_error()  # a warning that the base has no classifier's head
    count = plan.buckets.count
    if plan.from_scratch:
        if plan.from_scratch not in SIZES:
            raise InvalidRequest(f"--from-scratch {plan.from_scratch!r}: known sizes are {', '.join(SIZES)}")
        tokenizer = train_tokenizer((example.text for example in train), plan.from_scratch)
        return new_network(tokenizer, plan.from_scratch, plan.input_tokens, count), tokenizer
    try:
        network = OPTForSequenceClassification.from_pretrained(plan.base, num_labels=count, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(plan.base).backend_tokenizer
    except (OSError, ValueError) as error:  # no such folder, no hub, no weights, another kind of model
        reason = str(error).strip().partition("\n")[0]
        raise InvalidRequest(
            f"--base {plan.base!r}: {reason} Use the folder or the hub name of an OPT model, or train without a base: "
            f"--from-scratch {', '.join(SIZES)}"
        ) from error
    return network, tokenizer


class _Progress(TrainerCallback):  # type: ignore[misc]  # transformers is Any to mypy
    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._on_progress("training", state.global_step, state.max_steps)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._on_progress("training", state.global_step, state.global_step)  # patience may have ended the training


def fine_tune(
    network: Any,
    tokenizer: Tokenizer,
    train: list[Example],
    val: list[Example],
    plan: FineTuning,
    folder: Path,
    on_progress: OnProgress = silent,
) -> Any:
    """Train; returns the network after the epoch with the lowest loss on `val`.

    folder: for the state after each epoch; a training continues from the last state there.
    """
    pad, bos = network.config.pad_token_id, network.config.bos_token_id
    weights = class_weights(labels(train, plan.buckets), plan.buckets.count) if plan.class_weights else None

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        weight = None if weights is None else torch.tensor(weights, device=labels.device)
        total = cross_entropy(outputs["logits"].float(), labels, weight=weight, reduction="sum")
        return total / (labels.numel() if num_items_in_batch is None else num_items_in_batch)

    trainer = Trainer(
        model=network,
        args=_arguments(plan, folder),
        train_dataset=_rows(train, tokenizer, bos, plan),
        eval_dataset=_rows(val, tokenizer, bos, plan),
        data_collator=lambda rows: collate(rows, pad),
        compute_loss_func=loss,
        callbacks=[EarlyStoppingCallback(plan.patience), _Progress(on_progress)],
    )
    trainer.remove_callback(PrinterCallback)  # prints a dictionary for each epoch
    last = get_last_checkpoint(str(folder))
    if last is not None:
        CONSOLE.print(f"The training continues from {last}", markup=False, highlight=False, soft_wrap=True)
    trainer.train(resume_from_checkpoint=last)
    return trainer.model.eval().float().cpu()


def fit_temperature(logits: list[list[float]], truth: list[int]) -> float:
    """The divisor of logits with the lowest log loss, from 0.25 to 4 (Guo et al. 2017, section 4.2)."""
    rows, labels_ = torch.tensor(logits), torch.tensor(truth)
    candidates = [math.pow(2, step / 8) for step in range(-16, 17)]
    losses = {divisor: float(cross_entropy(rows / divisor, labels_)) for divisor in candidates}
    return min(candidates, key=losses.__getitem__)


def class_weights(truth: list[int], count: int) -> list[float]:
    """Inverse frequencies with a mean of 1 over the examples; 0 for a class without examples."""
    found = Counter(truth)
    return [len(truth) / (len(found) * found[label]) if found[label] else 0.0 for label in range(count)]


def collate(rows: list[Row], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Rows, padded on the right to the longest, as [row, token] tensors."""
    longest = max(len(row["input_ids"]) for row in rows)
    gaps = [longest - len(row["input_ids"]) for row in rows]
    pairs = list(zip(rows, gaps, strict=True))
    return {
        "input_ids": torch.tensor([row["input_ids"] + [pad_token_id] * gap for row, gap in pairs]),
        "attention_mask": torch.tensor([[1] * (longest - gap) + [0] * gap for gap in gaps]),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def save(network: Any, tokenizer: Tokenizer, folder: Path, tokenizer_file: str) -> None:
    network.save_pretrained(folder)
    tokenizer.save(str(folder / tokenizer_file))


def _rows(examples: list[Example], tokenizer: Tokenizer, bos: int, plan: FineTuning) -> list[Row]:
    truth = labels(examples, plan.buckets)
    return [
        {"input_ids": encode_ends(tokenizer, example.text, plan.input_tokens, bos), "labels": label}
        for example, label in zip(examples, truth, strict=True)
    ]


def _arguments(plan: FineTuning, folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=plan.epochs,
        max_steps=plan.max_steps,
        per_device_train_batch_size=plan.batch_size,
        per_device_eval_batch_size=plan.batch_size,
        learning_rate=plan.learning_rate,
        warmup_steps=0.1,
        weight_decay=0.01,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        logging_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=plan.seed,
        bf16=plan.bf16,
        use_cpu=plan.device == "cpu" or not torch.cuda.is_available(),
    )
