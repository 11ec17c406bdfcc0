"""What an engine goes by: whom it takes next, whom it lets decode, and how much prefill a step may hold."""

from collections.abc import Callable
from dataclasses import dataclass, field

from shared.domain.policies import ENGINE, PolicySet
from shared.domain.rates import StepRates
from shared.policy import registry
from shared.policy.decode_admission import DecodeAdmission, Greedy
from shared.policy.prefill_order import Fcfs, PrefillOrder

CurrentRates = Callable[[], StepRates | None]  # what is known of the instance's steps by now; any thread may ask


@dataclass(frozen=True, slots=True)
class EnginePolicies:
    """May be exchanged between two steps. step_budget: prefill gives way to the TPOT targets of those that decode."""

    order: PrefillOrder = field(default_factory=Fcfs)
    admission: DecodeAdmission = field(default_factory=Greedy)
    step_budget: bool = False

    @classmethod
    def of(cls, policies: PolicySet) -> "EnginePolicies":
        """Those that an engine goes by. Raises InvalidRequest that names the choices."""
        order, admission, budget = (registry.make(kind, policies.of(kind)) for kind in ENGINE)
        return cls(order, admission, budget.limits)

    def names(self) -> dict[str, str | bool]:
        """For people, and for whoever wants to know how an engine is run."""
        return {
            "prefill_order": self.order.name,
            "decode_admission": self.admission.name,
            "step_budget": self.step_budget,
        }
