"""What a person asks of the planner, whoever takes it: the command line or the planner's service."""

from dataclasses import dataclass, replace
from math import inf

from shared.cost.kinds import Workshop
from shared.domain.job import Slo
from shared.domain.kv import Codec
from shared.errors import InvalidRequest
from shared.plan.inventory import Inventory
from shared.plan.methods.registry import method
from shared.plan.problem import Problem
from shared.sim.spec import EngineLimits
from shared.sim.workload import Workload

ENGINES = ("emulated", "vllm")
MOST_SEQUENCES = 256  # that an engine runs at once


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of a plan, and of the search for it, in a person's words; errors name the fields as they are here.

    rate: requests a second to be served; 0: as many as can be. target: SLO attainment at which a rate counts as served.
    budget: USD an hour that the accelerators used may cost. cheapest: the least USD an hour that serves `rate`.
    compare: beside the other methods. seconds: after which nothing new is begun. engine: of the file. max_model_len:
    tokens of a request; None: the model's own. chunk_size: tokens of a step.
    """

    rate: float = 0.0
    target: float = 0.9
    budget: float | None = None
    cheapest: bool = False
    method: str = "best"
    compare: bool = True
    seconds: float = 60.0
    codec: str = "raw"
    engine: str = "emulated"
    one_node: bool = False
    max_model_len: int | None = None
    chunk_size: int = 2048
    seed: int = 1

    def check(self) -> None:
        """Raises InvalidRequest that names the field and the choices."""
        if self.engine not in ENGINES:
            raise InvalidRequest(f"engine: {' or '.join(ENGINES)}, not {self.engine!r}")
        if self.codec not in list(Codec):
            raise InvalidRequest(f"codec: one of {', '.join(Codec)}, not {self.codec!r}")
        if self.cheapest and not self.rate > 0:
            raise InvalidRequest("cheapest needs the rate that is to be served")
        method(self.method)


@dataclass(frozen=True, slots=True)
class Asked:
    """A problem, and how it is to be searched. name: the inventory's. model: by the name that it was asked for."""

    problem: Problem
    wanted: Wanted
    name: str
    model: str

    @classmethod
    def of(
        cls, wanted: Wanted, name: str, inventory: Inventory, model: str, shop: Workshop, workload: Workload, slo: Slo
    ) -> "Asked":
        """Put together. Raises InvalidRequest that names what is wrong."""
        wanted.check()
        problem = Problem(
            inventory,
            shop,
            fitting(workload, wanted.max_model_len or shop.geometry.max_position),
            slo=slo,
            rate=wanted.rate,
            target=wanted.target,
            limits=EngineLimits(batched_tokens=wanted.chunk_size, sequences=min(MOST_SEQUENCES, wanted.chunk_size)),
            one_node=wanted.one_node or wanted.engine == "vllm",
            codec=Codec(wanted.codec),
            budget_usd_hour=inf if wanted.budget is None else wanted.budget,
            longest_tokens=wanted.max_model_len or 0,
        )
        return cls(problem, wanted, name, model)


def fitting(workload: Workload, longest: int) -> Workload:
    """The requests that a context of `longest` tokens holds. Raises InvalidRequest where none is left."""
    fits = workload.prompt_tokens + workload.output_tokens <= longest
    if not fits.any():
        raise InvalidRequest(f"{workload.name}: every request is longer than {longest} tokens (max_model_len)")
    if fits.all():
        return workload
    return replace(
        workload,
        name=f"{workload.name} (without {int((~fits).sum())} of {len(fits)} requests of more than {longest} tokens)",
        arrival_s=workload.arrival_s[fits],
        prompt_tokens=workload.prompt_tokens[fits],
        output_tokens=workload.output_tokens[fits],
        prefixes=None,
        mix=None,
    )
