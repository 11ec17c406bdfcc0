"""The options of vLLM's API server in the setting `vllm_args`: their names, their values, and vLLM's command line.

The table, `vllm_options.json`, is made from vLLM's own parser by `table_of`, so that a mistake in a file is found
without importing vLLM, which takes seconds. A test compares the table with the installed vLLM.
"""

import argparse
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shared.files.faults import meant
from shared.files.text import shown
from shared.secrecy import may_be_secret, shown_key

TABLE = Path(__file__).with_suffix(".json")
_WHOLE = re.compile(r"[+-]?\d+")
_SIZE = re.compile(r"[+-]?\d+|\d+(\.\d+)?[kmgt]|\d+[KMGT]")  # multiples of 1,000, and whole multiples of 1,024
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_SERVER: tuple[str, ...] = ("uds", "headless", "config", "grpc", "grpc_port", "api_server_count", "uvicorn_log_level")
_SERVER += ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "enable_ssl_refresh", "ssl_cert_reqs", "ssl_ciphers")
_SERVER += ("h11_max_incomplete_event_size", "h11_max_header_count")
_ADAPTERS = "it is a setting of its own, `lora` at the top of the file"
_OWN_SERVER = "the gateway has a server of its own, which does not read it"
# Options that have a setting of their own, or that have no effect in a gateway.
_REFUSED: Mapping[str, str] = {
    "model": "it is a setting of its own, `model` at the top of the file",
    "served_model_name": "it is a setting of its own, `served_model_name` at the top of the file",
    "max_model_len": "it is a setting of its own, `max_model_len` at the top of the file",
    "trust_remote_code": "it is a setting of its own, `trust_remote_code` at the top of the file",
    "dtype": "it is a setting of its own, `gateway: {dtype: …}`",
    "host": "it is a setting of its own, `gateway: {host: …}`",
    "port": "it is a setting of its own, `gateway: {port: …}`",
    "otlp_traces_endpoint": "vLLM's traces would not be connected to the gateway's: use `tracing`",
    "enable_per_request_metrics": "it needs the statistics of an engine, which runs in no gateway",
    "enable_lora": _ADAPTERS,
    "lora_modules": _ADAPTERS,
    **dict.fromkeys(_SERVER, _OWN_SERVER),
}
_NEEDS: Mapping[str, str] = {  # an option, and the one that vLLM requires with it
    "enable_auto_tool_choice": "tool_call_parser",
    "enable_log_outputs": "enable_log_requests",
}
# Of reasoning and structured output: what the front end and the engine of a vLLM both read.
_SHARED = ("reasoning_parser", "reasoning_parser_plugin", "reasoning_config", "structured_outputs_config")
_PLUGINS: Mapping[str, str] = {"tool_call_parser": "tool_parser_plugin", "reasoning_parser": "reasoning_parser_plugin"}


class Option(msgspec.Struct, frozen=True, omit_defaults=True):
    """kind: `flag` (on, or left out), `switch` (on or off), `whole`, `size` (`16k`), `size_or_auto`, `number`, `text`,
    `json`, `custom` (vLLM's own). json: a text option that also accepts a mapping. many: it accepts several values;
    each: it is repeated for each of them.
    """

    kind: str
    json: bool = False
    many: bool = False
    each: bool = False
    choices: tuple[str, ...] = ()


class Table(msgspec.Struct, frozen=True):
    """All options by their names with underscores. parsers: registered names, by the option that accepts them."""

    vllm: str
    options: dict[str, Option]
    parsers: dict[str, list[str]]


@functools.cache
def table() -> Table:
    """The options of the vLLM version that the table was made from."""
    return msgspec.json.decode(TABLE.read_bytes(), type=Table)


def faults_of(args: Mapping[str, Any]) -> Iterator[str]:
    """The mistakes in `vllm_args`: `name: what is wrong, and what is allowed`."""
    given = {normal(name): value for name, value in args.items() if value is not None}
    for name, value in args.items():
        if value is not None and (fault := _fault_of(normal(name), value, given)):
            yield f"{shown_key(name)}: {fault}"
    for name, needed in _NEEDS.items():
        if given.get(name) is True and not given.get(needed):
            yield f"{name}: it needs {needed}"


def words_of(args: Mapping[str, Any]) -> list[str]:
    """The same options as words of vLLM's command line."""
    words: list[str] = []
    for name, value in args.items():
        if value is not None:
            words += _words(normal(name), value)
    return words


def shared_with_engines(args: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that an engine needs as well, as its engine arguments. Faulty ones may be missing."""
    found: dict[str, Any] = {}
    for name, value in args.items():
        head, *keys = normal(str(name)).split(".")
        if head not in _SHARED or value is None or value == "":
            continue
        if isinstance(value, str) and not keys and table().options[head].kind == "json":
            if not _is_json(value):
                continue
            value = json.loads(value)
        if not keys and not isinstance(value, dict):
            found[head] = value
            continue
        for key in reversed(keys):
            value = {key: value}
        found[head] = _merged(found.get(head), value)
    return found


def _merged(one: object, other: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(one) if isinstance(one, dict) else {}
    for key, value in other.items():
        merged[key] = _merged(merged.get(key), value) if isinstance(value, dict) else value
    return merged


def normal(name: str) -> str:
    """An option's name with underscores; a part after a dot is a key of its value, and is unchanged."""
    head, dot, key = name.partition(".")
    return head.replace("-", "_") + dot + key


def table_of(parser: argparse.ArgumentParser, version: str, parsers: dict[str, list[str]]) -> Table:
    options: dict[str, Option] = {}
    for action in parser._actions:
        names = [word.removeprefix("--") for word in action.option_strings if word.startswith("--")]
        for name in names:
            if not name.startswith("no-") and name != "help":
                options[normal(name)] = _option(action)
    return Table(version, dict(sorted(options.items())), parsers)


def _option(action: argparse.Action) -> Option:
    if isinstance(action, argparse.BooleanOptionalAction):
        return Option("switch")
    if action.nargs == 0:
        return Option("flag")
    each = isinstance(action, argparse._AppendAction)
    many = each or action.nargs in ("+", "*")
    choices = tuple(map(str, action.choices or ()))
    if type(action) not in (argparse._StoreAction, argparse._AppendAction):
        return Option("custom", True, many, each)
    of = _reading(action)
    if of("{}") is not None and of("x") is None:
        return Option("json", False, many, each)
    if of("1k") is not None and of("x") is None:
        return Option("size" if of("auto") is None else "size_or_auto", False, many, each)
    if of("x") is not None or choices:
        return Option("text", isinstance(of("{}"), dict), many, each, choices)
    return Option("number" if of("1.5") is not None else "whole", False, many, each)


def _reading(action: argparse.Action) -> Any:
    """Reads a word as the action does; None where the action refuses it."""

    def read(word: str) -> Any:
        try:
            return action.type(word) if callable(action.type) else word
        except Exception:  # any exception of vLLM's functions means that the word is refused
            return None

    return read


def _fault_of(name: str, value: Any, given: Mapping[str, Any]) -> str:
    if name in _REFUSED:
        return _REFUSED[name]
    head, _, key = name.partition(".")
    option = _known(head)
    if option is None:
        return f"vLLM {table().vllm} has no such option{meant(head, list(table().options)).removesuffix('.')}"
    if key:
        takes_keys = option.kind == "json" or option.json
        return "" if takes_keys else f"{head} takes no keys"
    if isinstance(value, list) and option.many:
        if not value:
            return "at least one value is needed"
        return next((fault for each in value if (fault := _fault_of_one(name, option, each, given))), "")
    return _fault_of_one(name, option, value, given)


def _fault_of_one(name: str, option: Option, value: Any, given: Mapping[str, Any]) -> str:
    hidden = may_be_secret((name,), value) or isinstance(value, list | dict)
    got = f"a {_KINDS.get(type(value), 'number')}" if hidden else shown(value)
    if not _fits(option, value):
        return f"must be {_WANTED[option.kind]}, not {got}"
    choices: Sequence[str] = option.choices
    if name in table().parsers and not given.get(_PLUGINS[name]):
        choices = table().parsers[name]
    if choices and not isinstance(value, dict) and str(value) not in choices:
        return f"must be one of {', '.join(choices)}, not {got}{meant(str(value), choices).removesuffix('.')}"
    return ""


_KINDS: Mapping[type, str] = {list: "list", dict: "mapping", str: "text", bool: "truth value"}
_WANTED: Mapping[str, str] = {
    "flag": "true or false",
    "switch": "true or false",
    "whole": "a whole number",
    "size": "a whole number, also as 16k or 16K",
    "size_or_auto": "a whole number, also as 16k or 16K, or auto",
    "number": "a number",
    "text": "text",
    "json": "a mapping or a list",
    "custom": "text, a mapping or a list",
}


def _fits(option: Option, value: Any) -> bool:
    match option.kind, value:
        case (("flag" | "switch"), bool()):
            return True
        case (("flag" | "switch"), _):
            return False
        case "json", dict() | list():
            return True
        case "json", str():
            return _is_json(value)
        case _, bool():
            return False
        case "custom", _:
            return True
        case (("whole" | "size" | "size_or_auto"), int()):
            return True
        case "number", int() | float():
            return True
        case "whole", str():
            return _WHOLE.fullmatch(value) is not None
        case (("size" | "size_or_auto"), str()):
            return _SIZE.fullmatch(value) is not None or (option.kind == "size_or_auto" and value == "auto")
        case "number", str():
            return _NUMBER.fullmatch(value) is not None
        case "text", str() | int() | float():
            return True
        case "text", dict():
            return option.json
    return False


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _known(name: str) -> Option | None:
    """The option of that name; `no_x` turns off the switch `x`."""
    found = table().options.get(name)
    opposite = table().options.get(name.removeprefix("no_")) if name.startswith("no_") else None
    return Option("flag") if found is None and opposite is not None and opposite.kind == "switch" else found


def _words(name: str, value: Any) -> list[str]:
    head, dot, key = name.partition(".")
    word, option = f"--{head.replace('_', '-')}{dot}{key}", _known(head)
    match value:
        case True:
            return [word]
        case False:
            return [f"--no-{word.removeprefix('--')}"] if option is not None and option.kind == "switch" else []
        case list() if option is not None and option.each:
            return [f"{word}={_written(each)}" for each in value]
        case list() if option is not None and option.many:
            return [word, *map(_written, value)]
    return [f"{word}={_written(value)}"]


def _written(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
