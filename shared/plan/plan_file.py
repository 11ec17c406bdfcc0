"""A plan as a file: the cluster file that `polyphase up --cluster` starts and `polyphase simulate` reads."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from shared.cost.network_file import entry_of
from shared.domain.policies import KINDS
from shared.plan.costs import EngineCosts
from shared.plan.group import Group
from shared.plan.places import Places, place_name
from shared.plan.plan import Plan
from shared.plan.problem import Problem
from shared.policy.written import from_words

TOKENIZER = "models/demo"  # of emulated engines: a folder of the project
_HOSTS = """
Before it starts: give each of `hosts` its address, and the file the lines of `polyphase keys curve` and `polyphase keys
token`. Then, on each host: `polyphase up --cluster FILE --host-name NAME`."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class Target:
    """What the file is for. model: what `engine: vllm` loads; a tokenizer's folder for emulated engines.

    geometry: the name under which the cost model knows the model, or the path of its config.json.
    """

    name: str
    model: str
    geometry: str
    engine: Literal["emulated", "vllm"] = "emulated"


def plan_text(
    problem: Problem,
    plan: Plan,
    costs: EngineCosts,
    places: Places,
    target: Target,
    head: str = "",
    promise: Mapping[str, float] | None = None,
) -> str:
    """The text of the file. head: lines of comment before it. promise: what the planner service compares with.

    For `engine: vllm` it names each instance's devices, by their number in the order of the inventory, and its host,
    where there are several: by the node's name, in the place of the address that the inventory does not say.
    """
    inventory, limits = problem.inventory, problem.limits
    spots = [group.place(inventory) for group in plan.groups]
    devices = _devices(problem, plan.groups) if target.engine == "vllm" else [()] * len(plan.groups)
    nodes = {spot[0][0] for spot in spots}
    hosts = [node for node in inventory.nodes if node in nodes] if target.engine == "vllm" and len(nodes) > 1 else []
    content: dict[str, Any] = {
        "name": target.name,
        "model": target.model,
        "served_model_name": target.geometry.rsplit("/", 1)[-1],
        "max_model_len": problem.longest,
        "gateway": {"slo": {"default": problem.slo.targets}},
        "policies": policies_of(plan.policies),
        **({"hosts": {node: node for node in hosts}, "control": hosts[0]} if hosts else {}),
        "network": entry_of(places.network(spots)).model_dump(mode="json", exclude_defaults=True),
        "instance_defaults": {
            "engine": target.engine,
            "dtype": DTYPES.get(problem.dtype or problem.shop.geometry.dtype, "bfloat16"),
            "chunk_size": limits.batched_tokens,
            "max_seqs": limits.sequences,
            "block_size": limits.block_tokens,
            **({"emulated_model": target.geometry} if target.engine == "emulated" else {}),
        },
        "instances": [
            _instance(problem, name, group, costs, target)
            | ({"host": spot[0][0]} if hosts else {})
            | ({"devices": list(numbers)} if numbers else {})
            for name, group, spot, numbers in zip(plan.names(problem), plan.groups, spots, devices, strict=True)
        ],
    }
    planner = {**({"promise": dict(promise)} if promise else {}), "target": problem.target}
    content["planner"] = {**planner, "codec": problem.codec.value}
    if problem.codec.lossy:
        content["gateway"]["kv_codec"] = problem.codec.value
    body = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=118)
    head += _HOSTS if hosts else ""
    comment = "".join(f"# {line}\n" if line else "#\n" for line in head.splitlines())
    return comment + body


def _devices(problem: Problem, groups: Sequence[Group]) -> list[tuple[int, ...]]:
    """Of each group, in the order of its stages: the next of each pool, whose devices follow those of the pools before
    it on its node. None where devices have no numbers.
    """
    pools = problem.inventory.pools
    before = [sum(other.count for other in pools[:at] if other.node == pool.node) for at, pool in enumerate(pools)]
    used: Counter[int] = Counter()
    found = []
    for group in groups:
        numbers: list[int] = []
        for part in group.parts:
            first = before[part.pool] + used[part.pool]
            numbers += range(first, first + group.tensor_parallel)
            used[part.pool] += group.tensor_parallel
        chosen = all(pools[part.pool].accelerator.visible_by for part in group.parts)
        found.append(tuple(numbers) if chosen else ())
    return found


def policies_of(words: str) -> dict[str, Any]:
    """Policies in words as the `policies` of a file."""
    found: dict[str, Any] = {}
    for part in words.split("+"):
        for kind, spec in from_words(part).items():
            found[kind] = {"name": spec.name, **spec.parameters} if spec.parameters else spec.name
    return {kind: found[kind] for kind in KINDS if kind in found}


def _instance(problem: Problem, name: str, group: Group, costs: EngineCosts, target: Target) -> dict[str, Any]:
    inventory, shop = problem.inventory, problem.shop
    kind = group.kind(inventory, problem.dtype)
    geometry = shop.geometry
    copies = float(group.tensor_parallel) if geometry.latent else max(1.0, group.tensor_parallel / geometry.kv_heads)
    kv_bytes = int(shop.kv_tokens(kind) * costs.kv_bytes * copies)
    if target.engine == "vllm":  # of a rank: the stage with the most layers is the first that is full
        most = max(part.layers for part in group.parts) / geometry.layers
        kv_bytes = int(kv_bytes * most / group.tensor_parallel)
    found: dict[str, Any] = {
        "id": name,
        "role": group.role.value,
        "node": place_name(group.place(inventory)),
        "accelerator": kind.stages[0].accelerator,
        "tensor_parallel": group.tensor_parallel,
        "kv_cache_bytes": kv_bytes,
    }
    if len(group.parts) > 1:
        found["pipeline_parallel"] = len(group.parts)
        found["pipeline_layers"] = [part.layers for part in group.parts]
        names = [stage.accelerator for stage in kind.stages]
        if len(set(names)) > 1:
            found["stage_accelerators"] = names
        if kind.hop is not None and target.engine == "emulated":
            found["emulated_hop"] = {
                "gbps": kind.hop.bandwidth_bytes_s * 8.0 / 1e9,
                "latency_s": kind.hop.latency_s,
                "efficiency": kind.hop.efficiency,
            }
    return found
