"""How large a model's weights are: read from the headers of its safetensors files, without the weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from shared.errors import InvalidRequest
from shared.files.text import read_json

_FLOATS: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of what vLLM loads as `dtype` says
_LOADED: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
_LENGTH_BYTES = 8  # the header's length, before it
_MAX_HEADER_BYTES = 100 << 20  # as safetensors has it


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights in bytes: as files, and on the devices, in the precision that they are loaded in."""

    stored: int
    loaded: int


def weights_of(model: str | Path, dtype: str = "bfloat16") -> Weights | None:
    """Of a model's folder; None where it is no folder, or has no weights that can be read."""
    folder = Path(model)
    files = _files(folder)
    try:
        stored = sum(file.stat().st_size for file in files)
        if not files or not all(file.suffix == ".safetensors" for file in files):
            return Weights(stored, stored) if stored else None
        return Weights(stored, sum(_loaded(file, dtype) for file in files))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _files(folder: Path) -> list[Path]:
    """Those that vLLM loads: of the index where there is one, else safetensors before other formats."""
    try:
        named = read_json(folder / "model.safetensors.index.json")["weight_map"].values()
        return sorted({folder / name for name in named})
    except (InvalidRequest, KeyError, TypeError, AttributeError):
        pass
    for pattern in ("model*.safetensors", "*.safetensors", "*.bin", "*.pt", "*.gguf"):
        if found := sorted(folder.glob(pattern)):
            return found
    return []


def _loaded(file: Path, dtype: str) -> int:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{file}: this is no safetensors file")
        tensors: dict[str, Any] = json.loads(opened.read(length))
    return sum(_bytes(tensor, dtype) for name, tensor in tensors.items() if name != "__metadata__")


def _bytes(tensor: Mapping[str, Any], dtype: str) -> int:
    if tensor["dtype"] in _FLOATS:
        return int(prod(tensor["shape"])) * _LOADED.get(dtype, 2)
    start, end = tensor["data_offsets"]
    return int(end) - int(start)
