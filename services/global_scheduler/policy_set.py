"""The policies in force: built from the settings, changed over HTTP."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict

from services.global_scheduler.settings import SchedulerSettings
from shared.domain.route import PolicySpec
from shared.policy import registry
from shared.policy.decider import PolicySpecs
from shared.runtime.logs import get_log

log = get_log(__name__)


class PolicyIn(BaseModel):
    """PolicySpec."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    parameters: dict[str, Any] = {}

    def to_spec(self) -> PolicySpec:
        """As the domain has it."""
        return PolicySpec(self.name, self.parameters)


class PoliciesChange(BaseModel):
    """The policies to change; what is left out stays."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    placement: PolicyIn | None = None
    split: PolicyIn | None = None
    dispatch: PolicyIn | None = None


class PolicySet:
    """Placement, split and dispatch: this scheduler's, and through its routes the prefill instances' dispatchers'.

    `follow` is told of a change before it holds, and may refuse it.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
        self.specs = PolicySpecs(
            PolicySpec(settings.placement, settings.placement_parameters),
            PolicySpec(settings.split, settings.split_parameters),
            PolicySpec(settings.dispatch, settings.dispatch_parameters),
        )
        self.specs.build()
        self.follow: Callable[[PolicySpecs], None] = lambda _: None

    def change(self, change: PoliciesChange, who: str) -> None:
        """Change all that is given, or nothing. Raises InvalidRequest that names the choices."""
        given = {kind: policy.to_spec() for kind, policy in change if policy is not None}
        wanted = msgspec.structs.replace(self.specs, **given)
        wanted.build()
        self.follow(wanted)
        before, self.specs = self.specs, wanted
        log.info("policies changed", who=who, before=msgspec.to_builtins(before), after=msgspec.to_builtins(wanted))

    def describe(self) -> dict[str, Any]:
        """What is in force and what there is to choose from."""
        choices: dict[str, Mapping[str, Any]] = {
            "placement": registry.PLACEMENT,
            "split": registry.SPLIT,
            "dispatch": registry.DISPATCH,
        }
        listed = {
            kind: {name: list(registry.parameters_of(factory)) for name, factory in table.items()}
            for kind, table in choices.items()
        }
        in_force: dict[str, Any] = msgspec.to_builtins(self.specs)
        return {**in_force, "choices": listed}
