"""The import law: who may import whom. Reads the sources, so that no import at all has to succeed."""

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOP = ("services", "gateway", "predictor", "dashboard", "shared", "tools", "benchmarks")
FILES = sorted(file for package in TOP for file in (ROOT / package).rglob("*.py"))

# What each part of shared may import of shared; itself is always allowed.
SHARED: dict[str, set[str]] = {
    "domain": set(),
    "errors": set(),
    "files": {"errors", "secrecy"},
    "secrecy": set(),
    "timeline": {"domain"},
    "palette": {"domain", "timeline"},
    "policy": {"domain", "errors"},
    "explain": {"domain", "timeline"},
    "model": {"domain", "errors", "files"},
    "cost": {"domain", "errors", "files"},
    "sim": {"policy", "cost", "domain", "timeline", "errors", "files"},
    "plan": {"sim", "policy", "cost", "domain", "errors", "files"},
    "runtime": {"errors", "files", "secrecy"},
    "wire": {"domain", "timeline", "errors", "runtime"},
    "store": {"domain", "timeline", "errors", "runtime"},
}
PURE = ("policy", "cost", "sim", "plan", "domain", "explain")
IMPURE = {"asyncio", "time", "socket", "httpx", "zmq", "sqlalchemy", "threading", "subprocess"}
VLLM = {
    "gateway/adapters.py",
    "gateway/app.py",
    "gateway/core.py",
    "gateway/media.py",
    "gateway/structured_outputs.py",
    "gateway/fast_path.py",
    "gateway/vllm_patches.py",
    "gateway/plain_stream.py",
    "benchmarks/vllm_check/plugin.py",
    "benchmarks/engine_process.py",
    "services/worker/engines/vllm.py",
    "services/worker/engines/vllm_exports.py",
    "services/worker/engines/vllm_observers.py",
    "services/worker/engines/vllm_patches.py",
    "services/worker/engines/vllm_scheduler.py",
    "services/worker/engines/vllm_sessions.py",
    "services/worker/engines/vllm_cpu_worker.py",
    "services/worker/engines/vllm_start.py",
}
TORCH = {
    "benchmarks/model_families.py",
    "gateway/core.py",
    "services/worker/engines/vllm_cpu_worker.py",
    "services/worker/engines/vllm_patches.py",
    "benchmarks/kv.py",
    "benchmarks/engine_process.py",
}
COMMAND = "services/launcher/cli.py"  # the `polyphase` command is composed of all groups of commands
CONTROL = "services/control/__main__.py"  # runs three services in one process
LAUNCHER = "services/launcher/"  # composes the suite: it may know every process's settings, and nothing else of them
LAUNCHER_MAY = {"gateway.auth", "gateway.table"}  # and makes what the processes share


def imports(file: Path) -> list[str]:
    """Full names of the modules that a file imports, wherever in it."""
    found: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide where a name comes from"
            found.append(node.module or "")
    return found


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_import_law(file: Path) -> None:
    name = name_of(file)
    for module in imports(file):
        top = module.split(".")[0]
        if top == "vllm":
            assert name in VLLM or name.startswith("services/worker/kv/vllm/"), f"{name} imports vLLM"
        elif top == "torch":
            allowed = name in TORCH or name.startswith(("services/worker/kv/", "predictor/"))
            assert allowed, f"{name} imports torch"
        elif top in TOP:
            _check_own(name, module)
        elif top in IMPURE and name.startswith(tuple(f"shared/{part}/" for part in PURE)):
            raise AssertionError(f"{name} is pure, yet imports {module}")


def _check_own(name: str, module: str) -> None:
    parts, mine = module.split("."), name.removesuffix(".py").split("/")
    if mine[0] == "benchmarks" or (name == COMMAND and parts[0] in ("tools", "benchmarks")):
        return
    if mine[0] == "tools":
        assert parts[0] != "benchmarks", f"{name} imports {module}: product commands do not need benchmarks"
        return
    if parts[0] == "shared":
        if mine[0] == "shared":
            allowed = SHARED[mine[1]] | {mine[1]}
            assert parts[1] in allowed, f"{name} may not import {module}"
        return
    if name == CONTROL and module.endswith((".app", ".settings")):
        return
    if name.startswith(LAUNCHER) and (parts[-1] == "settings" or module in LAUNCHER_MAY):
        return
    assert parts[0] == mine[0], f"{name} imports {module}: top-level packages import shared, never each other"
    if parts[0] == "services" and len(parts) > 1:
        assert parts[1] == mine[1], f"{name} imports a sibling: {module}"


def test_every_part_of_shared_is_in_the_law() -> None:
    parts = {path.stem for path in (ROOT / "shared").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert parts - {"__init__", "__pycache__"} <= set(SHARED)


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Whatever the import is for, and wherever it stands: a circle is read in no order."""
    modules = {module_of(file): file for file in FILES}
    graph = {name: imported(name, file, modules) for name, file in modules.items()}
    assert not (found := circles(graph)), "; ".join(" -> ".join(circle) for circle in found)


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(name: str, file: Path, modules: Mapping[str, Path]) -> set[str]:
    """Modules of ours that a file names, and the packages that are run on the way to them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & modules.keys()
            found |= submodules if len(submodules) == len(node.names) else {node.module, *submodules}
    ways = {module.rsplit(".", depth)[0] for module in found for depth in range(module.count(".") + 1)}
    own = {name.rsplit(".", depth)[0] for depth in range(name.count(".") + 1)}  # its packages run before it
    return (ways & modules.keys()) - own


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The strongly connected parts of more than one module, sorted."""
    reach = {name: _reached(name, graph) for name in graph}
    groups = {tuple(sorted(other for other in reach[name] if name in reach[other])) for name in graph}
    return [list(group) for group in sorted(groups) if group]


def _reached(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    left = [start]
    while left:
        for other in graph[left.pop()] - seen:
            seen.add(other)
            left.append(other)
    return seen
