"""YAML files written by people: their content, and the lines of their keys. Stricter than YAML.

Refused, each with its line: a repeated key (YAML keeps the last), a key that is a list or a mapping, a tag, an anchor
that contains itself, aliases that repeat more than `MAX_REPEATED` values, nesting deeper than `MAX_DEPTH`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shared.errors import InvalidRequest
from shared.files.places import MERGE_TAG, Path_, Places, places_of
from shared.files.text import read_text
from shared.secrecy import shown_key, yaml_fault

MAX_DEPTH = 64
MAX_REPEATED = 100_000
_FAULTS = 20  # of one file that a message lists
_LEAST, _MOST = -(2**63), 2**64 - 1  # of whole numbers, as the wire and the databases hold them
# The C parser is about ten times faster; it is missing where PyYAML was built without libyaml.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CORE = "tag:yaml.org,2002:"
_LIST, _MAPPING, _TEXT, _VALUE = f"{_CORE}seq", f"{_CORE}map", f"{_CORE}str", f"{_CORE}value"
_OF_COLLECTIONS = {yaml.SequenceNode: _LIST, yaml.MappingNode: _MAPPING}
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


def parse_document(text: str, where: str) -> Document:
    """A YAML text; `where` names it in errors. Raises InvalidRequest."""
    root = _compose(text, where)
    content = _content(root, where)
    return Document(content, places_of(where, root))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises InvalidRequest."""
    return parse_yaml(read_text(path), str(path))


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """The mapping in a YAML text; `where` names it in errors. Raises InvalidRequest."""
    return Document(_content(_compose(text, where), where), Places(where)).mapping()


def _compose(text: str, where: str) -> yaml.Node | None:
    """The node of a text's only document, with aliases replaced by the nodes that they name; None for an empty text."""
    composer = _Composer(where)
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            composer.add(event)
    except yaml.YAMLError as error:
        raise InvalidRequest(yaml_fault(where, error, text)) from error
    except ValueError as error:  # half a surrogate pair, which only a text that is not from a file can have
        raise InvalidRequest(f"{where}: it has characters that are not text") from error
    return composer.root


class _Open:
    """A list or mapping that is being read. size: its values so far, including those that aliases repeat."""

    __slots__ = ("anchor", "key", "node", "size")

    def __init__(self, node: yaml.CollectionNode, anchor: str | None) -> None:
        self.node, self.anchor = node, anchor
        self.key: yaml.Node | None = None
        self.size = 1


class _Composer:
    """Builds nodes from events. PyYAML's own composer recurses without a bound, and allows an anchor inside itself."""

    def __init__(self, where: str) -> None:
        self.root: yaml.Node | None = None
        self._where = where
        self._resolve: Callable[..., str] = yaml.resolver.Resolver().resolve
        self._open: list[_Open] = []
        self._anchors: dict[str, tuple[yaml.Node, int]] = {}
        self._repeated = 0

    def add(self, event: yaml.Event) -> None:
        """Add the next event of the text. Raises InvalidRequest."""
        match event:
            case yaml.DocumentStartEvent() if self.root is not None:
                self._refuse(event, "a second document (`---`) is not read: one file is one document")
            case yaml.AliasEvent():
                self._add(event, *self._named(event))
            case yaml.ScalarEvent():
                tag = _tag_of(event) or self._resolve(yaml.ScalarNode, event.value, event.implicit)
                self._keep(event, yaml.ScalarNode(tag, event.value, *_marks(event)))
            case yaml.SequenceStartEvent():
                self._begin(event, yaml.SequenceNode)
            case yaml.MappingStartEvent():
                self._begin(event, yaml.MappingNode)
            case yaml.CollectionEndEvent():
                done = self._open.pop()
                if done.anchor is not None:
                    self._anchors[done.anchor] = done.node, done.size
                self._add(event, done.node, done.size)

    def _named(self, event: yaml.AliasEvent) -> tuple[yaml.Node, int]:
        if any(each.anchor == event.anchor for each in self._open):
            self._refuse(event, "an alias inside of what it names would never end")
        if event.anchor not in self._anchors:
            self._refuse(event, "an alias (`*name`) without an anchor (`&name`): quote text that begins with *")
        node, size = self._anchors[str(event.anchor)]
        self._repeated += size
        if self._repeated > MAX_REPEATED:
            self._refuse(event, f"aliases repeat {self._repeated:,} values up to here; at most {MAX_REPEATED:,}")
        return node, size

    def _keep(self, event: yaml.ScalarEvent, node: yaml.Node) -> None:
        if event.anchor is not None:
            self._anchors[event.anchor] = node, 1
        self._add(event, node, 1)

    def _begin(self, event: yaml.CollectionStartEvent, kind: type[yaml.CollectionNode]) -> None:
        self._require_key(event, kind is yaml.SequenceNode)
        if len(self._open) >= MAX_DEPTH:
            self._refuse(event, f"lists and mappings are nested more than {MAX_DEPTH} deep")
        node = kind(_tag_of(event) or _OF_COLLECTIONS[kind], [], *_marks(event))
        self._open.append(_Open(node, event.anchor))

    def _require_key(self, event: yaml.Event, is_list: bool) -> None:
        """Refuse a list or a mapping where a mapping's next key belongs."""
        if self._open and isinstance(self._open[-1].node, yaml.MappingNode) and self._open[-1].key is None:
            self._refuse(event, f"a key must be text, not a {'list' if is_list else 'mapping'}")

    def _add(self, event: yaml.Event, node: yaml.Node, size: int) -> None:
        if not self._open:
            self.root = node
            return
        into = self._open[-1]
        into.size += size
        if isinstance(into.node, yaml.SequenceNode):
            into.node.value.append(node)
        elif into.key is None:
            if isinstance(node, yaml.CollectionNode):
                self._require_key(event, isinstance(node, yaml.SequenceNode))
            into.key = node
        else:
            into.node.value.append((into.key, node))
            into.key = None

    def _refuse(self, event: yaml.Event, why: str) -> None:
        raise InvalidRequest(f"{self._where}:{_marks(event)[0].line + 1}: {why}")


def _tag_of(event: yaml.ScalarEvent | yaml.CollectionStartEvent) -> str:
    """The explicit tag; empty without one, or for `!` alone."""
    return "" if event.tag in (None, "!") else str(event.tag)


def _marks(event: yaml.Event) -> tuple[Any, Any]:
    """Start and end of an event. The two parsers have different types of marks."""
    return event.start_mark, event.end_mark


def _content(root: yaml.Node | None, where: str) -> Any:
    """The content of nodes as Python values. Raises InvalidRequest that lists the first faults."""
    if root is None:
        return None
    reader = _Reader()
    content = reader.read(root, ())
    if reader.faults:
        told = [f"{where}:{line}: {_name(path)}{why}" for path, line, why in reader.faults[:_FAULTS]]
        raise InvalidRequest("\n".join(told))
    return content


def _name(path: Path_) -> str:
    return ".".join(map(shown_key, path)) + ": " if path else ""


class _Reader:
    """Converts nodes to Python values, each node once, however many aliases name it. faults: key, line, and the
    fault.
    """

    def __init__(self) -> None:
        self.faults: list[tuple[Path_, int, str]] = []
        self._scalars = yaml.constructor.SafeConstructor()
        self._read: dict[int, Any] = {}

    def read(self, node: yaml.Node, path: Path_) -> Any:
        if id(node) not in self._read:
            self._read[id(node)] = self._fresh(node, path)
        return self._read[id(node)]

    def _fresh(self, node: yaml.Node, path: Path_) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _LIST:
            return [self.read(item, (*path, str(index))) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode) and node.tag == _MAPPING:
            return self._mapping(node, path)
        return self._fault(path, node, "a tag (`!name`) is not read: leave it out")

    def _mapping(self, node: yaml.MappingNode, path: Path_) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        merged: dict[Any, Any] = {}  # the first mapping that has a key counts
        lines: dict[object, int] = {}
        for key, value in node.value:
            if key.tag == MERGE_TAG:
                for each in self._merged(value, path):
                    for name in each:
                        merged.setdefault(name, each[name])
                continue
            name, inside = self.read(key, path), (*path, str(key.value))
            for same in (str(key.value), name):  # `1` and `"1"`, and what Python takes for one key: `1` and `true`
                if same in lines:
                    self._fault(inside, key, f"it is here twice, first in line {lines[same]}")
                    break
            else:
                lines.setdefault(name, key.start_mark.line + 1)
                lines.setdefault(str(key.value), key.start_mark.line + 1)
                found[name] = self.read(value, inside)
        return {**merged, **found}

    def _merged(self, value: yaml.Node, path: Path_) -> Iterator[dict[Any, Any]]:
        for each in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            if isinstance(each, yaml.MappingNode):
                read = self.read(each, path)
                yield read if isinstance(read, dict) else {}
            else:
                self._fault(path, each, "`<<` takes a mapping, or a list of mappings")

    def _scalar(self, node: yaml.ScalarNode, path: Path_) -> Any:
        if node.tag in (_VALUE, MERGE_TAG):  # a plain `=`, or `<<` that is no key
            return node.value
        if node.tag not in _SCALARS:
            return self._fault(path, node, "a tag (`!name`) is not read: write text that begins with ! in quotes")
        try:
            value = self._scalars.yaml_constructors[node.tag](self._scalars, node)
        except _UNREADABLE:
            return self._fault(path, node, "a date or a number that cannot be read: write text in quotes")
        if isinstance(value, int) and not _LEAST <= value <= _MOST:
            return self._fault(path, node, "a whole number of more than 64 bits: write text in quotes")
        return value

    def _fault(self, path: Path_, node: yaml.Node, why: str) -> None:
        self.faults.append((path, node.start_mark.line + 1, why))
