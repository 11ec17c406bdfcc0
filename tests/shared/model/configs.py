"""config.json of models as their makers publish them, shortened to the keys that decide how KV is kept."""

from typing import Any

PLAIN = {"num_hidden_layers": 4, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **PLAIN}

SERVED: dict[str, dict[str, Any]] = {
    "Llama-3.1": LLAMA,
    "Qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **PLAIN, "head_dim": 128},
    "Qwen3-MoE": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **PLAIN, "num_experts": 128},
    "gpt-oss": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        **PLAIN,
        "head_dim": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "Gemma-3": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {"model_type": "gemma3_text", **PLAIN, "head_dim": 256, "sliding_window": 1024},
    },
    "Gemma-3n": {
        "model_type": "gemma3n",
        "architectures": ["Gemma3nForConditionalGeneration"],
        "text_config": {
            "model_type": "gemma3n_text",
            **PLAIN,
            "head_dim": 256,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
    },
    "Llama-4": {
        "model_type": "llama4",
        "architectures": ["Llama4ForConditionalGeneration"],
        "text_config": {
            "model_type": "llama4_text",
            **PLAIN,
            "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        },
    },
    "Granite-4-micro": {  # the hybrid's class, all layers with attention
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        **PLAIN,
        "layer_types": ["attention"] * 4,
    },
    "MiniCPM3": {  # a rank for KV, and yet ordinary heads in vLLM
        "model_type": "minicpm3",
        "architectures": ["MiniCPM3ForCausalLM"],
        **PLAIN,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
    "OPT": {"model_type": "opt", "architectures": ["OPTForCausalLM"], "hidden_size": 768, "num_attention_heads": 12},
    "DeepSeek-V2": {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        **PLAIN,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        **PLAIN,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "quantization_config": {"quant_method": "fp8"},
    },
    "Kimi-K2.5": {
        "model_type": "kimi_k25",
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": {"model_type": "kimi_k2", **PLAIN, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    },
    "Mamba-2": {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "hidden_size": 4096, "state_size": 128},
    "Jamba": {"model_type": "jamba", "architectures": ["JambaForCausalLM"], **PLAIN, "attn_layer_period": 8},
    "Qwen3-Next": {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        **PLAIN,
        "head_dim": 256,
        "full_attention_interval": 4,
    },
    "Qwen3.5": {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {
            "model_type": "qwen3_5_text",
            **PLAIN,
            "head_dim": 256,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
    },
    "Nemotron-H": {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        **PLAIN,
        "head_dim": 128,
        "hybrid_override_pattern": "M-M*",
    },
    "Granite-4-H": {
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        **PLAIN,
        "layer_types": ["mamba"] * 3 + ["attention"],
    },
    "LFM2": {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        **PLAIN,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
    "Kimi-Linear": {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        **PLAIN,
        "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4]},
    },
    "Gemma-4": {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": {
            "model_type": "gemma4_text",
            **PLAIN,
            "head_dim": 256,
            "global_head_dim": 512,
            "num_global_key_value_heads": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
    },
    "MiMo-V2": {
        "model_type": "mimo_v2_flash",
        "architectures": ["MiMoV2FlashForCausalLM"],
        **PLAIN,
        "head_dim": 192,
        "v_head_dim": 128,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 192,
    },
    "Step-3.5": {
        "model_type": "step3p5",
        "architectures": ["Step3p5ForCausalLM"],
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "num_attention_groups": 8,
        "head_dim": 128,
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 96,
            "num_attention_groups": 4,
            "head_dim": 128,
        },
    },
    "Nemotron-NAS": {
        "model_type": "nemotron-nas",
        "architectures": ["DeciLMForCausalLM"],
        **PLAIN,
        "block_configs": [
            {"attention": {"n_heads_in_group": 8}},
            {"attention": {"no_op": True, "n_heads_in_group": None}},
        ],
    },
    "KV heads by layer": {**LLAMA, "num_key_value_heads_per_layer": [4, 4, 2, 1]},
}

# Model → its config.json, the kind of `REFUSALS` that refuses it, and the keys that the message names.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "MiniMax-M3": (
        {
            "model_type": "minimax_m3",
            "architectures": ["MiniMaxM3SparseForCausalLM"],
            **PLAIN,
            "sparse_attention_config": {"sparse_attention_freq": [1, 1, 0, 0]},
        },
        "sparse attention with an index",
        "sparse_attention_config",
    ),
    "DeepSeek-V3.2": (
        {
            "model_type": "deepseek_v32",
            "architectures": ["DeepseekV32ForCausalLM"],
            **PLAIN,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "index_topk": 2048,
        },
        "sparse attention with an index",
        "index_topk",
    ),
    "heads that do not divide": (
        {**LLAMA, "hidden_size": 4100},
        "heads of unequal size",
        "hidden_size 4100, num_attention_heads 32",
    ),
    "Whisper": (
        {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True},
        "an encoder beside its decoder",
        "is_encoder_decoder",
    ),
}

# Who quantised the KV → `quantization_config`, and what vLLM stores KV in.
STORED: dict[str, tuple[dict[str, Any], str]] = {
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
    "modelopt, nested": (
        {"quant_method": "modelopt_fp4", "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}},
        "nvfp4",
    ),
    "modelopt, a scheme": (
        {"quant_method": "modelopt", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
        "fp8_e4m3",
    ),
    "llm-compressor": (
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        "fp8",
    ),
    "scales of each instance": (
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": True}},
        "fp8",
    ),
    "scales of each head": (
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "strategy": "attn_head"}},
        "fp8",
    ),
    "weights alone": ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, ""),
    "fp8 weights": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ""),
    "modelopt, weights alone": ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None}, ""),
}
