"""Families of models as small random ones that benches and tests make for themselves: nothing is downloaded.

They have no tokenizer: engines must be started with `skip_tokenizer_init`.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.domain.instance import KvKind

VOCABULARY = 512
# Embeddings are not tied, or small, as far as vLLM allows: otherwise the last token alone would choose the next.
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
_HEADS: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 32}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_WINDOW: dict[str, Any] = {"sliding_window": 64, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
# The one size of a latent for which vLLM's CPU backend has kernels.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_ROUTED: dict[str, Any] = {**_LATENT, "topk_method": "noaux_tc"}
# The one size of a gated delta net's heads for which vLLM's CPU backend has kernels.
_DELTA: dict[str, Any] = {
    "hidden_size": 256,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
_MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1}
_HALF = "bfloat16"
# vLLM's CPU backend does not return the states within a prompt, which its prefix cache would keep (an IndexError).
_UNCACHED: dict[str, Any] = {"enable_prefix_caching": False}


@dataclass(frozen=True, slots=True)
class Family:
    """model_type: transformers' name. config: over the sizes that all have. kinds: of what layers keep for a request.

    dtype: of the engines; bfloat16 where vLLM's CPU kernels have no other. unlike_tp: whether KV goes to another degree
    of tensor parallelism; a state does so if it is known how it is divided. engine: more engine arguments.
    remark: about plain vLLM, for the table.
    """

    name: str
    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    kinds: tuple[KvKind, ...] = (KvKind.HEADS,)
    dtype: str = "float32"
    unlike_tp: bool = True
    engine: Mapping[str, Any] = field(default_factory=dict)
    remark: str = ""


_LATENTS, _STATES, _BOTH = (KvKind.LATENT,), (KvKind.STATE,), (KvKind.HEADS, KvKind.STATE)
_ALL = (
    Family("Llama", "llama", _GROUPED),
    Family("Gemma-3", "gemma3_text", {**_HEADS, **_WINDOW, "query_pre_attn_scalar": 32}),
    Family(
        "DeepSeek-V2", "deepseek_v2", {**_LATENT, "topk_method": "greedy", "first_k_dense_replace": 1}, _LATENTS, _HALF
    ),
    Family("Qwen3-Next", "qwen3_next", {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 64}, _BOTH, _HALF),
    Family("Qwen2", "qwen2", _GROUPED),
    Family("Qwen3", "qwen3", _HEADS),
    Family("Qwen3-MoE", "qwen3_moe", {**_HEADS, **_EXPERTS, "decoder_sparse_step": 1}),
    Family(
        "Gemma-2",
        "gemma2",
        {
            **_HEADS,
            "sliding_window": 64,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
        },
    ),
    Family(
        "gpt-oss",
        "gpt_oss",
        {
            **_HEADS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    Family("Mistral (window)", "mistral", {**_HEADS, "sliding_window": 64}),
    Family("Mixtral", "mixtral", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("Phi-3", "phi3", _GROUPED),
    Family("OLMo-2", "olmo2", _GROUPED),
    Family("GLM-4", "glm4", _HEADS),
    Family("GPT-2", "gpt2", {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 4096}),
    Family("OPT", "opt", {"ffn_dim": 256, "word_embed_proj_dim": 128}),
    Family("Falcon", "falcon", {"num_kv_heads": 2, "new_decoder_architecture": True, "multi_query": False}),
    Family("StarCoder2", "starcoder2", _GROUPED),
    Family("StableLM", "stablelm", _GROUPED),
    Family("Granite", "granite", _GROUPED),
    Family("Command-R", "cohere", {**_GROUPED, "logit_scale": 1.0, "tie_word_embeddings": True}),
    Family("Command-R7B", "cohere2", {**_GROUPED, **_WINDOW, "logit_scale": 1.0, "tie_word_embeddings": True}),
    Family("GPT-NeoX", "gpt_neox"),
    Family("Bloom", "bloom", {"n_layer": 4, "n_head": 4, "tie_word_embeddings": True}),
    Family("Nemotron", "nemotron", _HEADS),
    Family("SmolLM3", "smollm3", _GROUPED),
    Family("ERNIE-4.5", "ernie4_5", _HEADS),
    Family("Seed-OSS", "seed_oss", _HEADS),
    Family("DeepSeek-V3", "deepseek_v3", {**_ROUTED, "first_k_dense_replace": 1}, _LATENTS, _HALF),
    Family(
        "Mamba-2", "mamba2", {"num_heads": 4, "head_dim": 64, "state_size": 64, "n_groups": 1}, _STATES, unlike_tp=False
    ),
    Family(
        "Granite-4-H",
        "granitemoehybrid",
        {
            **_GROUPED,
            **_MAMBA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "layer_types": ["mamba", "attention"] * 2,
        },
        _BOTH,
        unlike_tp=False,
        engine=_UNCACHED,
    ),
    Family(
        "Falcon-H1", "falcon_h1", {**_GROUPED, **_MAMBA, "mamba_d_ssm": 256}, _BOTH, unlike_tp=False, engine=_UNCACHED
    ),
    Family(
        "LFM2",
        "lfm2",
        {**_GROUPED, "layer_types": ["conv"] * 3 + ["full_attention"], "conv_dim": 128, "block_dim": 128},
        _BOTH,
        unlike_tp=False,
        remark="answers of plain vLLM engines with blocks of 32 and of 64 tokens already differ from each other",
    ),
    Family("Gemma-4", "gemma4_text", {**_HEADS, **_WINDOW, "global_head_dim": 64, "hidden_size_per_layer_input": 0}),
    Family("Qwen3.5", "qwen3_5_text", _DELTA, _BOTH, _HALF),
    Family(
        "GLM-4.7-Flash",
        "glm4_moe_lite",
        {**_ROUTED, "first_k_dense_replace": 1, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
        _LATENTS,
        _HALF,
    ),
    Family(
        "Nemotron-H",
        "nemotron_h",
        {
            **_HEADS,
            "mamba_num_heads": 4,
            "mamba_head_dim": 64,
            "ssm_state_size": 64,
            "n_groups": 1,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        },
        _BOTH,
        unlike_tp=False,
        engine=_UNCACHED,
    ),
)
FAMILIES = {family.name: family for family in _ALL}


def make_model(family: Family, folder: Path, seed: int = 0) -> Path:
    """Write a model of that family with random weights into `folder`.

    4 layers and hidden sizes of 128 or 256, wide enough that greedy tokens depend on the whole context.
    """
    from transformers import AutoConfig

    return save_random(AutoConfig.for_model(family.model_type, **{**_SMALL, **family.config}), folder, seed)


def save_random(config: Any, folder: Path, seed: int = 0) -> Path:
    """Write a model of this configuration with random weights into `folder`."""
    from transformers import AutoModelForCausalLM, set_seed
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    set_seed(seed)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return folder


def int8_copy(model: Path, folder: Path) -> Path:
    """A copy of a model with the weights of its linear layers in int8, with a scale for each output channel, as vLLM
    reads them (compressed-tensors, W8A8: activations are quantised for each token). Returns the folder.
    """
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    for file in model.glob("*.json"):
        shutil.copy(file, folder)
    tensors = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            scale = tensor.float().abs().amax(1, keepdim=True) / 127.0
            tensors[name] = (tensor.float() / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    group = {"targets": ["Linear"], "weights": _scheme("channel"), "input_activations": _scheme("token", dynamic=True)}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _scheme(strategy: str, *, dynamic: bool = False) -> dict[str, Any]:
    return {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": dynamic}
