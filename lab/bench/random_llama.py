"""A Llama with random weights as a folder that an engine can serve, where only its speed counts."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from shared.errors import InvalidRequest

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes, by the names of a config.json; embeddings are tied."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int

    @property
    def head_dim(self) -> int:
        """Of one attention head."""
        return self.hidden_size // self.num_attention_heads


def make_llama(folder: Path, shape: LlamaShape, tokenizer_of: Path, seed: int = 0) -> Path:
    """Write the model into `folder`, with the tokenizer of the model in `tokenizer_of`. Weights are float16.

    Raises InvalidRequest when there is no tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER:
        if not (tokenizer_of / name).is_file():
            raise InvalidRequest(f"{tokenizer_of / name} is missing: the random model takes its tokenizer from there")
        shutil.copy(tokenizer_of / name, folder / name)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        **asdict(shape),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    rng = np.random.default_rng(seed)
    weights = {
        name: np.ones(size, np.float16)
        if len(size) == 1
        else (rng.standard_normal(size, np.float32) * 0.02).astype(np.float16)
        for name, size in _sizes(shape).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _sizes(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for number in range(shape.num_hidden_layers):
        sizes |= {f"model.layers.{number}.{name}.weight": size for name, size in layer.items()}
    return sizes | {"model.norm.weight": (hidden,)}
