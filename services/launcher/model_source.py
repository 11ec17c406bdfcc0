"""Sources of models and cluster files: a folder or a name on the Hugging Face hub; a path or a shipped file.

A model that looks like a path is not looked up on the hub.
"""

import os
import re
from os.path import exists, isdir  # of a name that is too long they are False, where those of `Path` raise
from pathlib import Path

from shared.errors import InvalidRequest
from shared.files.faults import meant
from shared.files.text import read_json
from shared.model.support import config_of

PROJECT = Path(__file__).parents[2]
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_HINT = "give a folder with config.json, tokenizer and weights, or a Hugging Face name"


def resolve_model(model: str, beside: Path | None = None) -> str:
    """The absolute path of `model` if it is, or looks like, a folder here, beside the file or in the project."""
    path = Path(model).expanduser()
    bases = (Path.cwd(), *([beside] if beside else []), PROJECT)
    folders = [base / path for base in bases if isdir(base / path)]
    if folders:
        return str(max(folders, key=lambda folder: (folder / "config.json").is_file()).resolve())
    if _looks_like_path(model):
        return str(path.absolute())
    nested = [base / path for base in bases if "/" in model and isdir(base / path.parts[0])]
    return str(nested[0].absolute()) if nested else model


def resolve_path(path: Path, beside: Path) -> Path:
    """The absolute path of a file here, beside the cluster file or in the project; if none exists, the first one."""
    path = path.expanduser()
    return next((base / path for base in (Path.cwd(), beside, PROJECT) if exists(base / path)), path.absolute())


def shipped_or_own(file: Path, folder: Path) -> Path:
    """An existing cluster file, or the shipped one of that name in the folder. Raises InvalidRequest."""
    if exists(file):
        return file
    shipped = {each.stem: each for each in folder.glob("*.yaml")}
    if str(file) not in shipped:
        names = sorted(shipped)
        raise InvalidRequest(
            f"{file}: there is no such file{meant(str(file), names)} Shipped files: {', '.join(names)}"
        )
    return shipped[str(file)]


def fault_of(model: str, *, weights: bool) -> str:
    """Why a resolved `model` cannot be served, as far as this machine knows; empty if there is no reason."""
    if Path(model).is_absolute():
        return _fault_of_folder(Path(model), weights)
    if not _HUB_NAME.fullmatch(model):
        return f"{model!r} is neither a folder nor a Hugging Face name: {_HINT}"
    if not _offline():
        return ""
    from huggingface_hub import constants, try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    if not isinstance(found, str):
        cache = constants.HF_HUB_CACHE
        return f"{model} is not in {cache}, and HF_HUB_OFFLINE is set: unset it, or run `hf download {model}` first"
    return _fault_of_folder(Path(found).parent, weights)


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.endswith("/") or model.count("/") > 1


def _offline() -> bool:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").lower() in ("1", "true", "yes", "on") for name in names)


def _fault_of_folder(folder: Path, weights: bool) -> str:
    if not isdir(folder):
        return f"there is no folder {folder}{_neighbours(folder)}: {_HINT}"
    if not config_of(str(folder)):
        return f"{folder / 'config.json'} is missing or is not a JSON object: {_HINT}"
    if not _any(folder, _TOKENIZERS):
        return f"{folder} has no tokenizer ({', '.join(_TOKENIZERS)}): {_HINT}"
    if not weights:
        return ""
    if not _any(folder, _WEIGHTS):
        return f"{folder} has no weights ({', '.join(_WEIGHTS)}): {_HINT}"
    missing = sorted(name for name in _shards(folder) if not (folder / name).is_file())
    return f"{folder} lacks {', '.join(missing)}, which its index names: download it again" if missing else ""


def _neighbours(folder: Path) -> str:
    if not isdir(folder.parent):
        return ""
    others = sorted(each.name for each in folder.parent.iterdir() if each.is_dir())
    return f" (beside it: {', '.join(others[:8])}{', …' if len(others) > 8 else ''})" if others else ""


def _any(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in patterns)


def _shards(folder: Path) -> set[str]:
    try:
        index = read_json(folder / "model.safetensors.index.json")
        return set(index["weight_map"].values())
    except (InvalidRequest, KeyError, TypeError, AttributeError):
        return set()
