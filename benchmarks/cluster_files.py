"""Clusters that benches start on this machine: emulated instances, and vLLM engines of small random models."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.suite import BARE, DEMO_MODEL

ClusterDict = dict[str, Any]  # the content of a cluster file


def emulated(
    name: str, instances: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any] | None = None, **sections: Any
) -> ClusterDict:
    """Emulated Llama-3-8B instances, without the services that would take cores from those that are measured.

    defaults: of the instances. sections: replace those that each bench here has.
    """
    return {
        **BARE,
        "name": f"bench {name}",
        **sections,
        "instance_defaults": {"engine": "emulated", "accelerator": "A100-SXM-80", **(defaults or {})},
        "instances": list(instances),
    }


def write_cluster(folder: Path, cluster: Mapping[str, Any]) -> Path:
    """Write the cluster file, named after the cluster, into `folder`."""
    file = folder / f"{cluster['name']}.yaml"
    file.write_text(yaml.safe_dump(dict(cluster), sort_keys=False))
    return file


def model_with_context(folder: Path, tokens: int) -> Path:
    """The demo model in `folder` with a configuration of so much context, which emulated engines never compute."""
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": tokens}))
    return folder


def engines_on_cpu(
    name: str, model: Path, instances: Sequence[Mapping[str, str]], max_model_len: int, **defaults: int
) -> ClusterDict:
    """vLLM instances on one thread each. defaults: more of `instance_defaults`."""
    return {
        **BARE,
        "name": f"bench {name}",
        "model": str(model),
        "served_model_name": name,
        "max_model_len": max_model_len,
        "gateway": {"dtype": "float32", "max_queued_jobs": 4096, "job_timeout_s": 900.0},
        "instance_defaults": {"engine": "vllm", "accelerator": "cpu", "dtype": "float32", "threads": 1, **defaults},
        "instances": list(instances),
    }


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
    def kv_bytes_per_token(self) -> int:
        """Of float32."""
        return self.num_hidden_layers * 2 * self.num_key_value_heads * self.hidden_size // self.num_attention_heads * 4


def make_llama(folder: Path, shape: LlamaShape) -> Path:
    """Write a model with random float16 weights and the demo model's tokenizer into `folder`."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    set_seed(0)
    config = LlamaConfig(**asdict(shape), tie_word_embeddings=True, bos_token_id=0, eos_token_id=1)
    LlamaForCausalLM(config).half().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder / name)
    return folder
