"""A small OPT classifier from nothing, for machines without a model hub. Imports torch."""

from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import OPTConfig, OPTForSequenceClassification

# layers, hidden size, heads, vocabulary
SIZES = {
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
