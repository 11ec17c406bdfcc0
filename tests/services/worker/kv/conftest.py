import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


def _load(name: str, path: Path) -> None:
    """Make a helper beside the tests importable: they are no package, and import-mode is importlib."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


_HERE = Path(__file__).parent
_load("tiny_models", _HERE.parents[2] / "tiny_models.py")
_load("kv_rig", _HERE / "rig.py")
_load("kv_engines", _HERE / "vllm" / "engine_client.py")

from kv_rig import Rig  # noqa: E402


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()
