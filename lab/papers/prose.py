"""What the page says in words, from `prose.yaml`."""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from lab.papers.rows import Row, Section
from shared.files.yaml_file import read_yaml

PROSE = Path(__file__).with_name("prose.yaml")


class Prose(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One paper's. misses: why, by pattern of row keys. differs: what the product does otherwise, or does not have."""

    setup: tuple[str, ...]
    misses: Mapping[str, str]
    differs: tuple[str, ...]


def told_in_words(section: Section) -> Section:
    """The section with its set-up, what differs, and a note on each row that misses something."""
    prose = msgspec.convert(read_yaml(PROSE)[section.name], Prose)
    rows = tuple(_noted(row, prose.misses) for row in section.rows)
    return replace(section, setup=prose.setup, differs=prose.differs, rows=rows)


def _noted(row: Row, misses: Mapping[str, str]) -> Row:
    if row.met:
        return row
    note = next((note for pattern, note in misses.items() if fnmatchcase(row.key, pattern)), "")
    return replace(row, note=note)
