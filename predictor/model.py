"""The classifier: OPT for sequence classification (TetriInfer 3.3.2), over the ends of a prompt. Imports torch.

The paper classifies the whole prompt; that the ends decide is ours.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from tokenizers import Tokenizer
from transformers import OPTConfig, OPTForSequenceClassification

from predictor.checkpoint import TOKENIZER_FILE, BrokenCheckpoint, CheckpointMeta, read_meta
from shared.domain.job import ends_of
from shared.errors import Unavailable

WEIGHTS_FILE = "model.safetensors"
# Tokenising a whole 100,000-token prompt to keep 128 of its tokens would eat the deadline.
CHARACTERS_PER_INPUT_TOKEN = 16


class LengthClassifier:
    """Token ids in, probabilities per length bucket out. Not for several threads at once.

    input_tokens: how much of a prompt it looks at; at most what it was trained on, fewer are quicker.
    """

    def __init__(self, network: Any, tokenizer: Tokenizer, meta: CheckpointMeta) -> None:
        self.meta = meta
        self.input_tokens = meta.input_tokens
        self._network = network
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of a text's head and tail."""
        return encode_ends(self._tokenizer, text, self.input_tokens, self._network.config.bos_token_id)

    def batch(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Probabilities of each row, summing to 1. Raises Unavailable when the network gives no numbers."""
        logits = torch.tensor(self.logits(rows))
        if not bool(torch.isfinite(logits).all()):
            raise Unavailable("the length classifier gave no finite numbers")
        result: list[list[float]] = torch.softmax(logits / self.meta.temperature, dim=-1).tolist()
        return result

    def probabilities(self, text: str) -> list[float]:
        """Of one text."""
        return self.batch([self.encode(text)])[0]

    @torch.inference_mode()
    def logits(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """The network's raw output for each row. Rows are padded on the right, where a causal network does not look."""
        longest, pad = max(map(len, rows)), self._network.config.pad_token_id
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        device = self._network.device
        output = self._network(input_ids=ids.to(device), attention_mask=mask.to(device))
        result: list[list[float]] = output.logits.float().tolist()
        return result

    def quantised(self) -> "LengthClassifier":
        """The same with int8 weights and activations, for a CPU."""
        from torch.ao.quantization import quantize_dynamic

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it will move to another package
            network = quantize_dynamic(self._network, {torch.nn.Linear}, dtype=torch.qint8)  # type: ignore[no-untyped-call]
        return self._like(network, self.input_tokens)

    def looking_at(self, input_tokens: int) -> "LengthClassifier":
        """The same that looks at so many tokens of a prompt, at most as many as it was trained on."""
        return self._like(self._network, min(self.meta.input_tokens, input_tokens))

    def _like(self, network: Any, input_tokens: int) -> "LengthClassifier":
        other = LengthClassifier(network, self._tokenizer, self.meta)
        other.input_tokens = input_tokens
        return other


def load_classifier(folder: Path, threads: int = 1, dtype: str = "float32", device: str = "cpu") -> LengthClassifier:
    """Load a checkpoint and try it once. Raises BrokenCheckpoint for anything that is wrong with it.

    `threads` sets torch's thread count for the whole process.
    """
    meta = read_meta(folder)
    torch.set_num_threads(threads)
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        config = OPTConfig.from_pretrained(folder, local_files_only=True)
        network = OPTForSequenceClassification(config)
        network.load_state_dict(
            load((folder / WEIGHTS_FILE).read_bytes())
        )  # a mapped file that is replaced kills its reader
        network = network.to(getattr(torch, dtype))
        _check_shapes(network.config, tokenizer, meta)
        classifier = LengthClassifier(network.to(device).eval(), tokenizer, meta)
        classifier.probabilities("How long will this answer be?")
    except Exception as error:  # a damaged file shows as nearly anything; it is logged where it is caught
        raise BrokenCheckpoint(f"{folder}: {type(error).__name__}: {error}") from error
    return classifier


def encode_ends(tokenizer: Tokenizer, text: str, input_tokens: int, bos_token_id: int) -> list[int]:
    """Ids of a text's head and tail, 1 to `input_tokens` of them. The same cut at training and in service."""
    most = input_tokens * CHARACTERS_PER_INPUT_TOKEN
    if len(text) > 2 * most:
        text = text[:most] + text[-most:]
    ids: list[int] = ends_of(tokenizer.encode(text).ids, input_tokens)
    return ids or [bos_token_id]


def _check_shapes(config: OPTConfig, tokenizer: Tokenizer, meta: CheckpointMeta) -> None:
    if config.num_labels != meta.bucket_count:
        raise ValueError(f"{config.num_labels} outputs for {meta.bucket_count} buckets")
    if config.max_position_embeddings < meta.input_tokens:
        raise ValueError(f"{config.max_position_embeddings} positions for {meta.input_tokens} input tokens")
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens for {config.vocab_size} embeddings")
