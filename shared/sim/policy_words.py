"""The policies of a run: those of a file, and those of words such as `least_load+cronus+power_of_two`."""

from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum

import msgspec

from shared.domain.kv import Codec
from shared.domain.policies import KINDS, ROUTING, PolicySet
from shared.domain.route import PolicySpec
from shared.errors import InvalidRequest
from shared.policy import registry
from shared.policy.role_flip import NoFlip
from shared.policy.written import from_words, known
from shared.sim.spec import FirstToken, RunSpec

_SETTINGS: dict[str, type[StrEnum]] = {"codec": Codec, "first_token": FirstToken}


def with_policies(run: RunSpec, policies: PolicySet) -> RunSpec:
    """`run` under these policies. Raises InvalidRequest."""
    for kind in KINDS:
        run = _under(run, kind, policies.of(kind))
    return run


def with_words(run: RunSpec, words: str) -> RunSpec:
    """`run` with the policies that `words` name, and the words as its label.

    words: parts joined by `+`, in any order; what they leave out stays as it is in `run`. A part is a policy as
    `shared.policy.written.from_words` reads it; `codec=int8` and `first_token=decode` are parts, too.
    Raises InvalidRequest that names the part and the choices.
    """
    given: set[str] = set()
    for kind, said in _parts(words):
        if kind in given:
            raise InvalidRequest(f"policy {words!r}: two parts are of kind {kind}")
        given.add(kind)
        run = replace(run, **{kind: said}) if isinstance(said, StrEnum) else _under(run, kind, said)  # type: ignore[arg-type]
    return replace(run, label=words)


def _parts(words: str) -> Iterator[tuple[str, PolicySpec | StrEnum]]:
    for part in words.split("+"):
        kind, _, value = (piece.strip() for piece in part.partition("="))
        if kind in _SETTINGS:
            yield kind, _setting(kind, value)
        elif part.strip():
            yield from from_words(part.strip()).items()
        else:
            raise InvalidRequest(f"policy: an empty part; known: {known()}")


def _under(run: RunSpec, kind: str, spec: PolicySpec) -> RunSpec:
    made = registry.make(kind, spec)
    if kind in ROUTING:
        return replace(run, policies=msgspec.structs.replace(run.policies, **{kind: made}))
    if kind == "step_budget":
        return replace(run, step_budget=made.limits)
    if isinstance(made, NoFlip):
        return replace(run, role_flip=None)
    return replace(run, **{kind: made})


def _setting(kind: str, name: str) -> StrEnum:
    if ":" in name:
        raise InvalidRequest(f"{kind} takes no parameters, not {name!r}")
    try:
        return _SETTINGS[kind](name)
    except ValueError as error:
        raise InvalidRequest(f"{kind} must be one of {', '.join(_SETTINGS[kind])}, not {name!r}") from error
