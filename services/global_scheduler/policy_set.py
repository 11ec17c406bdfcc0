"""The policies in force: built from the settings, changed over HTTP."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from services.global_scheduler.settings import SchedulerSettings
from shared.policy import registry
from shared.policy.placement import Policies
from shared.runtime.logs import get_log

log = get_log(__name__)


class PolicySpec(BaseModel):
    """One policy by name, with its parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    parameters: dict[str, Any] = {}


class PoliciesChange(BaseModel):
    """The policies to change; what is left out stays."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    placement: PolicySpec | None = None
    split: PolicySpec | None = None
    dispatch: PolicySpec | None = None


class PolicySet:
    """Placement, split and dispatch of this scheduler."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._specs = {
            "placement": PolicySpec(name=settings.placement, parameters=settings.placement_parameters),
            "split": PolicySpec(name=settings.split, parameters=settings.split_parameters),
            "dispatch": PolicySpec(name=settings.dispatch, parameters=settings.dispatch_parameters),
        }
        self.current = _build(self._specs)

    def change(self, change: PoliciesChange, who: str) -> None:
        """Change all that is given, or nothing. Raises InvalidRequest that names the choices."""
        wanted = {**self._specs, **{kind: spec for kind, spec in change if spec is not None}}
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
    return {kind: spec.model_dump() for kind, spec in specs.items()}
