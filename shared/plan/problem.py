"""The planner's question: an inventory, a model, a workload and an SLO."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

import numpy as np

from shared.cost.kinds import EngineModels
from shared.domain.job import Slo
from shared.domain.kv import Codec
from shared.errors import InvalidRequest
from shared.plan.group import Group
from shared.plan.inventory import Inventory
from shared.sim.spec import EngineLimits
from shared.sim.workload import Lengths, Workload

SAMPLE = 48  # requests that represent a workload in estimates

Clock = Callable[[], float]


@dataclass(frozen=True)
class Problem:
    """An inventory, a model (the workshop's), the requests of clients, and the SLO that they should get.

    workload: its lengths and the pattern of its arrivals. rate: requests a second that the plan must serve; 0: as many
    as possible. target: SLO attainment at which a rate counts as served. limits: of each engine. one_node: no group
    spans nodes, which vLLM engines require. codec: of KV transfers. longest_tokens: of a request, prompt and answer.
    budget_usd_hour: what the accelerators used may cost. quantised: precisions of weights, besides the model's,
    that groups with the prefill role may have (mixed precision).
    """

    inventory: Inventory
    models: EngineModels
    workload: Workload
    slo: Slo = field(default_factory=Slo)
    rate: float = 0.0
    target: float = 0.9
    limits: EngineLimits = field(default_factory=EngineLimits)
    one_node: bool = False
    codec: Codec = Codec.RAW
    longest_tokens: int = 0
    budget_usd_hour: float = inf
    dtype: str | None = None
    quantised: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 < self.target < 1.0:
            raise InvalidRequest(f"target must be between 0 and 1, not {self.target}")
        if self.rate < 0:
            raise InvalidRequest(f"rate must not be negative, not {self.rate}")
        if not self.budget_usd_hour > 0:
            raise InvalidRequest(f"budget must be positive, not {self.budget_usd_hour} USD an hour")

    @cached_property
    def sample(self) -> "Sample":
        return Sample.from_workload(self.workload)

    @cached_property
    def longest(self) -> int:
        """Tokens of context that each group must hold: `longest_tokens`, else the workload's longest request."""
        return self.longest_tokens or int((self.workload.prompt_tokens + self.workload.output_tokens).max())

    def price_usd_hour(self, groups: Iterable[Group]) -> float:
        return sum(group.price_usd_hour(self.inventory) for group in groups)

    def affords(self, groups: Iterable[Group]) -> bool:
        """Whether the groups are within the budget."""
        return self.price_usd_hour(groups) <= self.budget_usd_hour * (1.0 + 1e-9)

    def on(self, inventory: Inventory) -> "Problem":
        return replace(self, inventory=inventory)


@dataclass(frozen=True, slots=True)
class Sample:
    """Lengths that represent a workload's, shape [n], the shortest prompt first; and its means.

    output: mean output tokens. context: mean context of a decode, over all tokens that are decoded.
    """

    prompts: Lengths
    outputs: Lengths
    output: float
    context: float

    @classmethod
    def from_workload(cls, workload: Workload, count: int = SAMPLE) -> "Sample":
        """Requests at even distances in the order of their prompts."""
        order = np.argsort(workload.prompt_tokens, kind="stable")
        picks = order[np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int)]
        prompts, outputs = workload.prompt_tokens, workload.output_tokens
        decoded = float(outputs.sum())
        walked = float((outputs * prompts + outputs * (outputs + 1) / 2.0).sum())
        return cls(prompts[picks], outputs[picks], decoded / len(workload), walked / decoded)
