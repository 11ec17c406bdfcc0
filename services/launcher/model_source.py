"""Sources of models and cluster files: a folder or a name on the Hugging Face hub; a path or a shipped file.

A model that looks like a path is not looked up on the hub.
"""

from os.path import exists, isdir  # of a name that is too long they are False, where those of `Path` raise
from pathlib import Path

from shared.errors import InvalidRequest
from shared.files.faults import meant
from shared.model.folder import HINT, fault_of_folder
from shared.model.source import HUB_NAME

PROJECT = Path(__file__).parents[2]
_SHIPPED = "models/demo"  # the model of the shipped cluster files, which is in a source checkout only


def resolve_model(model: str, beside: Path | None = None) -> str:
    """The absolute path of `model` if it is, or looks like, a folder here, beside the file or in the project."""
    path = Path(model).expanduser()
    bases = (Path.cwd(), *([beside] if beside else []), PROJECT)
    folders = [base / path for base in bases if isdir(base / path)]
    if folders:
        return str(max(folders, key=lambda folder: (folder / "config.json").is_file()).resolve())
    if model == _SHIPPED:
        return str(PROJECT / path)
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
    """Why a resolved `model` cannot be served, as far as its folder or name shows; empty if there is no reason."""
    folder = Path(model)
    if folder == PROJECT / _SHIPPED and not isdir(folder):
        return (
            f"there is no folder {folder}: the demo model {_SHIPPED} is part of a source checkout, not of an installed "
            "package. Give another model with `--model`: a folder on this machine, or a Hugging Face name, which needs "
            "an internet connection"
        )
    if folder.is_absolute():
        return fault_of_folder(folder, tokenizer=True, weights=weights)
    return "" if HUB_NAME.fullmatch(model) else f"{model!r} is neither a folder nor a Hugging Face name: {HINT}"


def _looks_like_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.endswith("/") or model.count("/") > 1
