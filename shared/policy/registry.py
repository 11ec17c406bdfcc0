"""Every policy by its name. Parameters are the fields of the policy, strictly."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import StrEnum
from math import isfinite
from typing import Any, TypeVar

import msgspec

from shared.domain.policies import ROUTING, PolicySet
from shared.domain.route import PolicySpec
from shared.errors import InvalidRequest
from shared.policy.adaptive import Adaptive, AdaptiveDispatch, AdaptiveSplit
from shared.policy.decode_admission import DecodeAdmission, Greedy, PredictedEnd, ReserveDynamic, ReserveStatic
from shared.policy.dispatch import DispatchPolicy, LeastInterference, PowerOfTwo, RandomDispatch, Spread, WorstCase
from shared.policy.placement import LeastLoad, Placement, RoundRobin, Single, Weighted
from shared.policy.placement_policies import (
    Memory,
    Penalty,
    PlanRoute,
    PlanRoutes,
    PrefixPlacement,
    Workload,
    parse_routes,
)
from shared.policy.predictive_roles import PredictiveFlip
from shared.policy.prefill_order import Fcfs, LeastSlack, Ljf, PrefillOrder, Sjf
from shared.policy.role_flip import IdleFlip, NoFlip, PressureFlip, RoleFlip
from shared.policy.split import BalancedSplit, CronusSplit, FractionSplit, FullSplit, NoSplit, RandomSplit, Split
from shared.policy.step_budget import NoBudget, StepBudget, TpotBudget

Policy = TypeVar("Policy")
Parameters = Mapping[str, Any]

PLACEMENT: dict[str, Callable[..., Placement]] = {
    "adaptive": Adaptive,
    "least_load": LeastLoad,
    "round_robin": RoundRobin,
    "weighted": Weighted,
    "single": Single,
    "workload": Workload,
    "memory": Memory,
    "plan": PlanRoutes,
    "prefix": PrefixPlacement,
}
SPLIT: dict[str, Callable[..., Split]] = {
    "adaptive": AdaptiveSplit,
    "full": FullSplit,
    "none": NoSplit,
    "fraction": FractionSplit,
    "random": RandomSplit,
    "cronus": CronusSplit,
    "balanced": BalancedSplit,
}
DISPATCH: dict[str, Callable[..., DispatchPolicy]] = {
    "adaptive": AdaptiveDispatch,
    "power_of_two": PowerOfTwo,
    "random": RandomDispatch,
    "spread": Spread,
    "least_interference": LeastInterference,
    "worst_case": WorstCase,
}
PREFILL_ORDER: dict[str, Callable[..., PrefillOrder]] = {
    "fcfs": Fcfs,
    "sjf": Sjf,
    "ljf": Ljf,
    "least_slack": LeastSlack,
}
DECODE_ADMISSION: dict[str, Callable[..., DecodeAdmission]] = {
    "greedy": Greedy,
    "reserve_static": ReserveStatic,
    "reserve_dynamic": ReserveDynamic,
}
STEP_BUDGET: dict[str, Callable[..., StepBudget]] = {"off": NoBudget, "on": TpotBudget}
ROLE_FLIP: dict[str, Callable[..., RoleFlip]] = {
    "off": NoFlip,
    "idle": IdleFlip,
    "pressure": PressureFlip,
    "predictive": PredictiveFlip,
}
KINDS: dict[str, Mapping[str, Callable[..., Any]]] = {  # of `PolicySet`
    "placement": PLACEMENT,
    "split": SPLIT,
    "dispatch": DISPATCH,
    "prefill_order": PREFILL_ORDER,
    "decode_admission": DECODE_ADMISSION,
    "step_budget": STEP_BUDGET,
    "role_flip": ROLE_FLIP,
}


def placement(name: str, parameters: Parameters | None = None) -> Placement:
    """A placement policy. Raises InvalidRequest that names the choices."""
    return _make("placement", PLACEMENT, name, parameters)


def split(name: str, parameters: Parameters | None = None) -> Split:
    """A split policy. Raises InvalidRequest that names the choices."""
    return _make("split", SPLIT, name, parameters)


def dispatch(name: str, parameters: Parameters | None = None) -> DispatchPolicy:
    """A dispatch policy. Raises InvalidRequest that names the choices."""
    return _make("dispatch", DISPATCH, name, parameters)


def prefill_order(name: str, parameters: Parameters | None = None) -> PrefillOrder:
    """An order of prompts that wait. Raises InvalidRequest that names the choices."""
    return _make("prefill order", PREFILL_ORDER, name, parameters)


def decode_admission(name: str, parameters: Parameters | None = None) -> DecodeAdmission:
    """An admission policy of decode instances. Raises InvalidRequest that names the choices."""
    return _make("decode admission", DECODE_ADMISSION, name, parameters)


def step_budget(name: str, parameters: Parameters | None = None) -> StepBudget:
    """Whether steps have a budget. Raises InvalidRequest that names the choices."""
    return _make("step budget", STEP_BUDGET, name, parameters)


def role_flip(name: str, parameters: Parameters | None = None) -> RoleFlip:
    """A policy of role flips. Raises InvalidRequest that names the choices."""
    return _make("role flip", ROLE_FLIP, name, parameters)


def make(kind: str, spec: PolicySpec) -> Any:
    """A policy of any kind. Raises InvalidRequest that names the choices."""
    if kind not in KINDS:
        raise InvalidRequest(f"no kind of policy {kind!r}; known: {', '.join(KINDS)}")
    return _make(kind.replace("_", " "), KINDS[kind], spec.name, spec.parameters)


def check(policies: PolicySet) -> None:
    """Raises InvalidRequest that names the kind and the choices for the first policy that cannot be made."""
    for kind in KINDS:
        try:
            make(kind, policies.of(kind))
        except InvalidRequest as error:
            raise InvalidRequest(f"{kind}: {error.message}") from error


def choices() -> dict[str, dict[str, tuple[str, ...]]]:
    """Of each kind the policies, and of each policy the parameters."""
    return {kind: {name: parameters_of(made) for name, made in table.items()} for kind, table in KINDS.items()}


def parameters_of(factory: Any) -> tuple[str, ...]:
    """The parameters that a policy takes."""
    return tuple(field.name for field in fields(factory))


def _make(kind: str, choices: Mapping[str, Callable[..., Policy]], name: str, parameters: Parameters | None) -> Policy:
    factory = choices.get(name)
    if factory is None:
        raise InvalidRequest(f"unknown {kind} policy {name!r}; known: {', '.join(sorted(choices))}")
    known = {field.name: field for field in fields(factory)}  # type: ignore[arg-type]
    given = dict(parameters or {})
    for key in given:
        if key not in known:
            takes = ", ".join(known) or "no parameters"
            raise InvalidRequest(f"{kind} policy {name!r} has no parameter {key!r}; it takes {takes}")
    return factory(**{key: _checked(f"{name}.{key}", known[key].type, value) for key, value in given.items()})


_ENUMS: dict[type, type[StrEnum]] = {PredictedEnd: PredictedEnd, Penalty: Penalty}
_PARSERS: dict[Any, Callable[[str, Any], Any]] = {tuple[PlanRoute, ...]: parse_routes}


def _checked(where: str, kind: Any, value: Any) -> Any:
    if kind in _PARSERS:
        return _PARSERS[kind](where, value)
    if kind in _ENUMS:
        choices = [member.value for member in _ENUMS[kind]]
        if value not in choices:
            raise InvalidRequest(f"{where} must be one of {', '.join(choices)}, not {value!r}")
        return _ENUMS[kind](value)
    accepted = (int, float) if kind is float else (kind,)
    if (isinstance(value, bool) and kind is not bool) or not isinstance(value, accepted):
        raise InvalidRequest(f"{where} must be of type {kind.__name__}, not {value!r}")
    if isinstance(value, float) and not isfinite(value):
        raise InvalidRequest(f"{where} must be finite, not {value}")
    return float(value) if kind is float else value


# MERGED written.py
# Policies as a person writes them: the `policies` of a file, and words such as `split=fraction:fraction=0.5`.


_OPENING, _CLOSING = "[{(", ")}]"


def from_file(said: Mapping[str, object]) -> PolicySet:
    """The `policies` of a cluster file over the suite's defaults; each a name, or a mapping of `name` and parameters.

    Raises InvalidRequest that names the kind and the choices.
    """
    policies = PolicySet()
    for kind, entry in said.items():
        try:
            spec = _entry(entry)
            make(kind, spec)
        except InvalidRequest as error:
            raise InvalidRequest(f"{kind}: {error.message}") from error
        policies = msgspec.structs.replace(policies, **{kind: spec})
    return policies


def from_words(words: str) -> dict[str, PolicySpec]:
    """One policy in words: its name, its kind before it where several kinds have the name (`dispatch=random`), its
    parameters after it (`fraction:fraction=0.5`, several joined by commas, each in JSON or a plain word). `adaptive`
    alone is placement, split and dispatch. Raises InvalidRequest that names the words and the choices.
    """
    if words.strip() == "adaptive":
        return {kind: PolicySpec("adaptive") for kind in ROUTING}
    head, _, tail = words.partition(":")
    kind, named, name = (part.strip() for part in head.rpartition("="))
    if not name:
        raise InvalidRequest(f"policy {words!r}: no name; known: {known()}")
    spec = PolicySpec(name, dict(_parameter(item, words) for item in _items(tail)))
    kind = kind if named else _kind_of(name)
    try:
        make(kind, spec)
    except InvalidRequest as error:
        raise InvalidRequest(f"policy {words!r}: {error.message}") from error
    return {kind: spec}


def in_words(spec: PolicySpec) -> str:
    """A policy as `from_words` reads it, without its kind."""
    parameters = ",".join(f"{key}={_value_in_words(value)}" for key, value in spec.parameters.items())
    return f"{spec.name}:{parameters}" if parameters else spec.name


def known() -> str:
    """All policies, by kind."""
    return "; ".join(f"{kind}: {', '.join(table)}" for kind, table in KINDS.items())


def _entry(entry: object) -> PolicySpec:
    if isinstance(entry, bool):  # YAML's `on` and `off`
        return PolicySpec("on" if entry else "off")
    if isinstance(entry, str):
        return PolicySpec(entry)
    if isinstance(entry, Mapping) and isinstance(name := entry.get("name"), str):
        return PolicySpec(name, {str(key): value for key, value in entry.items() if key != "name"})
    raise InvalidRequest(f"expected a policy's name, or {{name: …, and its parameters}}, not {entry!r}")


def _kind_of(name: str) -> str:
    kinds = [kind for kind, table in KINDS.items() if name in table]
    if not kinds:
        raise InvalidRequest(f"no policy {name!r}; known: {known()}")
    if len(kinds) > 1:
        ways = " or ".join(f"{kind}={name}" for kind in kinds)
        raise InvalidRequest(f"policy {name!r} is of several kinds; write {ways}")
    return kinds[0]


def _items(tail: str) -> list[str]:
    """Parts between commas, but for those inside of brackets."""
    parts, depth = [""], 0
    for char in tail:
        depth += (char in _OPENING) - (char in _CLOSING)
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return parts if tail else []


def _parameter(item: str, words: str) -> tuple[str, Any]:
    key, _, value = (part.strip() for part in item.partition("="))
    if not key or not value:
        raise InvalidRequest(f"policy {words!r}: a parameter is written key=value, not {item!r}")
    try:
        return key, json.loads(value)
    except ValueError:  # a word
        return key, value


def _value_in_words(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
