"""The lines of a YAML file's keys, for error messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shared.secrecy import shown_key

KeyPath = tuple[str, ...]  # keys from the top; for lists their indexes, from 0
_DEFAULTS = "instance_defaults"


@dataclass(frozen=True, slots=True)
class Places:
    """The lines of a file's keys. `overruled`: keys that are given on the command line, each with its option."""

    file: str
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    ids: tuple[str, ...] = ()  # of `instances`, in order; empty for one without
    overruled: Mapping[str, str] = field(default_factory=dict)

    def tell(self, key: str | Sequence[str | int], text: str) -> str:
        """A fault of a key with the place to correct: `file:line: key: text`.

        A `text` that begins with a key below that one, such as `slo.fast: …`, belongs to the lower key.
        """
        path = self._by_index(tuple(map(str, key.split("."))) if isinstance(key, str) else tuple(map(str, key)))
        lower, _, rest = text.partition(": ")
        while rest and self._written((*path, *lower.split("."))) in self.lines:
            path, text = (*path, *lower.split(".")), rest
            lower, _, rest = text.partition(": ")
        path = self._written(path)
        named = ".".join(map(shown_key, self._by_id(path)))
        if option := self.overruled.get(named):
            return f"{option}: {text}"
        # The line of the key, or of the innermost part of its path that is in the file.
        line = next((self.lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.lines), None)
        return f"{self.file}{f':{line}' if line else ''}: {named + ': ' if named else ''}{text}"

    def tell_of_text(self, text: str) -> str:
        """As `tell`, for a text that may begin with its key: `nodes.0.name: …`."""
        key, colon, rest = text.partition(": ")
        return self.tell(key, rest) if colon and " " not in key else self.tell((), text)

    def overrule(self, key: str, option: str) -> "Places":
        """The same file with a key that is given by an option of the command line."""
        return replace(self, overruled={**self.overruled, key: option})

    def _written(self, path: KeyPath) -> KeyPath:
        """The path of the key in the file: an instance's key may be given only in `instance_defaults`."""
        default = (_DEFAULTS, *path[2:]) if path[:1] == ("instances",) and len(path) > 2 else path
        return path if path in self.lines or default not in self.lines else default

    def _by_index(self, path: KeyPath) -> KeyPath:
        """The path with an instance's index in place of its id, which may contain dots."""
        for length in range(2, len(path) + 1 if path[:1] == ("instances",) else 0):
            name = ".".join(path[1:length])
            if name in self.ids:
                return ("instances", str(self.ids.index(name)), *path[length:])
        return path

    def _by_id(self, path: KeyPath) -> KeyPath:
        """The path with an instance's id in place of its index."""
        if len(path) > 1 and path[0] == "instances" and path[1].isdecimal() and int(path[1]) < len(self.ids):
            return ("instances", self.ids[int(path[1])] or path[1], *path[2:])
        return path
