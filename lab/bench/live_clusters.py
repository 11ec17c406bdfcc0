"""The clusters of `polyphase bench live`, and the policies that are compared on them."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.launcher.model_source import PROJECT
from shared.policy import registry
from shared.policy.placement import Policies

MODEL = PROJECT / "models" / "demo"
_MIB = 1 << 20
_GIB = 1 << 30


def model_with_context(folder: Path, tokens: int) -> None:
    """The demo model in `folder`, whose configuration promises so much context: emulated engines never compute it."""
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": tokens}))


PLAIN = {"placement": "least_load", "split": "full", "dispatch": "power_of_two"}


@dataclass(frozen=True, slots=True)
class Variant:
    """Policies by kind and name."""

    label: str
    names: Mapping[str, str]

    def policies(self) -> Policies:
        """For the simulator: the functions that the live schedulers run."""
        names = self.names
        return Policies(
            registry.placement(names["placement"]), registry.split(names["split"]), registry.dispatch(names["dispatch"])
        )


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster, a workload of mean lengths, and variants, of which the others are compared with the first.

    share, cores_share: how busy the busiest role, and the cores that engines compute on, shall be about.
    drifts: whether the machine may change its speed, so that each replay stands between two calibrations.
    streaming: KV leaves chunk by chunk, as our connector does and emulated instances do not.
    """

    name: str
    title: str
    cluster: dict[str, Any]
    variants: tuple[Variant, ...]
    prompt_tokens: float
    output_tokens: float
    share: float
    requests: int
    streaming: bool
    drifts: bool = False
    rounds: int = 1
    cores_share: float = 0.3


SERVICES: dict[str, Any] = {
    "model": str(MODEL),
    "served_model_name": "demo",
    "max_model_len": 2048,
    "predictor": {"enabled": False},
    "planner": {"enabled": False},
    "dashboard": {"enabled": False},
}

# As clusters/demo.yaml, without predictor and dashboard: on two cores they would be part of what is measured.
REAL = Scenario(
    name="demo",
    title="demo cluster, vLLM on the CPU, 2 prefill + 2 decode",
    cluster={
        **SERVICES,
        "name": "bench live",
        "gateway": {"dtype": "float32"},
        "instance_defaults": {
            "engine": "vllm",
            "accelerator": "cpu",
            "dtype": "float32",
            "kv_cache_bytes": 192 * _MIB,
            "staging_bytes": 128 * _MIB,
            "inbox_bytes": 128 * _MIB,
            "threads": 1,
        },
        "instances": [
            {"id": "prefill-0", "role": "prefill", "block_size": 32},
            {"id": "prefill-1", "role": "prefill", "block_size": 128},
            {"id": "decode-0", "role": "decode", "block_size": 128},
            {"id": "decode-1", "role": "decode", "block_size": 32},
        ],
    },
    variants=(
        Variant("full", {**PLAIN, "split": "full"}),
        Variant("none", {**PLAIN, "split": "none"}),
        Variant("fraction", {**PLAIN, "split": "fraction"}),
    ),
    prompt_tokens=300.0,
    output_tokens=32.0,
    share=0.45,
    requests=100,
    streaming=True,
    drifts=True,
    rounds=3,  # real engines share their cores with whatever else runs: which policy wins is the medians' to say
)

EMULATED = Scenario(
    name="emulated",
    title="emulated accelerators of two kinds, Llama-3-8B, links of 10 Gb/s",
    cluster={
        **SERVICES,
        "name": "bench live (emulated)",
        "instance_defaults": {"engine": "emulated", "emulated_link_gbps": 10.0, "chunk_size": 512, "max_seqs": 64},
        "instances": [
            {"id": "prefill-a100", "role": "prefill", "accelerator": "A100-SXM-80", "kv_cache_bytes": 56 * _GIB},
            {"id": "prefill-a10", "role": "prefill", "accelerator": "A10", "kv_cache_bytes": 6 * _GIB},
            {"id": "decode-a100", "role": "decode", "accelerator": "A100-SXM-80", "kv_cache_bytes": 56 * _GIB},
            {"id": "decode-a10", "role": "decode", "accelerator": "A10", "kv_cache_bytes": 6 * _GIB},
        ],
    },
    variants=(
        Variant("least_load", {**PLAIN, "placement": "least_load"}),
        Variant("round_robin", {**PLAIN, "placement": "round_robin"}),
        Variant("none", {**PLAIN, "split": "none"}),
    ),
    prompt_tokens=700.0,
    output_tokens=40.0,
    share=1.0,
    requests=100,
    streaming=False,
)
