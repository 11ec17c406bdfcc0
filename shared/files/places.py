"""The lines of a YAML file's keys, for error messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import yaml

from shared.secrecy import shown_key

Path_ = tuple[str, ...]  # keys from the top; for lists their indexes, from 0
_DEFAULTS = "instance_defaults"
MERGE_TAG = "tag:yaml.org,2002:merge"  # of a key `<<` without quotes


@dataclass(frozen=True, slots=True)
class Places:
    """The lines of a file's keys. `overruled`: keys that are given on the command line, each with its option."""

    file: str
    lines: Mapping[Path_, int] = field(default_factory=dict)
    ids: tuple[str, ...] = ()  # of `instances`, in order; empty for one without
    overruled: Mapping[str, str] = field(default_factory=dict)

    def tell(self, key: str | Sequence[str | int], text: str) -> str:
        """A fault of a key with the place to correct: `file:line: key: text`."""
        path = self._by_index(tuple(map(str, key.split("."))) if isinstance(key, str) else tuple(map(str, key)))
        while path and text.partition(": ")[1] and self._has(longer := (*path, *self._first(text))):
            path, text = longer, text.partition(": ")[2]
        path = self._where_written(path)
        named = ".".join(map(shown_key, self._by_id(path)))
        if option := self.overruled.get(named):
            return f"{option}: {text}"
        line = self._line(path)
        return f"{self.file}{f':{line}' if line else ''}: {named + ': ' if named else ''}{text}"

    def tell_of_text(self, text: str) -> str:
        """As `tell`, for a text that may begin with its key: `nodes.0.name: …`."""
        key, colon, rest = text.partition(": ")
        return self.tell(key, rest) if colon and " " not in key else self.tell((), text)

    def overrule(self, key: str, option: str) -> "Places":
        """The same file with a key that is given by an option of the command line."""
        return replace(self, overruled={**self.overruled, key: option})

    def _first(self, text: str) -> Path_:
        return tuple(text.partition(": ")[0].split("."))

    def _has(self, path: Path_) -> bool:
        return path in self.lines or self._default_of(path) in self.lines

    def _where_written(self, path: Path_) -> Path_:
        """The path of the key in the file: an instance's key may be given only in `instance_defaults`."""
        default = self._default_of(path)
        return path if path in self.lines or default not in self.lines else default

    def _default_of(self, path: Path_) -> Path_:
        return (_DEFAULTS, *path[2:]) if path[:1] == ("instances",) and len(path) > 2 else ()

    def _line(self, path: Path_) -> int | None:
        """The line of the key, or of the innermost part of its path that exists."""
        return next((self.lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.lines), None)

    def _by_index(self, path: Path_) -> Path_:
        if len(path) < 2 or path[0] != "instances":
            return path
        for length in range(2, len(path) + 1):  # an id may hold dots
            name = ".".join(path[1:length])
            if name in self.ids:
                return ("instances", str(self.ids.index(name)), *path[length:])
        return path

    def _by_id(self, path: Path_) -> Path_:
        if len(path) > 1 and path[0] == "instances" and path[1].isdecimal() and int(path[1]) < len(self.ids):
            return ("instances", self.ids[int(path[1])] or path[1], *path[2:])
        return path


def places_of(file: str, root: yaml.Node | None) -> Places:
    """The lines of a parsed file. Values repeated by an alias have the line of its anchor."""
    lines: dict[Path_, int] = {}
    if root is not None:
        _walk(root, (), lines)
    return Places(file, lines, _ids(root))


def _walk(node: yaml.Node, path: Path_, lines: dict[Path_, int]) -> None:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, str(index))] = item.start_mark.line + 1
            _walk(item, (*path, str(index)), lines)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.tag == MERGE_TAG:
                _merge(value, path, lines)
            else:
                lines[(*path, str(key.value))] = key.start_mark.line + 1
                _walk(value, (*path, str(key.value)), lines)


def _merge(value: yaml.Node, path: Path_, lines: dict[Path_, int]) -> None:
    """Add keys that are merged from an anchor, with its lines, unless they are given here."""
    merged: dict[Path_, int] = {}
    for node in value.value if isinstance(value, yaml.SequenceNode) else [value]:
        _walk(node, path, merged)
    for where, line in merged.items():
        lines.setdefault(where, line)


def _ids(root: yaml.Node | None) -> tuple[str, ...]:
    """The ids of `instances`; empty for an instance without one."""
    found = _value(root, "instances")
    if not isinstance(found, yaml.SequenceNode):
        return ()
    named = [_value(item, "id") for item in found.value]
    return tuple(str(each.value) if isinstance(each, yaml.ScalarNode) else "" for each in named)


def _value(node: yaml.Node | None, key: str) -> yaml.Node | None:
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return next((value for name, value in pairs if name.value == key), None)
