"""How large a model's weights are, and whether they are complete: read from the headers of its safetensors files."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_FORMATS = ("model*.safetensors", "*.safetensors", "*.bin", "*.pt", "*.gguf")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_NAMED = 8  # files that a message names
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")  # ends of the tensors' names
_SAMPLES, _SAMPLE_BYTES = 8, 4096
_KV_SCALE = re.compile(r"(^|[._])(k|v|kv)(_cache\.|_)scale$")  # ends of the names that vLLM knows


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights in bytes: as files, and on the devices, in the precision that they are loaded in."""

    stored: int
    loaded: int


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A model's token embeddings: their dtype and shape, and samples of their bytes."""

    dtype: str
    shape: tuple[int, ...]
    samples: tuple[bytes, ...]


def embeddings_of(folder: Path) -> Embeddings | None:
    """The token embeddings in a folder's safetensors files; None where there are none that can be read."""
    try:
        for file in _files(folder):
            if file.suffix != ".safetensors":
                return None
            length, tensors = _header(file)
            for name, tensor in tensors.items():
                if name.endswith(_EMBEDDINGS):
                    start, end = (_LENGTH_BYTES + length + int(offset) for offset in tensor["data_offsets"])
                    return Embeddings(tensor["dtype"], tuple(tensor["shape"]), _sampled(file, start, end))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return None


def kv_scales_of(file: Path) -> list[tuple[str, bytes]]:
    """Names and bytes of the scales of K and V in a safetensors file, by name; empty where it cannot be read."""
    try:
        length, tensors = _header(file)
        with file.open("rb") as opened:
            found = []
            for name in sorted(filter(_KV_SCALE.search, tensors)):
                start, end = tensors[name]["data_offsets"]
                opened.seek(_LENGTH_BYTES + length + int(start))
                found.append((name, opened.read(int(end) - int(start))))
            return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def _sampled(file: Path, start: int, end: int) -> tuple[bytes, ...]:
    with file.open("rb") as opened:
        found = []
        for at in range(_SAMPLES):
            opened.seek(start + max(0, end - start - _SAMPLE_BYTES) * at // (_SAMPLES - 1))
            found.append(opened.read(min(_SAMPLE_BYTES, end - start)))
        return tuple(found)


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


def fault_of_weights(folder: Path) -> str:
    """Which weight files of a model's folder are missing or broken, and what to do; empty if all are complete."""
    files = _files(folder)
    if not files:
        return f"{folder} has no weights ({', '.join(_FORMATS[1:])}): download them, or give another folder"
    if missing := [file.name for file in files if not file.is_file()]:
        return f"{folder} lacks {_some(missing)}, which its index names: download the model again"
    if pointers := [file.name for file in files if is_lfs_pointer(file)]:
        return f"{folder}: {_some(pointers)}: pointers of Git LFS instead of weights: run `git lfs pull` there"
    broken = [text for file in files if file.suffix == ".safetensors" and (text := _fault_of_safetensors(file))]
    return f"{folder}: {_some(broken)}: download the model again" if broken else ""


def is_lfs_pointer(file: Path) -> bool:
    """Whether a file is what Git LFS leaves in place of a file that was not downloaded."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        return False


def _files(folder: Path) -> list[Path]:
    """Those that vLLM loads: of the index where there is one, else safetensors before other formats."""
    for index in _INDEXES:
        with suppress(InvalidRequest, KeyError, TypeError, AttributeError):
            named = read_json(folder / index)["weight_map"].values()
            return sorted({folder / name for name in named})
    for pattern in _FORMATS:
        if found := sorted(folder.glob(pattern)):
            return found
    return []


def _fault_of_safetensors(file: Path) -> str:
    """The name and the fault of a file whose size is not what its header says; empty for a complete one."""
    try:
        size = file.stat().st_size
        header_bytes, tensors = _header(file)
        ends = (int(tensor["data_offsets"][1]) for name, tensor in tensors.items() if name != "__metadata__")
        needed = _LENGTH_BYTES + header_bytes + max(ends, default=0)
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return f"{file.name} is truncated or not a safetensors file ({size:,} bytes)"
    return f"{file.name} is truncated ({size:,} of {needed:,} bytes)" if size < needed else ""


def _loaded(file: Path, dtype: str) -> int:
    tensors = _header(file)[1]
    return sum(_bytes(tensor, dtype) for name, tensor in tensors.items() if name != "__metadata__")


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """The header's length, and the tensors that it describes. Raises OSError, ValueError."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{file}: this is no safetensors file")
        return length, json.loads(opened.read(length))


def _bytes(tensor: Mapping[str, Any], dtype: str) -> int:
    if tensor["dtype"] in _FLOATS:
        return int(prod(tensor["shape"])) * _LOADED.get(dtype, 2)
    start, end = tensor["data_offsets"]
    return int(end) - int(start)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
