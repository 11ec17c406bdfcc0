"""YAML files written by people: their content, and the lines of their keys. Stricter than YAML.

Refused, each with its line: a repeated key (YAML keeps the last), a key that is a list or a mapping, a tag, an anchor
that contains itself, aliases that repeat more than `MAX_REPEATED` values, nesting deeper than `MAX_DEPTH`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from shared.errors import InvalidRequest
from shared.files.places import KeyPath, Places
from shared.files.text import read_text
from shared.secrecy import shown_key, yaml_fault

MAX_DEPTH = 64
MAX_REPEATED = 100_000
_FAULTS = 20  # of one file that a message lists
_MIN_INTEGER, _MAX_INTEGER = -(2**63), 2**64 - 1  # as the wire and the databases hold whole numbers
# The C parser is about ten times faster; it is missing where PyYAML was built without libyaml.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CORE = "tag:yaml.org,2002:"
_LIST, _MAPPING, _VALUE, _MERGE = (f"{_CORE}{name}" for name in ("seq", "map", "value", "merge"))
_SCALARS = frozenset(f"{_CORE}{name}" for name in ("str", "int", "float", "bool", "null", "timestamp"))
# Errors of PyYAML's constructors for `!!bool x`, `2026-99-99`, a number of 5,000 digits and the like.
_UNREADABLE = (ValueError, KeyError, AttributeError, TypeError, OverflowError, yaml.YAMLError)


@dataclass(frozen=True, slots=True)
class Document:
    """The content of a YAML text, and the lines of its keys."""

    content: Any
    places: Places

    def mapping(self) -> dict[str, Any]:
        """The mapping at the top, its keys as text; empty for an empty document. Raises InvalidRequest."""
        if self.content is None:
            return {}
        if not isinstance(self.content, dict):
            raise InvalidRequest(f"{self.places.file}: expected a mapping of keys at the top")
        return {str(key): value for key, value in self.content.items()}


def read_document(file: Path, where: str = "") -> Document:
    """A YAML file. where: its name in errors. Raises InvalidRequest that names file, line and key."""
    return parse_document(read_text(file), where or str(file))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises InvalidRequest."""
    return read_document(path).mapping()


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """The mapping in a YAML text; `where` names it in errors. Raises InvalidRequest."""
    return parse_document(text, where).mapping()


def parse_document(text: str, where: str) -> Document:
    """A YAML text; `where` names it in errors. Raises InvalidRequest that lists the first faults."""
    try:
        _check_bounds(text, where)
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        raise InvalidRequest(yaml_fault(where, error, text)) from error
    except ValueError as error:  # half a surrogate pair, which only a text that is not from a file can have
        raise InvalidRequest(f"{where}: it has characters that are not text") from error
    reader = _Reader()
    content = reader.read(root, ()) if root is not None else None
    if reader.faults:
        raise InvalidRequest("\n".join(f"{where}:{fault}" for fault in list(reader.faults.values())[:_FAULTS]))
    return Document(content, Places(where, reader.lines, _ids(content)))


def _check_bounds(text: str, where: str) -> None:
    """Refuse what would make PyYAML's composer recurse or repeat without a bound, and a second document.

    A size counts the values of a list or mapping, including those that aliases repeat.
    """

    def refuse(event: yaml.Event, why: str) -> NoReturn:
        raise InvalidRequest(f"{where}:{_line(event)}: {why}")

    documents, repeated = 0, 0
    sizes: dict[str, int] = {}  # of the values with an anchor
    anchors: list[str | None] = []  # of the lists and mappings that are open, outermost first
    open_sizes: list[int] = []
    for event in yaml.parse(text, Loader=_LOADER):
        match event:
            case yaml.DocumentStartEvent():
                documents += 1
                if documents > 1:
                    refuse(event, "a second document (`---`) is not read: one file is one document")
                continue
            case yaml.CollectionStartEvent():
                if len(anchors) == MAX_DEPTH:
                    refuse(event, f"lists and mappings are nested more than {MAX_DEPTH} deep")
                anchors.append(event.anchor)
                open_sizes.append(1)
                continue
            case yaml.AliasEvent():
                if event.anchor in anchors:
                    refuse(event, "an alias inside of what it names would never end")
                if event.anchor not in sizes:
                    refuse(event, "an alias (`*name`) without an anchor (`&name`): quote text that begins with *")
                size, anchor = sizes[event.anchor], None
                repeated += size
                if repeated > MAX_REPEATED:
                    refuse(event, f"aliases repeat {repeated:,} values up to here; at most {MAX_REPEATED:,}")
            case yaml.CollectionEndEvent():
                size, anchor = open_sizes.pop(), anchors.pop()
            case yaml.ScalarEvent():
                size, anchor = 1, event.anchor
            case _:
                continue
        if anchor is not None:
            sizes[anchor] = size
        if open_sizes:
            open_sizes[-1] += size


def _ids(content: Any) -> tuple[str, ...]:
    """The ids of `instances`; empty for an instance without one."""
    instances = content.get("instances") if isinstance(content, dict) else None
    if not isinstance(instances, list):
        return ()
    ids = [entry.get("id", "") if isinstance(entry, dict) else "" for entry in instances]
    return tuple("" if isinstance(each, list | dict) else str(each) for each in ids)


class _Reader:
    """Converts nodes to Python values. lines: of the keys. faults: `line: key: fault`, by the node at fault."""

    def __init__(self) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.faults: dict[int, str] = {}
        self._scalars = yaml.constructor.SafeConstructor()

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _LIST:
            return [self._inside(item, item, (*path, str(index))) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode) and node.tag == _MAPPING:
            return self._mapping(node, path)
        return self._fault(path, node, "a tag (`!name`) is not read: leave it out")

    def _inside(self, key: yaml.Node, value: yaml.Node, path: KeyPath) -> Any:
        """Read a value inside a list or mapping. The first line of a key counts: its own before a merged one."""
        self.lines.setdefault(path, _line(key))
        return self.read(value, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[Any, Any]:
        own: dict[Any, Any] = {}
        first_lines: dict[object, int] = {}
        for key, value in node.value:
            if key.tag == _MERGE:
                continue
            if not isinstance(key, yaml.ScalarNode):
                kind = "list" if isinstance(key, yaml.SequenceNode) else "mapping"
                self._fault(path, key, f"a key must be text, not a {kind}")
                continue
            name, below = self._scalar(key, path), (*path, str(key.value))
            # `1` and `"1"` are the same key for a reader, `1` and `true` for Python.
            twice = next((first_lines[same] for same in (str(key.value), name) if same in first_lines), None)
            if twice is not None:
                self._fault(below, key, f"it is here twice, first in line {twice}")
                continue
            first_lines |= {name: _line(key), str(key.value): _line(key)}
            own[name] = self._inside(key, value, below)
        merged: dict[Any, Any] = {}  # the first mapping that has a key counts
        for each in self._merged(node, path):
            merged = {**each, **merged}
        return {**merged, **own}

    def _merged(self, node: yaml.MappingNode, path: KeyPath) -> Iterator[dict[Any, Any]]:
        """The mappings that `<<` names."""
        for key, value in node.value:
            if key.tag != _MERGE:
                continue
            for each in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if isinstance(each, yaml.MappingNode):
                    yield self._mapping(each, path)
                else:
                    self._fault(path, each, "`<<` takes a mapping, or a list of mappings")

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        if node.tag in (_VALUE, _MERGE):  # a plain `=`, or `<<` that is no key
            return node.value
        if node.tag not in _SCALARS:
            return self._fault(path, node, "a tag (`!name`) is not read: write text that begins with ! in quotes")
        try:
            value = self._scalars.yaml_constructors[node.tag](self._scalars, node)
        except _UNREADABLE:
            return self._fault(path, node, "a date or a number that cannot be read: write text in quotes")
        if isinstance(value, int) and not _MIN_INTEGER <= value <= _MAX_INTEGER:
            return self._fault(path, node, "a whole number of more than 64 bits: write text in quotes")
        return value

    def _fault(self, path: KeyPath, node: yaml.Node, why: str) -> None:
        named = ".".join(map(shown_key, path)) + ": " if path else ""
        self.faults.setdefault(id(node), f"{_line(node)}: {named}{why}")


def _line(part: yaml.Node | yaml.Event) -> int:
    mark: Any = part.start_mark  # of one of two types, by the parser
    return int(mark.line) + 1
