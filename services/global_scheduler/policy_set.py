"""The policies in force: built from the settings, changed over HTTP."""

from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict

from services.global_scheduler.settings import SchedulerSettings
from shared.domain.route import PolicySpec
from shared.policy import registry
from shared.policy.placement import Policies
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
    """Placement, split and dispatch: this scheduler's, and through its routes the prefill instances' dispatchers'."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._specs = {
            "placement": PolicySpec(settings.placement, settings.placement_parameters),
            "split": PolicySpec(settings.split, settings.split_parameters),
            "dispatch": PolicySpec(settings.dispatch, settings.dispatch_parameters),
        }
        self.current = _build(self._specs)

    @property
    def dispatch(self) -> PolicySpec:
        """The dispatch policy in force, for those who are to follow it."""
        return self._specs["dispatch"]

    def change(self, change: PoliciesChange, who: str) -> None:
        """Change all that is given, or nothing. Raises InvalidRequest that names the choices."""
        wanted = {**self._specs, **{kind: given.to_spec() for kind, given in change if given is not None}}
        built = _build(wanted)
        before, self._specs, self.current = self._specs, wanted, built
        log.info("policies changed", who=who, before=_plain(before), after=_plain(wanted))

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
        return {**_plain(self._specs), "choices": listed}


def _build(specs: Mapping[str, PolicySpec]) -> Policies:
    return Policies(
        registry.placement(specs["placement"].name, specs["placement"].parameters),
        registry.split(specs["split"].name, specs["split"].parameters),
        registry.dispatch(specs["dispatch"].name, specs["dispatch"].parameters),
    )


def _plain(specs: Mapping[str, PolicySpec]) -> dict[str, Any]:
    return {kind: msgspec.to_builtins(spec) for kind, spec in specs.items()}
