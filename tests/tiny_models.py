"""Small random models of sizes that tests choose; `benchmarks.model_families` has one of each family."""

import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.model_families import VOCABULARY, save_random


def make_llama(path: Path, *, layers: int = 3, kv_heads: int = 2, head_dim: int = 32, seed: int = 0) -> Path:
    """A Llama with random weights, wide enough that greedy tokens depend on the whole context.

    It has no tokenizer: engines must be started with `skip_tokenizer_init`.
    """
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4 * head_dim,
        intermediate_size=8 * head_dim,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.15,
    )
    return save_random(config, path, seed)


def make_qwen3(path: Path, *, full: bool = False, seed: int = 0) -> Path:
    """A Qwen3 with random weights: of Qwen3-0.6B's shape (28 layers, 8 KV heads of 128; 1.5 GB), or a small one. Its
    embeddings are not tied, or the last token alone would choose the next.
    """
    from transformers import Qwen3Config

    shape: dict[str, Any] = {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 40_960,
    }
    if not full:
        small = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
        shape |= small | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    spread = 0.02 if full else 0.1  # many layers of large weights would make much of bfloat16's last bits
    config = Qwen3Config(**shape, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, initializer_range=spread)
    return save_random(config, path, seed)


def make_gpt_oss(path: Path, seed: int = 0) -> Path:
    """A small gpt-oss with random weights: attention sinks, layers with a window of 128 tokens beside full ones, and
    experts, with heads of 64 as the real ones have.
    """
    from transformers import GptOssConfig

    config = GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.1,
    )
    return save_random(config, path, seed)


def make_adapter(path: Path, model: Path, *, seed: int, rank: int = 8, strength: float = 0.2) -> Path:
    """A random LoRA adapter of a Llama, in the format of PEFT, for the projections of its attention and its MLP."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (heads, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in shapes.items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(rank, inputs, generator=random) / inputs**0.5
            weights[f"{at}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * strength
    path.mkdir(parents=True)
    save_file(weights, path / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [name.partition(".")[2] for name in shapes],
    }
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path


def make_eagle(path: Path, target: Path) -> Path:
    """An EAGLE head for a model of `make_llama`: a copy of its first layer behind a random projection, without norms of
    its own; embeddings and output are the target's.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1}
    weights = load_file(target / "model.safetensors")
    first, hidden = "model.layers.0.", config["hidden_size"]
    head = {name.removeprefix("model."): weight for name, weight in weights.items() if name.startswith(first)}
    head.pop("layers.0.input_layernorm.weight")
    projection = 0.1 * torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(1))
    path.mkdir(parents=True)
    save_file(head | {"fc.weight": projection}, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


def make_mtp(path: Path, seed: int = 0) -> Path:
    """A MiMo with random weights: a Qwen2 of 3 layers with a layer that predicts the token after the next."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen2Config

    hidden = 128
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.15,
        tie_word_embeddings=False,
    )
    save_random(config, path, seed)
    weights = load_file(path / "model.safetensors")
    first, last = "model.layers.0.", "model.mtp_layers.0."
    more = {last + name.removeprefix(first): each.clone() for name, each in weights.items() if name.startswith(first)}
    more |= {f"{last}{name}_layernorm.weight": torch.ones(hidden) for name in ("token", "hidden")}
    more[f"{last}final_layernorm.weight"] = torch.ones(hidden)
    more[f"{last}input_proj.weight"] = 0.1 * torch.randn(
        hidden, 2 * hidden, generator=torch.Generator().manual_seed(seed)
    )
    save_file(weights | more, path / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((path / "config.json").read_text())
    described |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(described))
    return path


def make_reasoning(path: Path, model: Path, *, habits: dict[str, str]) -> Path:
    """A copy of a model with tied embeddings that reasons and calls tools, with tokens for that and a chat template as
    Qwen3 has. habits: new tokens, each by the token in whose place the model mostly chooses it.
    """
    import torch
    from tokenizers import AddedToken, Tokenizer
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    path.mkdir(parents=True)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", *habits)])
    tokenizer.save(str(path / "tokenizer.json"))
    copied = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    copied.resize_token_embeddings(tokenizer.get_vocab_size(), mean_resizing=False)
    with torch.no_grad():
        rows = copied.get_input_embeddings().weight
        rows[tokenizer.token_to_id("<think>")] = 0.0
        for token, instead in habits.items():
            rows[tokenizer.token_to_id(token)] = 1.01 * rows[tokenizer.token_to_id(instead)]
    copied.save_pretrained(path)
    described = json.loads((model / "tokenizer_config.json").read_text())
    described["chat_template"] += (
        "{%- if add_generation_prompt -%}{{- '<think>' }}"
        "{%- if enable_thinking is defined and enable_thinking is false -%}{{- '</think>' -}}{%- endif -%}{%- endif -%}"
    )
    (path / "tokenizer_config.json").write_text(json.dumps(described))
    return path


def with_kv_scales(path: Path, model: Path, scales: list[tuple[float, float]], *, form: str = "llm-compressor") -> Path:
    """A copy of a model of `make_llama` whose checkpoint requests KV in fp8, with static scales of K and of V for each
    layer, as llm-compressor or ModelOpt write it. The weights are not quantised.
    """
    import torch
    from safetensors.torch import load_file, save_file

    linear = [f"{kind}_proj" for kind in ("q", "k", "v", "o", "gate", "up", "down")]
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    quantisation: dict[str, Any] = {
        "llm-compressor": {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "quantization_status": "frozen",
            "config_groups": {},
            "ignore": [],
            "kv_cache_scheme": scheme | {"observer": "minmax", "group_size": None},
        },
        "ModelOpt": {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
            "ignore": ["lm_head", *(f"*.{name}" for name in linear), "*.qkv_proj", "*.gate_up_proj"],
        },
    }[form]
    name = {"llm-compressor": "{0}_scale", "ModelOpt": "{0}_proj.{0}_scale"}[form]
    weights = load_file(model / "model.safetensors")
    for layer, (k, v) in enumerate(scales):
        for side, scale in (("k", k), ("v", v)):
            weights[f"model.layers.{layer}.self_attn.{name.format(side)}"] = torch.tensor([scale])
    shutil.copytree(model, path, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    return path
