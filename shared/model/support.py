"""The models that can be served, by their config.json, before weights are loaded.

What a layer keeps for a request is transferred as K and V of each head, as one latent for all heads, or as the state of
a recurrent layer (`services.worker.kv.vllm.layers`), in the model's own precision. `REFUSALS` lists the kinds of models
whose layers keep something else, with the keys of config.json that identify them.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import InvalidRequest
from shared.files.text import read_json

Config = Mapping[str, Any]
SUPPORTED = (
    "supported are decoders whose layers have attention (full, sliding or multi-head latent), a linear attention, a "
    "state space or a short convolution, dense or mixture of experts, such as Llama, Qwen3, Qwen3-Next, Gemma-3, "
    "gpt-oss, DeepSeek V3 and GLM-4"
)
_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")  # of models that also see or hear
_INDEXED_LAYERS = frozenset(
    {"compressed_sparse_attention", "deepseek_sparse_attention", "heavily_compressed_attention", "indexed_attention"}
    | {"minimax_m3_sparse", "qwen_sparse_attention"}
)
_MODELOPT = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}  # ModelOpt's names of KV precisions, and vLLM's


_KNOWN = Path(__file__).with_name("config_types.json")


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


def note_on_torchvision(config: Config) -> str:
    """What to know where vLLM cannot load its code for this model; empty where torchvision is not the cause."""
    if "vision_config" not in config or find_spec("torchvision") is not None:
        return ""
    return (
        "torchvision is not installed, and vLLM's code for many models with images needs it: install the build for "
        "this torch"
    )


def fault_of_remote_code(config: Config, trusted: bool) -> str:
    """Why a model that needs the Python code of its repository is refused; empty if that is trusted, or not needed.

    A model whose type transformers or vLLM know is loaded with their code, also if its config.json has `auto_map`.
    """
    if trusted or not config.get("auto_map"):
        return ""
    architectures = config.get("architectures")
    names = [config.get("model_type"), *(architectures if isinstance(architectures, list) else ())]
    if any(name in _known_types() for name in names if isinstance(name, str)):
        return ""
    return (
        f"the model needs Python code of its own repository (config.json: auto_map; model_type {names[0]!r}), which "
        "gateway, instances and predictor would run: read that code, and set `trust_remote_code: true` at the top of "
        "the cluster file"
    )


@functools.cache
def _known_types() -> frozenset[str]:
    """The `model_type`s, and architectures without one, whose configuration transformers or vLLM have code for."""
    return msgspec.json.decode(_KNOWN.read_bytes(), type=frozenset[str])


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
    """The fault of a checkpoint that requests KV in a form that cannot be transferred; empty without one."""
    stored = stored_kv(config)
    if not stored or kv_cache_dtype != "auto":
        return ""
    scheme = _kv_scheme(config)
    per_head = scheme.get("strategy") == "attn_head"
    if stored.startswith("fp8") and not scheme.get("dynamic") and not per_head:
        return ""
    kept = dtype if dtype == "float16" else "bfloat16"
    wider = "`dtype: bfloat16` and " if dtype == "float32" else ""
    how = " with a scale for each head" if per_head else " with dynamic scales" if scheme.get("dynamic") else ""
    return (
        f"the checkpoint has its KV stored in {stored}{how} (config.json: quantization_config), and KV in that form "
        f"cannot be transferred: set {wider}`engine_args: {{kv_cache_dtype: {kept}}}`, or serve a checkpoint without it"
    )


def _kv_scheme(config: Config) -> Config:
    """How KV is quantised. With `dynamic` scales, which are found while it is computed, they differ by instance."""
    given = config.get("quantization_config")
    given = given if isinstance(given, dict) else {}
    inner = given.get("quantization")
    scheme = (inner.get("kv_cache_scheme") if isinstance(inner, dict) else None) or given.get("kv_cache_scheme")
    return scheme if isinstance(scheme, dict) else {}


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


def _layer_kinds(text: Config) -> set[str]:
    kinds = text.get("layer_types")
    return {str(each) for each in kinds} if isinstance(kinds, list) else set()


def _indexed(_: Config, text: Config) -> str:
    keys = [key for key in ("index_topk", "sparse_attention_config", "compress_ratios") if text.get(key)]
    return ", ".join([*keys, *sorted(_layer_kinds(text) & _INDEXED_LAYERS)])


def _uneven(_: Config, text: Config) -> str:
    hidden, heads = _count(text, "hidden_size"), _count(text, "num_attention_heads")
    if text.get("head_dim") is not None or "qk_rope_head_dim" in text or not heads or not hidden % heads:
        return ""
    return _said(text, "hidden_size", "num_attention_heads")


def _two_parts(config: Config, text: Config) -> str:
    return "is_encoder_decoder" if config.get("is_encoder_decoder") or text.get("is_encoder_decoder") else ""


REFUSALS: tuple[Refusal, ...] = (
    Refusal("sparse attention with an index", "the index's cache beside KV is not transferred", _indexed),
    Refusal(
        "heads of unequal size", "hidden_size is no multiple of num_attention_heads, and head_dim is missing", _uneven
    ),
    Refusal("an encoder beside its decoder", "the encoder's KV is not transferred", _two_parts),
)
