"""A plan: groups with their roles, routes between them, and policies; as the simulator's instances, and as a file.

The file is a cluster file, which `polyphase up --cluster` starts and `polyphase simulate` reads.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import yaml

from shared.cost.kinds import EngineKind
from shared.cost.network import Link, Network, entry_of
from shared.domain.instance import Role
from shared.domain.kv import SESSION_KEEP_S, SESSION_SHARE
from shared.domain.policies import KINDS
from shared.domain.rates import Rates
from shared.plan.estimate import Estimate
from shared.plan.group import Group
from shared.plan.problem import Problem
from shared.plan.routes import EngineCosts, Places, Route, place_name
from shared.policy.registry import from_words
from shared.sim.spec import EngineLimits, HostTier, InstanceSpec

ADAPTIVE = "adaptive"
LEAST_SHARE = 0.002  # of the requests; a route with less is rounding


@dataclass(frozen=True)
class Plan:
    """What each accelerator does. policies: as `polyphase simulate --policy` reads them."""

    groups: tuple[Group, ...]
    routes: tuple[Route, ...] = ()
    policies: str = ADAPTIVE

    @cached_property
    def roles(self) -> Counter[Role]:
        return Counter(group.role for group in self.groups)

    @cached_property
    def coupled(self) -> bool:
        return not self.roles[Role.PREFILL]

    def runs_as(self, other: "Plan") -> bool:
        """Whether both do the same: policies that decide request by request ignore the routes."""
        return self.groups == other.groups and self.policies == other.policies

    def names(self, problem: Problem) -> tuple[str, ...]:
        """Names of the groups as instances: their accelerators, and a number."""
        pools = problem.inventory.pools
        stems = [
            ".".join(
                dict.fromkeys(
                    pools[part.pool].accelerator.name.lower().removeprefix("rtx-").replace("-", "")
                    for part in group.parts
                )
            )
            for group in self.groups
        ]
        seen: Counter[str] = Counter()
        found = []
        for stem in stems:
            found.append(f"{stem}-{seen[stem]}")
            seen[stem] += 1
        return tuple(found)

    def routed(self, problem: Problem) -> str:
        """Policies that send requests along the routes only."""
        names = self.names(problem)
        rows = ",".join(
            f'["{"" if route.prefill is None else names[route.prefill]}","{names[route.decode]}",{route.share:.4g}]'
            for route in self.routes
        )
        return f"plan:routes=[{rows}]+split=full+power_of_two"


def routes_of(estimate: Estimate) -> tuple[Route, ...]:
    """The routes of an estimate's flows, the largest first, with shares that sum to 1."""
    flows, total = estimate.flows, estimate.flows.rate
    if total <= 0.0:
        return ()
    found = [
        Route(estimate.prefill[i], estimate.decode[j], float(flows.sent[i, j]) / total)
        for i in range(len(estimate.prefill))
        for j in range(len(estimate.decode))
    ]
    found += [Route(None, estimate.decode[j], float(flows.local[j]) / total) for j in range(len(estimate.decode))]
    kept = sorted((route for route in found if route.share >= LEAST_SHARE), key=lambda route: -route.share)
    whole = sum(route.share for route in kept)
    return tuple(replace(route, share=route.share / whole) for route in kept)


def canonical(groups: Sequence[Group], alike: Sequence[int]) -> tuple[object, ...]:
    """A key that is equal for deployments that differ only in the order of groups and in which of several alike pools
    each of them uses. alike: see `Inventory.alike`.
    """

    def shape(group: Group) -> tuple[object, ...]:
        parts = tuple((alike[p.pool], p.layers) for p in group.parts)
        return (group.role.value, group.tensor_parallel, group.precision, parts)

    by_pool: dict[int, list[tuple[object, ...]]] = {}
    joint: list[tuple[object, ...]] = []
    for group in groups:
        if len(group.uses) == 1:
            by_pool.setdefault(next(iter(group.uses)), []).append(shape(group))
        else:
            joint.append((shape(group), tuple(sorted(group.uses))))
            for pool in group.uses:
                by_pool.setdefault(pool, []).append(("joint", *shape(group)))
    pools = sorted(((alike[pool], tuple(sorted(shapes, key=repr))) for pool, shapes in by_pool.items()), key=repr)
    return (*pools, *sorted((shape for shape, _ in joint), key=repr))


def deployed(
    problem: Problem, plan: Plan, costs: EngineCosts, places: Places
) -> tuple[tuple[InstanceSpec, ...], Network]:
    """The plan's groups as instances of the simulator, and the network between their places."""
    models, inventory = problem.models, problem.inventory
    instances = []
    for name, group in zip(plan.names(problem), plan.groups, strict=True):
        kind = group.kind(inventory, problem.dtype)
        price = group.price_usd_hour(inventory)
        instances.append(
            InstanceSpec(
                instance_id=name,
                model=models.times(kind),
                role=group.role,
                kv_tokens=models.kv_tokens(kind),
                kv_bytes_per_token=costs.kv_bytes,
                limits=_limits(problem, group, kind),
                link=Link(1.0),  # not used: the paths of its place count
                node=place_name(group.place(inventory)),
                accelerator="+".join(dict.fromkeys(stage.accelerator for stage in kind.stages)),
                accelerators=group.accelerators,
                price_per_hour=price,
                lanes=kind.lanes,
                rates=Rates(models.step_rates(kind, problem.limits.batched_tokens), price_per_hour=price),
                precision=group.precision,
            )
        )
    return tuple(instances), places.network([group.place(inventory) for group in plan.groups])


def _limits(problem: Problem, group: Group, kind: EngineKind) -> EngineLimits:
    """The problem's limits for an engine, with what the workload's prefixes need. Pipelines have no prefix caches."""
    seats = max(1, problem.limits.sequences // kind.lanes)
    limits = replace(problem.limits, sequences=seats, max_model_len=problem.longest)
    if not problem.caches or kind.lanes > 1:
        return limits
    tokens = problem.host_tokens(kind, group.host_kv_bytes(problem.inventory))
    host = HostTier.of_kind(problem.models, kind, tokens) if tokens else None
    return replace(limits, prefix_cache=True, host=host, session_keep_s=SESSION_KEEP_S, session_share=SESSION_SHARE)


TOKENIZER = "models/demo"  # of emulated engines: a folder of the project
_HOSTS = """
Before it starts: give each of `hosts` its address, and the file the lines of `polyphase keys curve` and `polyphase keys
token`. Then, on each host: `polyphase up --cluster FILE --host-name NAME`."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class Target:
    """The engine and model of the file. model: what vLLM loads, or the tokenizer's folder of emulated engines.

    geometry: the name under which the cost model knows the model, or the path of its config.json. checkpoints: of the
    quantised weights, by precision; vLLM makes others while it loads the model.
    """

    name: str
    model: str
    geometry: str
    engine: Literal["emulated", "vllm"] = "emulated"
    checkpoints: Mapping[str, str] = field(default_factory=dict)


def plan_text(
    problem: Problem,
    plan: Plan,
    costs: EngineCosts,
    places: Places,
    target: Target,
    head: str = "",
    promise: Mapping[str, float] | None = None,
) -> str:
    """The text of the plan's cluster file. head: comment at its top. promise: what the planner service compares with.

    For `engine: vllm` the file names each instance's devices, by their number in the order of the inventory, and its
    host where there are several: by the node's name, because the inventory has no addresses.
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
        **({"mixed_precision": True} if len({group.precision for group in plan.groups}) > 1 else {}),
        "gateway": {"slo": {"default": problem.slo.targets}},
        "policies": policies_of(plan.policies),
        **({"hosts": {node: node for node in hosts}, "control": hosts[0]} if hosts else {}),
        "network": entry_of(places.network(spots)).model_dump(mode="json", exclude_defaults=True),
        "instance_defaults": {
            "engine": target.engine,
            "dtype": DTYPES.get(problem.dtype or problem.models.geometry.dtype, "bfloat16"),
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
    """Numbers of each group's devices, in the order of its stages; empty where devices cannot be chosen.

    The devices of a pool are numbered after those of the pools before it on its node.
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
    """Policies as the `policies` section of a file."""
    found: dict[str, Any] = {}
    for part in words.split("+"):
        for kind, spec in from_words(part).items():
            found[kind] = {"name": spec.name, **spec.parameters} if spec.parameters else spec.name
    return {kind: found[kind] for kind in KINDS if kind in found}


def _instance(problem: Problem, name: str, group: Group, costs: EngineCosts, target: Target) -> dict[str, Any]:
    inventory, models = problem.inventory, problem.models
    kind = group.kind(inventory, problem.dtype)
    geometry = models.geometry
    copies = float(group.tensor_parallel) if geometry.latent else max(1.0, group.tensor_parallel / geometry.kv_heads)
    kv_bytes = int(models.kv_tokens(kind) * costs.kv_bytes * copies)
    if target.engine == "vllm":  # of a rank: the stage with the most layers is full first
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
    engine_args: dict[str, Any] = {}
    if _limits(problem, group, kind).host is not None:
        ranks = 1 if target.engine == "vllm" else group.accelerators  # vLLM's size is of a rank, emulated ones' of all
        found["host_kv_bytes"] = ranks * group.host_kv_bytes(inventory)
    if group.precision and target.engine == "emulated":
        found["emulated_precision"] = group.precision
    elif checkpoint := target.checkpoints.get(group.precision, ""):
        found["weights"] = checkpoint
    elif group.precision:
        engine_args["quantization"] = group.precision
    if not problem.prefix_cache and target.engine == "emulated":
        found["emulated_prefix_cache"] = False
    elif not problem.prefix_cache:
        engine_args["enable_prefix_caching"] = False
    if engine_args:
        found["engine_args"] = engine_args
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
