"""Policies as a person writes them: `least_load+cronus+power_of_two`, or the `policies` of a file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import yaml

from lab.simulate.sim_file import PolicyEntries
from shared.domain.kv import Codec
from shared.errors import InvalidRequest
from shared.policy import registry
from shared.policy.placement import Policies
from shared.sim.spec import FirstToken, RunSpec


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of policy: what there is to choose from, how one is made, and how a run takes it."""

    choices: Mapping[str, Any]
    make: Callable[[str, Mapping[str, Any]], Any]
    put: Callable[[RunSpec, Any], RunSpec]


def _routing(field: str) -> Callable[[RunSpec, Any], RunSpec]:
    def put(run: RunSpec, made: Any) -> RunSpec:
        parts = {kind: getattr(run.policies, kind) for kind in ("placement", "split", "dispatch")}
        return replace(run, policies=Policies(**{**parts, field: made}))

    return put


def _own(field: str) -> Callable[[RunSpec, Any], RunSpec]:
    return lambda run, made: replace(run, **{field: made})


_KINDS: dict[str, _Kind] = {
    "placement": _Kind(registry.PLACEMENT, registry.placement, _routing("placement")),
    "split": _Kind(registry.SPLIT, registry.split, _routing("split")),
    "dispatch": _Kind(registry.DISPATCH, registry.dispatch, _routing("dispatch")),
    "prefill_order": _Kind(registry.PREFILL_ORDER, registry.prefill_order, _own("prefill_order")),
    "decode_admission": _Kind(registry.DECODE_ADMISSION, registry.decode_admission, _own("decode_admission")),
    "role_flip": _Kind(registry.ROLE_FLIP, registry.role_flip, _own("role_flip")),
}
_TOGETHER = ("placement", "split", "dispatch")  # one decision, by the name of `adaptive`
_SETTINGS: dict[str, type[StrEnum]] = {"codec": Codec, "first_token": FirstToken}


def with_policies(run: RunSpec, entries: PolicyEntries, where: str) -> RunSpec:
    """`run` with the policies that a file names; `where` names it in errors. Raises InvalidRequest."""
    for kind, entry in entries:
        if entry is not None:
            try:
                run = _KINDS[kind].put(run, _KINDS[kind].make(entry.name, entry.model_extra or {}))
            except InvalidRequest as error:
                raise InvalidRequest(f"{where}: policies.{kind}: {error.message}") from error
    return run


def with_words(run: RunSpec, words: str) -> RunSpec:
    """`run` with the policies that `words` name, and the words as its label.

    words: parts joined by `+`, in any order; what they leave out stays as it is in `run`. A part is a policy's name,
    with its kind before it where several kinds have the name (`dispatch=random`), and its parameters after it
    (`fraction:fraction=0.5`, several joined by commas). `adaptive` alone means placement, split and dispatch.
    `codec=int8` and `first_token=decode` are parts, too.
    Raises InvalidRequest that names the part and the choices.
    """
    given: set[str] = set()
    for part in _parts(words):
        kind, name, parameters = _part(part)
        if kind in given:
            raise InvalidRequest(f"policy {words!r}: two parts are of kind {kind}")
        given.add(kind)
        if kind in _SETTINGS:
            run = replace(run, **{kind: _setting(kind, name)})  # type: ignore[arg-type]
        else:
            run = _KINDS[kind].put(run, _KINDS[kind].make(name, parameters))
    return replace(run, label=words)


def _parts(words: str) -> list[str]:
    parts = []
    for part in words.split("+"):
        parts += [f"{kind}=adaptive" for kind in _TOGETHER] if part.strip() == "adaptive" else [part.strip()]
    return parts


def _part(part: str) -> tuple[str, str, dict[str, Any]]:
    head, _, tail = part.partition(":")
    kind, named, name = head.rpartition("=")
    parameters = dict(_parameter(item, part) for item in tail.split(",")) if tail else {}
    if not name:
        raise InvalidRequest(f"policy: an empty part; known: {_known()}")
    if not named:
        return _kind_of(name), name, parameters
    if kind not in _KINDS and kind not in _SETTINGS:
        raise InvalidRequest(f"policy {part!r}: no kind {kind!r}; known: {', '.join((*_KINDS, *_SETTINGS))}")
    if kind in _SETTINGS and parameters:
        raise InvalidRequest(f"policy {part!r}: {kind} takes no parameters")
    return kind, name, parameters


def _parameter(item: str, part: str) -> tuple[str, Any]:
    key, equals, value = item.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise InvalidRequest(f"policy {part!r}: a parameter is written key=value, not {item!r}")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise InvalidRequest(f"policy {part!r}: {key.strip()}: no value {value!r}") from error


def _kind_of(name: str) -> str:
    kinds = [kind for kind, known in _KINDS.items() if name in known.choices]
    if not kinds:
        raise InvalidRequest(f"no policy {name!r}; known: {_known()}")
    if len(kinds) > 1:
        ways = " or ".join(f"{kind}={name}" for kind in kinds)
        raise InvalidRequest(f"policy {name!r} is of several kinds; write {ways}")
    return kinds[0]


def _known() -> str:
    return "; ".join(f"{kind}: {', '.join(known.choices)}" for kind, known in _KINDS.items())


def _setting(kind: str, name: str) -> StrEnum:
    try:
        return _SETTINGS[kind](name)
    except ValueError as error:
        raise InvalidRequest(f"{kind} must be one of {', '.join(_SETTINGS[kind])}, not {name!r}") from error
