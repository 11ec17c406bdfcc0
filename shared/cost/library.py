"""The cost model by name: catalogue, bundled models and shipped efficiencies in one place.

A model's geometry is read from a Hugging Face `config.json`; a few well-known ones are in `models.yaml`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shared.cost.catalogue import Catalogue, loose_key
from shared.cost.efficiency import EfficiencyTable
from shared.cost.geometry import Experts, ExpertSplit, LatentAttention, ModelGeometry
from shared.cost.step import StepModel
from shared.errors import InvalidRequest, NotFound
from shared.files.text import read_json, shown
from shared.files.yaml_file import read_yaml
from shared.model.precision import QUANTISED, quantised_to

_MAX_LAYERS = 10_000
BUNDLED = Path(__file__).with_name("models.yaml")

Config = Mapping[str, Any]  # a foreign document: its values are what its author wrote


@dataclass(frozen=True, slots=True)
class Library:
    """What step models are made from. Instances of one kind should share one `StepModel`."""

    catalogue: Catalogue
    efficiencies: EfficiencyTable

    @classmethod
    def built_in(cls, accelerators: Path | None = None, efficiencies: Path | None = None) -> "Library":
        """What ships with the product, with a user's own files on top."""
        catalogue = Catalogue.built_in()
        table = EfficiencyTable.from_file(efficiencies) if efficiencies else EfficiencyTable.from_file()
        return cls(catalogue.with_file(accelerators) if accelerators else catalogue, table)

    def geometry(self, model: str) -> ModelGeometry:
        """A bundled model by name or hub id, or the path of a config.json (or of its folder)."""
        path = Path(model)
        return geometry_from_file(path) if path.exists() else bundled_geometry(model)

    def step_model(
        self,
        accelerator: str,
        model: str,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        dtype: str | None = None,
        experts: ExpertSplit = ExpertSplit(),
    ) -> StepModel:
        device = self.catalogue.get(accelerator)
        fitted = self.efficiencies.for_device(device.name)
        geometry = self.geometry(model)
        return StepModel(device, geometry, tensor_parallel, pipeline_parallel, dtype, fitted, experts=experts)


def geometry_from_config(config: Config, name: str = "model") -> ModelGeometry:
    """The geometry that a `config.json` describes. Raises InvalidRequest for an unknown architecture or a bad value."""
    if isinstance(config.get("text_config"), Mapping):
        outer, config = config, config["text_config"]
        config = {**config, "architectures": config.get("architectures") or outer.get("architectures")}
    architecture = _architecture(config, name)
    extra = _READERS[architecture](config)
    return ModelGeometry(**{**_common(config), "name": name, "architecture": architecture, **extra})


def geometry_from_file(path: Path) -> ModelGeometry:
    """The geometry of a `config.json`, or of a folder that holds one."""
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file)
    if not isinstance(config, dict):
        raise InvalidRequest(f"{file}: a model's config is a JSON object, not {shown(config)}")
    try:
        return geometry_from_config(config, name=path.name if path.is_dir() else path.parent.name)
    except InvalidRequest as error:
        raise InvalidRequest(f"{file}: {error.message}") from error


def bundled_geometry(name: str) -> ModelGeometry:
    """A well-known model by name or hub id (`Llama-3-8B`, `meta-llama/Meta-Llama-3-8B`)."""
    entries = _bundle()
    found = _index().get(loose_key(name)) or _index().get(loose_key(name.rpartition("/")[2]))
    if found is None:
        raise NotFound(
            f"no bundled geometry for the model {name!r}; bundled: {', '.join(entries)}. "
            "Give the path of its config.json instead."
        )
    return geometry_from_config(entries[found], found)


def bundled_names() -> tuple[str, ...]:
    return tuple(_bundle())


def _architecture(config: Config, name: str) -> str:
    listed = [str(architecture) for architecture in _list(config, "architectures")]
    by_type = loose_key(str(config.get("model_type", "")).removesuffix("_text") + "ForCausalLM")
    for architecture in listed or [known for known in _READERS if loose_key(known) == by_type]:
        if architecture in _READERS:
            return architecture
    stated = ", ".join(map(shown, listed)) or f"model_type {shown(config.get('model_type'))}"
    raise InvalidRequest(f"{name}: unknown architecture {stated}; known: {', '.join(_READERS)}")


def _need(config: Config, key: str, maximum: int = 10**12) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= maximum:
        raise InvalidRequest(f"model config: {key} must be a whole number from 1 to {maximum:,}, not {shown(value)}")
    return value


def _optional(config: Config, key: str, default: int = 0) -> int:
    """A number that may be missing, null or 0, which all mean the default."""
    return _need(config, key) if config.get(key) not in (None, 0) else default


def _layers(config: Config) -> int:
    return _need(config, "num_hidden_layers", _MAX_LAYERS)


def _list(config: Config, key: str) -> list[Any]:
    value = config.get(key) or []
    if not isinstance(value, list):
        raise InvalidRequest(f"model config: {key} must be a list, not {shown(value)}")
    return value


def _common(config: Config) -> dict[str, Any]:
    hidden = _need(config, "hidden_size")
    heads = _need(config, "num_attention_heads")
    return {
        "layers": _layers(config),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": _optional(config, "num_key_value_heads", heads),
        "head_dim": _optional(config, "head_dim", max(1, hidden // heads)),
        "intermediate": _optional(config, "intermediate_size") or _optional(config, "ffn_dim", 4 * hidden),
        "vocab": _need(config, "vocab_size"),
        "max_position": _optional(config, "max_position_embeddings", 2048),
        "dtype": _dtype(config),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def _dtype(config: Config) -> str:
    given = config.get("quantization_config") or {}
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"model config: quantization_config must be an object, not {shown(given)}")
    if (quantised := quantised_to(config)) in QUANTISED - {"fp4"}:  # mxfp4 is for experts alone
        return quantised
    stated = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    return {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}.get(str(stated), str(stated))


def _opt(config: Config) -> dict[str, Any]:
    positions = _optional(config, "max_position_embeddings", 2048)
    projected = _optional(config, "word_embed_proj_dim", _need(config, "hidden_size"))
    if projected != config["hidden_size"]:
        raise InvalidRequest("model config: OPT with word_embed_proj_dim != hidden_size is not supported")
    return {
        "intermediate": _need(config, "ffn_dim"),
        "gated_mlp": False,
        "all_bias": True,
        "learned_positions": positions + 2,
        **_tied(config),
    }


def _tied(config: Config) -> dict[str, Any]:
    """For architectures whose embeddings are tied unless the config says otherwise."""
    return {"tied_embeddings": bool(config.get("tie_word_embeddings", True))}


def _qwen(config: Config) -> dict[str, Any]:
    return _window(config) if config.get("use_sliding_window") else {}


def _gemma2(config: Config) -> dict[str, Any]:
    return {**_tied(config), "norms_per_layer": 4, **_window(config, every=2)}


def _gemma3(config: Config) -> dict[str, Any]:
    every = _optional(config, "sliding_window_pattern", 6)
    return {**_tied(config), "norms_per_layer": 4, "qk_norm": True, **_window(config, every=every)}


def _window(config: Config, every: int = 0) -> dict[str, Any]:
    """Sliding window; with `every`, one layer in that many attends to all positions instead."""
    window = _optional(config, "sliding_window")
    if not window:
        return {}
    layers = _layers(config)
    kinds = _list(config, "layer_types")
    if kinds:
        windowed = sum(kind == "sliding_attention" for kind in kinds)
    else:
        windowed = layers - (layers // every if every else 0)
    return {"window_tokens": window, "window_layers": windowed}


def _mixtral(config: Config) -> dict[str, Any]:
    experts = Experts(
        count=_need(config, "num_local_experts"),
        per_token=_need(config, "num_experts_per_tok"),
        intermediate=_need(config, "intermediate_size"),
        shared_intermediate=0,
        layers=_layers(config),
    )
    return {"experts": experts, **_window(config)}


def _qwen_moe(config: Config) -> dict[str, Any]:
    layers = _layers(config)
    dense = _list(config, "mlp_only_layers")
    step = _optional(config, "decoder_sparse_step", 1)
    sparse = sum(1 for i in range(layers) if i not in dense and (i + 1) % step == 0)
    shared = _optional(config, "shared_expert_intermediate_size")
    experts = Experts(
        count=_need(config, "num_experts"),
        per_token=_need(config, "num_experts_per_tok"),
        intermediate=_need(config, "moe_intermediate_size"),
        shared_intermediate=shared,
        layers=sparse,
        shared_gate=bool(shared),
    )
    return {"experts": experts}


def _deepseek(config: Config) -> dict[str, Any]:
    latent = LatentAttention(
        kv_rank=_need(config, "kv_lora_rank"),
        q_rank=_optional(config, "q_lora_rank"),
        nope_dim=_need(config, "qk_nope_head_dim"),
        rope_dim=_need(config, "qk_rope_head_dim"),
        v_dim=_need(config, "v_head_dim"),
    )
    if not config.get("n_routed_experts"):
        return {"latent": latent}
    width = _need(config, "moe_intermediate_size")
    layers = _layers(config) - _optional(config, "first_k_dense_replace")
    experts = Experts(
        count=_need(config, "n_routed_experts"),
        per_token=_need(config, "num_experts_per_tok"),
        intermediate=width,
        shared_intermediate=width * _optional(config, "n_shared_experts"),
        layers=layers,
        router_bias=config.get("topk_method") == "noaux_tc",
    )
    return {"latent": latent, "experts": experts}


_QKV_BIAS, _QK_NORM = {"qkv_bias": True}, {"qk_norm": True}
# What the config of an architecture says beyond `_common`.
_READERS: Mapping[str, Callable[[Config], dict[str, Any]]] = {
    "LlamaForCausalLM": _window,
    "MistralForCausalLM": _window,
    "Qwen2ForCausalLM": lambda config: _QKV_BIAS | _qwen(config),
    "Qwen3ForCausalLM": lambda config: _QK_NORM | _qwen(config),
    "OPTForCausalLM": _opt,
    "GemmaForCausalLM": _tied,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3,
    "MixtralForCausalLM": _mixtral,
    "Qwen2MoeForCausalLM": lambda config: _QKV_BIAS | _qwen_moe(config),
    "Qwen3MoeForCausalLM": lambda config: _QK_NORM | _qwen_moe(config),
    "DeepseekV2ForCausalLM": _deepseek,
    "DeepseekV3ForCausalLM": _deepseek,
}


@cache
def _bundle() -> dict[str, Config]:
    return read_yaml(BUNDLED)


@cache
def _index() -> dict[str, str]:
    index: dict[str, str] = {}
    for name, config in _bundle().items():
        for alias in (name, *config.get("aliases", ())):
            index[loose_key(alias)] = name
    return index
