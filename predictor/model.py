"""The classifier: OPT for sequence classification (TetriInfer 3.3.2), over the ends of a prompt. Imports torch.

The paper classifies the whole prompt; the restriction to the ends is ours.
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
    """Token ids in, probabilities of the length buckets out. Not thread-safe.

    input_tokens: of a prompt, at most as many as in the training; fewer are faster.
    """

    def __init__(self, network: Any, tokenizer: Tokenizer, meta: CheckpointMeta) -> None:
        self.meta = meta
        self.input_tokens = meta.input_tokens
        self._network = network
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return encode_ends(self._tokenizer, text, self.input_tokens, self._network.config.bos_token_id)

    def batch(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Probabilities of each row. Raises Unavailable when the network's output is not finite."""
        logits = torch.tensor(self.logits(rows))
        if not bool(torch.isfinite(logits).all()):
            raise Unavailable("the length classifier's output is not finite")
        result: list[list[float]] = torch.softmax(logits / self.meta.temperature, dim=-1).tolist()
        return result

    def probabilities(self, text: str) -> list[float]:
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
        """A copy with int8 weights and activations, for a CPU."""
        from torch.ao.quantization import quantize_dynamic

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its move to another package
            network = quantize_dynamic(self._network, {torch.nn.Linear}, dtype=torch.qint8)  # type: ignore[no-untyped-call]
        return self._copy(network, self.input_tokens)

    def with_input_tokens(self, input_tokens: int) -> "LengthClassifier":
        """A copy that reads fewer tokens of a prompt."""
        return self._copy(self._network, min(self.meta.input_tokens, input_tokens))

    def _copy(self, network: Any, input_tokens: int) -> "LengthClassifier":
        other = LengthClassifier(network, self._tokenizer, self.meta)
        other.input_tokens = input_tokens
        return other


def load_classifier(folder: Path, threads: int = 1, dtype: str = "float32", device: str = "cpu") -> LengthClassifier:
    """Load a checkpoint and run it once. Raises BrokenCheckpoint for any problem.

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
        )  # not mapped: replacing a mapped file kills its reader
        network = network.to(getattr(torch, dtype))
        _check_shapes(network.config, tokenizer, meta)
        classifier = LengthClassifier(network.to(device).eval(), tokenizer, meta)
        classifier.probabilities("How long will this answer be?")
    except Exception as error:  # damaged files cause many types of errors
        raise BrokenCheckpoint(f"{folder}: {type(error).__name__}: {error}") from error
    return classifier


def encode_ends(tokenizer: Tokenizer, text: str, input_tokens: int, bos_token_id: int) -> list[int]:
    """The ids of a text's head and tail, 1 to `input_tokens` of them; the same in training and in service."""
    limit = input_tokens * CHARACTERS_PER_INPUT_TOKEN
    if len(text) > 2 * limit:
        text = text[:limit] + text[-limit:]
    ids: list[int] = ends_of(tokenizer.encode(text).ids, input_tokens)
    return ids or [bos_token_id]


def _check_shapes(config: OPTConfig, tokenizer: Tokenizer, meta: CheckpointMeta) -> None:
    if config.num_labels != meta.bucket_count:
        raise ValueError(f"{config.num_labels} outputs for {meta.bucket_count} buckets")
    if config.max_position_embeddings < meta.input_tokens:
        raise ValueError(f"{config.max_position_embeddings} positions for {meta.input_tokens} input tokens")
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens for {config.vocab_size} embeddings")
