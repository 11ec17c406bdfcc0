"""Measures of the code's structure: `python -m tests.structure.measure` prints them as a table.

Lines and files count Python outside `tests/`. An importer is another file outside `tests/` that imports the module or
a name from it. A module that is loaded by name (an entry point, or listed in a registry) is no file with a single
importer: `LOADED_BY_NAME` says which strings count.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOP = ("services", "gateway", "predictor", "dashboard", "shared", "tools", "benchmarks")
LOADED_BY_NAME = re.compile(
    r"""["']((?:services|gateway|predictor|dashboard|shared|tools|benchmarks)(?:\.\w+)+)(?::\w+)?["']"""
)


@dataclass(frozen=True, slots=True)
class Structure:
    """lines, files: outside tests. `single`: files with exactly one importer, by their importer."""

    files: dict[str, int]  # lines by path
    test_files: dict[str, int]
    importers: dict[str, frozenset[str]]
    by_name: frozenset[str]
    any_dicts: int

    @property
    def single(self) -> dict[str, str]:
        """Files that exactly one file imports and nothing loads by name, with that file."""
        return {
            path: next(iter(found))
            for path, found in sorted(self.importers.items())
            if len(found) == 1 and path not in self.by_name and not path.endswith(("__main__.py", "__init__.py"))
        }


def structure(root: Path = ROOT) -> Structure:
    """Read the tree."""
    files = _sources(root, TOP)
    modules = {_module_of(path): path for path in files}
    importers: dict[str, set[str]] = {path: set() for path in files}
    by_name: set[str] = set()
    any_dicts = 0
    for path in files:
        text = (root / path).read_text()
        any_dicts += text.count("dict[str, Any]")
        for module in _imported(text, modules):
            if (target := modules[module]) != path:
                importers[target].add(path)
        for name in LOADED_BY_NAME.findall(text):
            by_name |= {modules[one] for one in (name, name.rpartition(".")[0]) if one in modules}
    frozen = {path: frozenset(found) for path, found in importers.items()}
    return Structure(files, _sources(root, ("tests",)), frozen, frozenset(by_name), any_dicts)


def _sources(root: Path, tops: Iterable[str]) -> dict[str, int]:
    found = (file for top in tops for file in (root / top).rglob("*.py"))
    return {file.relative_to(root).as_posix(): file.read_text().count("\n") for file in sorted(found)}


def _module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imported(text: str, modules: dict[str, str]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules else node.module)
    return found & modules.keys()


def main() -> None:
    """Print the measures, the longest files and the folders."""
    found = structure()
    benchmarks = {path: lines for path, lines in found.files.items() if path.startswith("benchmarks/")}
    single = found.single
    print(f"code: {sum(found.files.values()):,} lines in {len(found.files)} files")
    print(f"tests: {sum(found.test_files.values()):,} lines in {len(found.test_files)} files")
    print(f"benchmarks: {sum(benchmarks.values()):,} lines in {len(benchmarks)} files")
    print(f"files with one importer: {len(single)} ({len(single) / len(found.files):.1%})")
    print(f"dict[str, Any]: {found.any_dicts}")
    print("longest files:")
    for path, lines in sorted(found.files.items(), key=lambda one: -one[1])[:10]:
        print(f"  {lines:5} {path}")
    folders: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for path, lines in found.files.items():
        folder = path.rpartition("/")[0]
        folders[folder] += lines
        counts[folder] += 1
    print("folders:")
    for folder, lines in sorted(folders.items()):
        print(f"  {lines:6} lines {counts[folder]:4} files  {folder}")


if __name__ == "__main__":
    main()
