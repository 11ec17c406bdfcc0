"""pydantic's errors about a file, in words for its author: line, key, fault, and the allowed values."""

import difflib
import types
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from shared.files.places import Places
from shared.secrecy import may_be_secret, shown_key

_KEY = "[key]"  # pydantic's last part of the location of a key of the wrong type
_SHORT = 60  # letters of a value that is shown
_KNOWN = " Known: "
_FAULTS = 50  # of one file that a message lists
OTLP = r"^(https?|grpcs?)://[^\s/]+"  # of `shared.runtime.settings.Tracing`; the scheme says which of two protocols
_PLAIN = {"a valid ": "a ", "a integer": "a whole number", "a dictionary": "a mapping", "a tuple": "a list"}
_TEXTS = {
    "missing": "it is missing",
    "too_short": "at least one is needed",
    "path_type": "must be a path, not {shown}",
    "invalid_key": "a key must be text: write it in quotes",
}
_SECRETS = {bool: "true or false", int: "a number", float: "a number", str: "the text that is given"}
_NAME = "{shown} will not do: letters, digits, '_', '.' and '-', the first a letter or digit"
_PATTERNS = {OTLP: "must be http://HOST:PORT, or grpc://HOST:PORT, or the same over TLS (https, grpcs), not {shown}"}


class Fault(NamedTuple):
    """What is wrong with a key of a file."""

    key: str  # from the top of the file or of its section, such as `instances.0.id`
    text: str


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """`unknown key 'prot'; did you mean port? Known: …`"""
    choices = sorted(known)
    return f"unknown {what} {shown_key(name)!r}{meant(name, choices)}{_KNOWN}{', '.join(choices) or 'none'}"


def meant(name: str, known: Sequence[str]) -> str:
    """`; did you mean port?` where a known name is similar, else a full stop."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else "."


def describe(where: object, error: ValidationError, at: str = "", kind: type[BaseModel] | None = None) -> str:
    """All faults, one a line: `file:line: key: fault`. at: the key of the model `kind` in the file, whose keys are
    listed.
    """
    places = where if isinstance(where, Places) else Places(str(where))
    lines: dict[str, None] = {}  # a fault in `instance_defaults` is listed once, not for each instance
    listed: set[str] = set()  # the lists of known keys, each of which is given once
    for fault in _first_causes(error.errors()):
        path = (*(at.split(".") if at else ()), *(part for part in fault["loc"] if part != _KEY))
        for text in _texts(fault, path, kind):
            line = places.tell(path, text) if path else places.tell_of_text(text)
            head, _, known = line.partition(_KNOWN)
            lines[head if known and known in listed and line not in lines else line] = None
            listed.add(known)
    more = [f"{places.file}: and {len(lines) - _FAULTS} more"] if len(lines) > _FAULTS else []
    return "\n".join([*list(lines)[:_FAULTS], *more])


def _first_causes(faults: Sequence[Any]) -> list[Any]:
    """The faults without lists that are too short because their items are invalid."""
    lists_of_faults = {fault["loc"][:end] for fault in faults for end in range(1, len(fault["loc"]))}
    return [fault for fault in faults if fault["type"] != "too_short" or fault["loc"] not in lists_of_faults]


def _texts(fault: Any, path: tuple[str | int, ...], kind: type[BaseModel] | None) -> list[str]:
    """The texts of one fault; a validator of ours may have found several. path: of the key in the file."""
    message, given, context = str(fault["msg"]), fault["input"], fault.get("ctx", {})
    shown = _shown(path, given)
    match fault["type"]:
        case "value_error":
            return message.removeprefix("Value error, ").split("\n")
        case "extra_forbidden":
            return [unknown("key", str(fault["loc"][-1]), _keys_at(kind, fault["loc"][:-1]))]
        case "literal_error" | "enum":
            choices = [each.strip("' ") for each in str(context["expected"]).replace(" or ", ", ").split(",")]
            return [f"must be one of {', '.join(choices)}, not {shown}{meant(str(given), choices).removesuffix('.')}"]
        case "string_pattern_mismatch":
            return [_PATTERNS.get(context["pattern"], _NAME).format(shown=shown)]
        case "string_type" if fault["loc"][-1:] == (_KEY,):
            return [_TEXTS["invalid_key"]]
        case "string_type" if isinstance(given, bool | int | float):
            return [f"must be text, not {shown}: write it in quotes"]
        case known if known in _TEXTS:
            return [_TEXTS[known].format(shown=shown)]
        case _ if given is None:
            return ["nothing is given: give it, or leave the key out"]
    return [f"{_plain(message)}, not {shown}"]


def _plain(message: str) -> str:
    """pydantic's message in the words of this module."""
    text = message.replace("Input should be", "must be", 1).partition(", unable to")[0]
    for theirs, ours in _PLAIN.items():
        text = text.replace(theirs, ours)
    return text.partition(" or instance of ")[0]


def _shown(path: tuple[str | int, ...], given: object) -> str:
    """The value, shortened; for mappings, lists and possible secrets only its type."""
    if isinstance(given, dict):
        return "a mapping"
    if isinstance(given, list | tuple):
        return "a list"
    if may_be_secret(path, given):
        return _SECRETS.get(type(given), f"a {type(given).__name__}")
    text = repr(given)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}…"


def _keys_at(kind: type[BaseModel] | None, path: Sequence[str | int]) -> tuple[str, ...]:
    """The known keys at a path."""
    found: Any = kind
    for part in path:
        found = _inside(found, part)
    model = _model(found)
    return tuple(model.model_fields) if model is not None else ()


def _inside(annotation: Any, part: str | int) -> Any:
    model = _model(annotation)
    if model is not None:
        known = model.model_fields.get(str(part))
        return known.annotation if known is not None else None
    arguments = get_args(_bare(annotation))
    return arguments[-1 if isinstance(part, str) else 0] if arguments else None


def _model(annotation: Any) -> type[BaseModel] | None:
    bare = _bare(annotation)
    return bare if isinstance(bare, type) and issubclass(bare, BaseModel) else None


def _bare(annotation: Any) -> Any:
    """The type without `Annotated`; of a union, the first member with fields or arguments."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        parts = [_bare(each) for each in get_args(annotation)]
        return next((each for each in parts if _model(each) or get_args(each)), None)
    return annotation
