"""What an engine goes by: whom it takes next, whom it lets decode, and how much prefill a step may hold."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from services.worker.settings import WorkerSettings
from shared.domain.rates import StepRates
from shared.domain.route import PolicySpec
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

    def changed(
        self, order: PolicySpec | None = None, admission: PolicySpec | None = None, step_budget: bool | None = None
    ) -> "EnginePolicies":
        """These, with others in place of some. Raises InvalidRequest that names the choices."""
        return replace(
            self,
            order=registry.prefill_order(order.name, order.parameters) if order else self.order,
            admission=registry.decode_admission(admission.name, admission.parameters) if admission else self.admission,
            step_budget=self.step_budget if step_budget is None else step_budget,
        )

    def names(self) -> dict[str, str | bool]:
        """For people, and for whoever wants to know how an engine is run."""
        return {
            "prefill_order": self.order.name,
            "decode_admission": self.admission.name,
            "step_budget": self.step_budget,
        }


def policies_of(settings: WorkerSettings) -> EnginePolicies:
    """Those that the settings name. Raises InvalidRequest that names the choices."""
    return EnginePolicies(
        registry.prefill_order(settings.prefill_order, settings.prefill_order_parameters),
        registry.decode_admission(settings.decode_admission, settings.decode_admission_parameters),
        settings.step_budget,
    )
