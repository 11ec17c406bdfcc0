"""Streamlit puts `dashboard/` first on `sys.path`: a file there would hide a package of the same name."""

import ast
import sys
from importlib.machinery import PathFinder
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "dashboard"


def test_no_file_is_named_after_a_package() -> None:
    path = [entry for entry in sys.path if Path(entry).resolve() != FOLDER]
    folders = [entry for entry in FOLDER.iterdir() if (entry / "__init__.py").exists()]
    for file in [*FOLDER.glob("*.py"), *folders]:
        if file.stem != "__init__":
            assert file.stem not in sys.stdlib_module_names
            assert PathFinder.find_spec(file.stem, path) is None, file.name


def test_of_ours_only_shared_is_imported() -> None:
    ours = {"services", "gateway", "predictor"}
    for file in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not ours & {module.split(".")[0] for module in modules}, file.name
