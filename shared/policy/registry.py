"""All policies by their kinds and names; making them from a `PolicySpec`, from a cluster file and from words such as
`split=fraction:fraction=0.5`. A policy's parameters are the fields of its class; unknown ones and wrong types are
errors.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import StrEnum
from functools import partial
from math import isfinite
from typing import Any, TypeVar

import msgspec

from shared.domain.policies import ROUTING, PolicySet
from shared.domain.route import PolicySpec
from shared.errors import InvalidRequest
from shared.policy.adaptive import Adaptive, AdaptiveDispatch, AdaptiveSplit
from shared.policy.decode_admission import DecodeAdmission, Greedy
from shared.policy.dispatch import DispatchPolicy, PowerOfTwo, RandomDispatch, Spread
from shared.policy.papers.cronus import BalancedSplit, CronusSplit
from shared.policy.papers.huawei import Memory, Single, Weighted, Workload
from shared.policy.papers.tetriinfer import IdleFlip, ReserveDynamic, ReserveStatic, WorstCase
from shared.policy.papers.thunderserve import PlanRoute, PlanRoutes, parse_routes
from shared.policy.placement import LeastLoad, Placement, RoundRobin
from shared.policy.predictive_flip import PredictiveFlip
from shared.policy.prefill_order import Fcfs, Ljf, PrefillOrder, Sjf
from shared.policy.role_flip import NoFlip, RoleFlip
from shared.policy.split import FractionSplit, FullSplit, NoSplit, RandomSplit, Split
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
    "worst_case": WorstCase,
}
PREFILL_ORDER: dict[str, Callable[..., PrefillOrder]] = {"fcfs": Fcfs, "sjf": Sjf, "ljf": Ljf}
DECODE_ADMISSION: dict[str, Callable[..., DecodeAdmission]] = {
    "greedy": Greedy,
    "reserve_static": ReserveStatic,
    "reserve_dynamic": ReserveDynamic,
}
STEP_BUDGET: dict[str, Callable[..., StepBudget]] = {"off": NoBudget, "on": TpotBudget}
ROLE_FLIP: dict[str, Callable[..., RoleFlip]] = {"off": NoFlip, "idle": IdleFlip, "predictive": PredictiveFlip}
KINDS: dict[str, Mapping[str, Callable[..., Any]]] = {  # of `PolicySet`
    "placement": PLACEMENT,
    "split": SPLIT,
    "dispatch": DISPATCH,
    "prefill_order": PREFILL_ORDER,
    "decode_admission": DECODE_ADMISSION,
    "step_budget": STEP_BUDGET,
    "role_flip": ROLE_FLIP,
}
SUCCESSORS: dict[str, str] = {  # of removed policies
    "prefix": "adaptive",
    "least_interference": "power_of_two",
    "least_slack": "sjf",
    "pressure": "predictive",
}


def make(kind: str, spec: PolicySpec) -> Any:
    """A policy of any kind. Raises InvalidRequest that names the choices."""
    if kind not in KINDS:
        raise InvalidRequest(f"no kind of policy {kind!r}; known: {', '.join(KINDS)}")
    return _make(kind.replace("_", " "), KINDS[kind], spec.name, spec.parameters)


def choices() -> dict[str, dict[str, tuple[str, ...]]]:
    """The policies of each kind, and the parameters of each policy."""
    return {kind: {name: parameters_of(factory) for name, factory in table.items()} for kind, table in KINDS.items()}


def parameters_of(factory: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(factory))


def known() -> str:
    """All policies by kind, for error messages."""
    return "; ".join(f"{kind}: {', '.join(table)}" for kind, table in KINDS.items())


def _make(
    kind: str, choices: Mapping[str, Callable[..., Policy]], name: str, parameters: Parameters | None = None
) -> Policy:
    factory = choices.get(name)
    if factory is None:
        if (successor := SUCCESSORS.get(name)) in choices:
            raise InvalidRequest(f"{kind} policy {name!r} was removed; use {successor!r} instead")
        raise InvalidRequest(f"unknown {kind} policy {name!r}; known: {', '.join(sorted(choices))}")
    types = {field.name: field.type for field in fields(factory)}  # type: ignore[arg-type]
    given = dict(parameters or {})
    for key in given:
        if key not in types:
            takes = ", ".join(types) or "no parameters"
            raise InvalidRequest(f"{kind} policy {name!r} has no parameter {key!r}; it takes {takes}")
    return factory(**{key: _checked(f"{name}.{key}", types[key], value) for key, value in given.items()})


# One typed factory for each kind: (name, parameters) -> policy. They raise InvalidRequest that names the choices.
placement = partial(_make, "placement", PLACEMENT)
split = partial(_make, "split", SPLIT)
dispatch = partial(_make, "dispatch", DISPATCH)
prefill_order = partial(_make, "prefill order", PREFILL_ORDER)
decode_admission = partial(_make, "decode admission", DECODE_ADMISSION)
step_budget = partial(_make, "step budget", STEP_BUDGET)
role_flip = partial(_make, "role flip", ROLE_FLIP)


def _checked(where: str, kind: Any, value: Any) -> Any:
    """The value of a parameter of type `kind`. Raises InvalidRequest when it has another type."""
    if kind == tuple[PlanRoute, ...]:
        return parse_routes(where, value)
    if issubclass(kind, StrEnum):
        values = [member.value for member in kind]
        if value not in values:
            raise InvalidRequest(f"{where} must be one of {', '.join(values)}, not {value!r}")
        return kind(value)
    accepted = (int, float) if kind is float else (kind,)
    if (isinstance(value, bool) and kind is not bool) or not isinstance(value, accepted):
        raise InvalidRequest(f"{where} must be of type {kind.__name__}, not {value!r}")
    if isinstance(value, float) and not isfinite(value):
        raise InvalidRequest(f"{where} must be finite, not {value}")
    return float(value) if kind is float else value


def from_file(entries: Mapping[str, object]) -> PolicySet:
    """The `policies` of a cluster file over the defaults; each a name, or a mapping of `name` and parameters.

    Raises InvalidRequest that names the kind and the choices.
    """
    policies = PolicySet()
    for kind, entry in entries.items():
        try:
            spec = _spec(entry)
            make(kind, spec)
        except InvalidRequest as error:
            raise InvalidRequest(f"{kind}: {error.message}") from error
        policies = msgspec.structs.replace(policies, **{kind: spec})
    return policies


def from_words(words: str) -> dict[str, PolicySpec]:
    """A policy in words, by its kind: `name`, `kind=name` where several kinds have the name (`dispatch=random`), with
    parameters `name:key=value,key=value`, where values are JSON or plain words (`fraction:fraction=0.5`).

    `adaptive` alone is placement, split and dispatch. Raises InvalidRequest that names the words and the choices.
    """
    if words.strip() == "adaptive":
        return {kind: PolicySpec("adaptive") for kind in ROUTING}
    head, _, tail = words.partition(":")
    kind, has_kind, name = (part.strip() for part in head.rpartition("="))
    if not name:
        raise InvalidRequest(f"policy {words!r}: no name; known: {known()}")
    spec = PolicySpec(name, dict(_parameter(item, words) for item in _split_at_commas(tail)))
    kind = kind if has_kind else _kind_of(name)
    try:
        make(kind, spec)
    except InvalidRequest as error:
        raise InvalidRequest(f"policy {words!r}: {error.message}") from error
    return {kind: spec}


def in_words(spec: PolicySpec) -> str:
    """A policy as `from_words` reads it, without its kind."""
    values = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in spec.parameters.items())
    parameters = ",".join(f"{key}={value}" for key, value in values)
    return f"{spec.name}:{parameters}" if parameters else spec.name


def _spec(entry: object) -> PolicySpec:
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
        successor = SUCCESSORS.get(name)
        how = f"it was removed; use {successor!r} instead" if successor else f"known: {known()}"
        raise InvalidRequest(f"no policy {name!r}; {how}")
    if len(kinds) > 1:
        ways = " or ".join(f"{kind}={name}" for kind in kinds)
        raise InvalidRequest(f"policy {name!r} is of several kinds; write {ways}")
    return kinds[0]


def _split_at_commas(text: str) -> list[str]:
    """The parts between commas that are not inside brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "[{(") - (char in ")}]")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return parts if text else []


def _parameter(item: str, words: str) -> tuple[str, Any]:
    key, _, value = (part.strip() for part in item.partition("="))
    if not key or not value:
        raise InvalidRequest(f"policy {words!r}: a parameter is written key=value, not {item!r}")
    try:
        return key, json.loads(value)
    except ValueError:  # a plain word
        return key, value
