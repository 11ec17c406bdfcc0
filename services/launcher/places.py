"""Where the keys of a YAML file stand, so that what is wrong with one is told with its line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from shared.errors import InvalidRequest
from shared.secrecy import shown_key, yaml_fault

Path_ = tuple[str, ...]  # keys from the top; of a list its places, counted from 0
_DEFAULTS = "instance_defaults"
_MERGE = "<<"


@dataclass(frozen=True, slots=True)
class Places:
    """The lines of a file's keys. `overruled`: keys that the command line gives, each with its option."""

    file: str
    lines: Mapping[Path_, int] = field(default_factory=dict)
    ids: tuple[str, ...] = ()  # of `instances`, in order; empty for one without
    overruled: Mapping[str, str] = field(default_factory=dict)

    def tell(self, key: str | Sequence[str | int], text: str) -> str:
        """What is wrong with a key, after the place where it is to be mended: `file:line: key: text`."""
        path = self._by_index(tuple(map(str, key.split("."))) if isinstance(key, str) else tuple(map(str, key)))
        while path and text.partition(": ")[1] and self._has(longer := (*path, *self._first(text))):
            path, text = longer, text.partition(": ")[2]
        path = self._where_written(path)
        named = ".".join(map(shown_key, self._by_id(path)))
        if option := self.overruled.get(named):
            return f"{option}: {text}"
        line = self._line(path)
        return f"{self.file}{f':{line}' if line else ''}: {named + ': ' if named else ''}{text}"

    def overrule(self, key: str, option: str) -> "Places":
        """The same file with a key that an option of the command line gives instead."""
        return replace(self, overruled={**self.overruled, key: option})

    def _first(self, text: str) -> Path_:
        return tuple(text.partition(": ")[0].split("."))

    def _has(self, path: Path_) -> bool:
        return path in self.lines or self._default_of(path) in self.lines

    def _where_written(self, path: Path_) -> Path_:
        """An instance's key that only `instance_defaults` has is one of those."""
        default = self._default_of(path)
        return path if path in self.lines or default not in self.lines else default

    def _default_of(self, path: Path_) -> Path_:
        return (_DEFAULTS, *path[2:]) if path[:1] == ("instances",) and len(path) > 2 else ()

    def _line(self, path: Path_) -> int | None:
        """Of the key, else of what it should be in."""
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


def read_places(file: Path | str, text: str) -> Places:
    """Of a YAML text. Raises InvalidRequest where it is no YAML, or a key is there twice: YAML would keep the last."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise InvalidRequest(yaml_fault(file, error)) from error
    lines: dict[Path_, int] = {}
    twice: list[tuple[Path_, int]] = []
    if root is not None:
        _walk(root, (), lines, twice)
    places = Places(str(file), lines, _ids(root))
    if twice:
        told = [
            f"{file}:{line}: {'.'.join(map(shown_key, path))}: it is here twice, first in line {lines[path]}"
            for path, line in twice
        ]
        raise InvalidRequest("\n".join(told))
    return places


def read_with_places(file: Path | str, text: str) -> tuple[Any, Places]:
    """What a YAML text says, and where. Raises InvalidRequest as `read_places`, and for a value that cannot be read."""
    places = read_places(file, text)
    try:
        return yaml.safe_load(text), places
    except yaml.YAMLError as error:
        raise InvalidRequest(yaml_fault(file, error)) from error
    except ValueError as error:  # of a date or a number that is none
        raise InvalidRequest(f"{file}: a date or a number in it cannot be read: write it in quotes") from error


def _walk(node: yaml.Node, path: Path_, lines: dict[Path_, int], twice: list[tuple[Path_, int]]) -> None:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, str(index))] = item.start_mark.line + 1
            _walk(item, (*path, str(index)), lines, twice)
    elif isinstance(node, yaml.MappingNode):
        own: set[str] = set()
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name == _MERGE:
                _merge(value, path, lines)
                continue
            if name in own:
                twice.append(((*path, name), line))
                continue
            own.add(name)
            lines[(*path, name)] = line
            _walk(value, (*path, name), lines, twice)


def _merge(value: yaml.Node, path: Path_, lines: dict[Path_, int]) -> None:
    """Keys that come from an anchor: theirs is where it stands, unless they are given here."""
    merged: dict[Path_, int] = {}
    for node in value.value if isinstance(value, yaml.SequenceNode) else [value]:
        _walk(node, path, merged, [])
    for where, line in merged.items():
        lines.setdefault(where, line)


def _ids(root: yaml.Node | None) -> tuple[str, ...]:
    """What each of `instances` calls itself; empty where it does not."""
    found = _value(root, "instances")
    if not isinstance(found, yaml.SequenceNode):
        return ()
    named: list[Any] = [_value(item, "id") for item in found.value]
    return tuple(str(each.value) if isinstance(each, yaml.ScalarNode) else "" for each in named)


def _value(node: yaml.Node | None, key: str) -> yaml.Node | None:
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return next((value for name, value in pairs if name.value == key), None)
