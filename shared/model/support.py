"""The models that can be served, by their config.json, before weights are loaded.

KV is transferred layer by layer, so all layers must have KV of one shape: K and V of each head with the same number of
channels, in the model's own precision. `REFUSALS` lists the kinds of models that differ, with the keys of config.json
that identify them; the architectures are those of vLLM 0.32, and `tests/shared/model/test_support.py`
compares them with the vLLM that is installed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import InvalidRequest
from shared.files.text import read_json

Config = Mapping[str, Any]
SUPPORTED = (
    "supported are decoders in which every layer has attention with K and V of one shape (full, sliding or chunked; "
    "dense or mixture of experts), such as Llama, Qwen3, Gemma-3, gpt-oss, Mistral, Mixtral, GLM-4 and Phi"
)
_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")  # of models that also see or hear
# Of `layer_types`, by the names that transformers has had for them.
_STATE_LAYERS = frozenset({"conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba", "mamba2", "recurrent"})
_INDEXED_LAYERS = frozenset(
    {"compressed_sparse_attention", "deepseek_sparse_attention", "heavily_compressed_attention", "indexed_attention"}
    | {"minimax_m3_sparse", "qwen_sparse_attention"}
)
# Model types whose classes in vLLM have multi-head latent attention when their configuration has a rank for it.
LATENT_TYPES = frozenset(
    {"axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_v41"}
    | {"dots3_note", "glm4_moe_lite", "glm5_next", "glm5_next_text", "glm_moe_dsa", "hy_v4", "kimi_k2", "kimi_linear"}
    | {"longcat_flash", "pangu_ultra_moe"}
)
# Architectures whose classes in vLLM keep a state beside KV, or in its place: hybrid and attention-free models.
STATEFUL = frozenset(
    {"BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration"}
    | {"ColBERTLfm2Model", "ColQwen3_5", "FalconH1ForCausalLM", "FalconMambaForCausalLM", "Glm5NextForCausalLM"}
    | {"Glm5NextForConditionalGeneration", "GraniteMoeHybridForCausalLM", "InternS2MobiusForConditionalGeneration"}
    | {"InternS2PreviewForConditionalGeneration", "JambaForCausalLM", "JambaForSequenceClassification"}
    | {"KimiK3ForConditionalGeneration", "KimiLinearForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM"}
    | {"Lfm2VlForConditionalGeneration", "Mamba2ForCausalLM", "MambaForCausalLM"}
    | {"MiniCPMV4_6ForConditionalGeneration", "MiniCPMV4_7ForConditionalGeneration", "NemotronHForCausalLM"}
    | {"NemotronHPuzzleForCausalLM", "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2"}
    | {"NemotronH_Omni_Reasoning_V3", "NemotronH_Super_Omni_Reasoning_V3", "OlmoHybridForCausalLM"}
    | {"Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM"}
    | {"Qwen3_5MoeForConditionalGeneration", "Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration", "Terratorch"}
    | {"Zamba2ForCausalLM"}
)
_CONVOLUTIONS = frozenset({"InklingForCausalLM", "InklingForConditionalGeneration"})  # a state beside KV, too
_MODELOPT = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}  # ModelOpt's names of KV precisions, and vLLM's


@dataclass(frozen=True, slots=True)
class Refusal:
    """A kind of model that cannot be served.

    found: the keys of config.json that identify a model of this kind, as text; empty for other models.
    """

    kind: str
    reason: str
    found: Callable[[Config, Config], str]  # of the whole configuration and its text model's


def faults_of_model(config: Config) -> list[str]:
    """The reasons for which the model of this config.json cannot be served; empty if it can."""
    text = text_config(config)
    found = ((refusal, refusal.found(config, text)) for refusal in REFUSALS)
    return [f"{words(refusal)} (config.json: {keys}); {SUPPORTED}" for refusal, keys in found if keys]


def words(refusal: Refusal) -> str:
    """The kind of the model, and why it cannot be served."""
    return f"the model has {refusal.kind}, which cannot be served: {refusal.reason}"


def stored_kv(config: Config) -> str:
    """vLLM's name of the KV precision that a checkpoint requests when `kv_cache_dtype` is auto; empty: none."""
    given = config.get("quantization_config")
    if not isinstance(given, dict):
        return ""
    inner = given.get("quantization")
    inner = inner if isinstance(inner, dict) else given
    if str(given.get("quant_method", "")).startswith("modelopt"):
        scheme = inner.get("kv_cache_scheme") or given.get("kv_cache_scheme")
        asked = scheme or inner.get("kv_cache_quant_algo") or given.get("kv_cache_quant_algo")
        if isinstance(asked, dict):
            asked = {8: "fp8", 4: "nvfp4"}.get(asked.get("num_bits", 0)) if asked.get("type") == "float" else ""
        return _MODELOPT.get(str(asked or "").lower(), "")
    return "fp8" if given.get("kv_cache_scheme") else ""


def fault_of_stored_kv(config: Config, kv_cache_dtype: str, dtype: str) -> str:
    """The fault of a checkpoint that requests quantised KV; empty without one."""
    stored = stored_kv(config)
    if not stored or kv_cache_dtype != "auto":
        return ""
    kept = dtype if dtype == "float16" else "bfloat16"
    return (
        f"the checkpoint has its KV stored in {stored} (config.json: quantization_config), and KV in a quantised form "
        f"cannot be transferred: set `engine_args: {{kv_cache_dtype: {kept}}}`, or serve a checkpoint without it"
    )


def fault_of_division(config: Config, tensor_parallel: int) -> str:
    """Why the heads cannot be divided among so many ranks; empty if they can."""
    text = text_config(config)
    heads, kv_heads = _count(text, "num_attention_heads"), _count(text, "num_key_value_heads")
    if heads % tensor_parallel:
        return f"the model's {heads} attention heads cannot be shared by {tensor_parallel}"
    if kv_heads and kv_heads % tensor_parallel and tensor_parallel % kv_heads:
        return f"the model's {kv_heads} KV heads cannot be shared by {tensor_parallel}, nor each held by several"
    return ""


def config_of(folder: str | Path) -> dict[str, Any]:
    """A folder's config.json, with the quantisation of `hf_quant_config.json`; empty if it cannot be read."""
    found = _object(Path(folder) / "config.json")
    if found and "quantization_config" not in found and (apart := _object(Path(folder) / "hf_quant_config.json")):
        producer = apart.get("producer")
        method = producer.get("name", "") if isinstance(producer, dict) else ""
        found = {**found, "quantization_config": {"quant_method": method or "modelopt", **apart}}
    return found


def text_config(config: Config) -> Config:
    """The configuration of a multimodal model's text model, over that of the whole model."""
    for key in _TEXT:
        if isinstance(part := config.get(key), dict):
            inner = part.get("text_config")
            return {**config, **(inner if isinstance(inner, dict) else part)}
    return config


def _object(file: Path) -> dict[str, Any]:
    try:
        found = read_json(file)
    except InvalidRequest:
        return {}
    return found if isinstance(found, dict) else {}


def _count(config: Config, key: str) -> int:
    """A positive whole number; 0 where it is missing or has another type."""
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _said(config: Config, *keys: str) -> str:
    """`key value, key value` of the keys that exist."""
    return ", ".join(f"{key} {config[key]!r}" for key in keys if config.get(key) is not None)


def _latent(_: Config, text: Config) -> str:
    has_rank = text.get("kv_lora_rank") is not None or text.get("compress_ratios") is not None
    latent = has_rank and text.get("model_type") in LATENT_TYPES
    return _said(text, "model_type", "kv_lora_rank") if latent else ""


def _stateful(config: Config, text: Config) -> str:
    kinds = _layer_kinds(text)
    if states := sorted(kinds & _STATE_LAYERS):
        return f"layer_types {', '.join(states)}"
    if kinds and kinds <= {"attention", "full_attention"}:
        return ""  # vLLM also serves models without hybrid layers by the class of a hybrid model
    named = config.get("architectures")
    architectures = {str(each) for each in named} if isinstance(named, list) else set()
    found = sorted(architectures & (STATEFUL | _CONVOLUTIONS))
    return f"architectures {', '.join(found)}" if found else ""


def _layer_kinds(text: Config) -> set[str]:
    kinds = text.get("layer_types")
    return {str(each) for each in kinds} if isinstance(kinds, list) else set()


def _indexed(_: Config, text: Config) -> str:
    keys = [key for key in ("index_topk", "sparse_attention_config", "compress_ratios") if text.get(key)]
    return ", ".join([*keys, *sorted(_layer_kinds(text) & _INDEXED_LAYERS)])


def _unlike(_: Config, text: Config) -> str:
    """Layers with different numbers of KV heads or channels, or different channels of V and K."""
    differs = [
        f"{key} {text[key]} beside {usual} {text.get(usual)}"
        for usual, *others in _LAYER_KEYS
        for key in others
        if text.get(key) is not None and text.get(usual) is not None and text[key] != text[usual]
    ]
    lists = [
        key
        for key in ("num_key_value_heads", "num_key_value_heads_per_layer", "head_dim", "num_attention_groups")
        if isinstance(text.get(key), list) and len({str(each) for each in text[key]}) > 1
    ]
    differs += [f"{key} {sorted(set(map(str, text[key])))}" for key in lists]
    if "qk_rope_head_dim" not in text and isinstance(v := text.get("v_head_dim"), int):
        k = text.get("head_dim")
        differs += [f"v_head_dim {v} beside head_dim {k}"] if isinstance(k, int) and k != v else []
    differs += _of_blocks(text.get("block_configs"))
    other = text.get("attention_other_setting")
    if isinstance(other, dict):
        differs += [
            f"attention_other_setting.{key} {other[key]} beside {text[key]}"
            for key in ("num_attention_groups", "head_dim")
            if other.get(key) is not None and text.get(key) is not None and other[key] != text[key]
        ]
    return ", ".join(differs)


_LAYER_KEYS = (
    ("head_dim", "global_head_dim", "swa_head_dim"),
    ("num_key_value_heads", "num_global_key_value_heads", "swa_num_key_value_heads"),
)


def _of_blocks(blocks: object) -> list[str]:
    """The kinds of attention in the blocks of Nemotron's searched architectures, if there are several."""
    if not isinstance(blocks, Sequence) or isinstance(blocks, str):
        return []
    kinds = set()
    for block in blocks:
        attention = block.get("attention") if isinstance(block, dict) else None
        if isinstance(attention, dict):
            left_out = attention.get("no_op") or attention.get("replace_with_linear")
            kinds.add("none" if left_out else str(attention.get("n_heads_in_group")))
    return [f"block_configs with n_heads_in_group {', '.join(sorted(kinds))}"] if len(kinds) > 1 else []


def _uneven(_: Config, text: Config) -> str:
    hidden, heads = _count(text, "hidden_size"), _count(text, "num_attention_heads")
    if text.get("head_dim") is not None or "qk_rope_head_dim" in text or not heads or not hidden % heads:
        return ""
    return _said(text, "hidden_size", "num_attention_heads")


def _two_parts(config: Config, text: Config) -> str:
    return "is_encoder_decoder" if config.get("is_encoder_decoder") or text.get("is_encoder_decoder") else ""


LATENT = Refusal(
    "multi-head latent attention (MLA)", "its KV is one latent for all heads, not K and V of each", _latent
)
STATES = Refusal(
    "state-space, linear-attention or convolution layers",
    "their state is not KV of tokens, and is not transferred",
    _stateful,
)
REFUSALS: tuple[Refusal, ...] = (
    LATENT,
    STATES,
    Refusal("sparse attention with an index", "the index's cache beside KV is not transferred", _indexed),
    Refusal("unlike heads", "K and V have to be of one shape in all layers", _unlike),
    Refusal(
        "heads of unequal size", "hidden_size is no multiple of num_attention_heads, and head_dim is missing", _uneven
    ),
    Refusal("an encoder beside its decoder", "the encoder's KV is not transferred", _two_parts),
)
