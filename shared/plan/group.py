"""A group: accelerators that together serve one copy of the model, and their role."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from shared.cost.kinds import EngineKind, Stage
from shared.domain.instance import Role
from shared.plan.inventory import Inventory


@dataclass(frozen=True, order=True)
class Part:
    """A pipeline stage: `layers` layers on accelerators of one pool, by its position in the inventory."""

    pool: int
    layers: int


@dataclass(frozen=True)
class Group:
    """Pipeline stages in order, of `tensor_parallel` accelerators each.

    A group that decodes may compute prompts, too: routes and policies decide whether it does. precision: of its
    weights; empty: the problem's.
    """

    role: Role
    tensor_parallel: int
    parts: tuple[Part, ...]
    precision: str = ""

    @cached_property
    def uses(self) -> Counter[int]:
        found: Counter[int] = Counter()
        for part in self.parts:
            found[part.pool] += self.tensor_parallel
        return found

    @property
    def accelerators(self) -> int:
        return self.tensor_parallel * len(self.parts)

    def flipped(self) -> "Group":
        return replace(self, role=self.role.other)

    def moved(self, pools: Mapping[int, int]) -> "Group":
        """The same group on other pools, by the present ones."""
        return replace(self, parts=tuple(Part(pools[part.pool], part.layers) for part in self.parts))

    def kind(self, inventory: Inventory, dtype: str | None = None) -> EngineKind:
        """The group as an engine. Between nodes activations take the path between them; the slowest hop counts."""
        pools = [inventory.pools[part.pool] for part in self.parts]
        stages = tuple(Stage(pool.accelerator.name, part.layers) for pool, part in zip(pools, self.parts, strict=True))
        hops = [inventory.network.path(one.node, other.node) for one, other in pairwise(pools)]
        hop = min(hops, key=lambda link: link.bandwidth_bytes_s * link.efficiency) if hops else None
        if self.precision:
            return EngineKind(stages, self.tensor_parallel, self.precision, kv_dtype=dtype, hop=hop)
        return EngineKind(stages, self.tensor_parallel, dtype, hop=hop)

    def place(self, inventory: Inventory) -> tuple[tuple[str, int], ...]:
        """Where the KV of its layers is: (node, layers) in the order of the stages, neighbours on one node joined."""
        found: list[tuple[str, int]] = []
        for part in self.parts:
            node = inventory.pools[part.pool].node
            if found and found[-1][0] == node:
                found[-1] = (node, found[-1][1] + part.layers)
            else:
                found.append((node, part.layers))
        return tuple(found)

    def host_kv_bytes(self, inventory: Inventory) -> int:
        """Host memory for KV of each of its accelerators: one size for all of them, so the least of their pools."""
        return min(inventory.pools[part.pool].host_kv_bytes for part in self.parts)

    def price_usd_hour(self, inventory: Inventory) -> float:
        return sum(count * inventory.pools[pool].price_usd_hour for pool, count in self.uses.items())

    def words(self, inventory: Inventory) -> str:
        """A description, such as `2 x A40 on a40`."""
        return " + ".join(
            f"{count} x {inventory.pools[pool].accelerator.name} on {inventory.pools[pool].node}"
            for pool, count in self.uses.items()
        )

    @property
    def layout(self) -> str:
        """A description, such as `TP 2, PP 2 (26+34), fp8 weights`."""
        layers = "+".join(str(part.layers) for part in self.parts)
        stages = f", PP {len(self.parts)} ({layers})" if len(self.parts) > 1 else ""
        return f"TP {self.tensor_parallel}{stages}" + (f", {self.precision} weights" if self.precision else "")
