"""The classifier: OPT over the ends of a prompt (TetriInfer section 3.3.2). Imports torch."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import OPTConfig, OPTForSequenceClassification
from transformers.utils.logging import disable_progress_bar

from predictor.checkpoint import TOKENIZER_FILE, BrokenCheckpoint, CheckpointMeta, read_meta
from shared.domain.job import ends_of
from shared.errors import Unavailable

# Tokenising a whole 100,000-token prompt to keep 128 of its tokens would eat the deadline.
CHARACTERS_PER_INPUT_TOKEN = 16


class LengthClassifier:
    """Text in, probabilities per length bucket out. Not for several threads at once."""

    def __init__(self, network: Any, tokenizer: Tokenizer, meta: CheckpointMeta) -> None:
        self.meta = meta
        self._network = network
        self._tokenizer = tokenizer

    def probabilities(self, text: str) -> list[float]:
        """One per bucket, summing to 1. Raises Unavailable when the network gives no numbers."""
        logits = torch.tensor(self.logits(text))
        if not bool(torch.isfinite(logits).all()):
            raise Unavailable("the length classifier gave no finite numbers")
        result: list[float] = torch.softmax(logits / self.meta.temperature, dim=0).tolist()
        return result

    @torch.inference_mode()
    def logits(self, text: str) -> list[float]:
        """The network's raw output, one per bucket."""
        ids = encode_ends(self._tokenizer, text, self.meta.input_tokens, self._network.config.bos_token_id)
        result: list[float] = self._network(input_ids=torch.tensor([ids])).logits[0].float().tolist()
        return result


def load_classifier(folder: Path, threads: int = 1, dtype: str = "float32") -> LengthClassifier:
    """Load a checkpoint and try it once. Raises BrokenCheckpoint for anything that is wrong with it.

    `threads` sets torch's thread count for the whole process.
    """
    meta = read_meta(folder)
    torch.set_num_threads(threads)
    disable_progress_bar()  # our log is one JSON object a line
    try:
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        network, loading = OPTForSequenceClassification.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True, output_loading_info=True
        )
        if loading["missing_keys"]:  # transformers would go on with random numbers
            raise ValueError(f"weights lack {sorted(loading['missing_keys'])[:3]}")
        _check_shapes(network.config, tokenizer, meta)
        classifier = LengthClassifier(network.eval(), tokenizer, meta)
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
