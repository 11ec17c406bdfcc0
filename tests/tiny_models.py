"""Small random models that tests make for themselves: nothing is downloaded."""

from pathlib import Path

VOCABULARY = 512


def make_llama(path: Path, *, kv_heads: int = 2, head_dim: int = 32, seed: int = 0) -> Path:
    """A Llama of 3 layers with random weights, wide enough that greedy tokens depend on the whole context.

    It has no tokenizer: engines must be started with `skip_tokenizer_init`.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4 * head_dim,
        intermediate_size=8 * head_dim,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path
