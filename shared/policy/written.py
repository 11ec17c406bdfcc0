"""Policies as a person writes them: the `policies` of a file, and words such as `split=fraction:fraction=0.5`."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from shared.domain.policies import ROUTING, PolicySet
from shared.domain.route import PolicySpec
from shared.errors import InvalidRequest
from shared.policy import registry

_OPENING, _CLOSING = "[{(", ")}]"


def from_file(said: Mapping[str, object]) -> PolicySet:
    """The `policies` of a cluster file over the suite's defaults; each a name, or a mapping of `name` and parameters.

    Raises InvalidRequest that names the kind and the choices.
    """
    policies = PolicySet()
    for kind, entry in said.items():
        try:
            spec = _entry(entry)
            registry.make(kind, spec)
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
        registry.make(kind, spec)
    except InvalidRequest as error:
        raise InvalidRequest(f"policy {words!r}: {error.message}") from error
    return {kind: spec}


def in_words(spec: PolicySpec) -> str:
    """A policy as `from_words` reads it, without its kind."""
    parameters = ",".join(f"{key}={_value_in_words(value)}" for key, value in spec.parameters.items())
    return f"{spec.name}:{parameters}" if parameters else spec.name


def known() -> str:
    """All policies, by kind."""
    return "; ".join(f"{kind}: {', '.join(table)}" for kind, table in registry.KINDS.items())


def _entry(entry: object) -> PolicySpec:
    if isinstance(entry, bool):  # YAML's `on` and `off`
        return PolicySpec("on" if entry else "off")
    if isinstance(entry, str):
        return PolicySpec(entry)
    if isinstance(entry, Mapping) and isinstance(name := entry.get("name"), str):
        return PolicySpec(name, {str(key): value for key, value in entry.items() if key != "name"})
    raise InvalidRequest(f"expected a policy's name, or {{name: …, and its parameters}}, not {entry!r}")


def _kind_of(name: str) -> str:
    kinds = [kind for kind, table in registry.KINDS.items() if name in table]
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
