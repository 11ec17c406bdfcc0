"""Whether a folder holds a whole model: the configuration, the tokenizer and the weights; or a quantised checkpoint of
another one.
"""

from os.path import isdir  # of a name that is too long it is False, where `Path.is_dir` raises
from pathlib import Path

from shared.model.support import config_of
from shared.model.weights import embeddings_of, fault_of_weights, is_lfs_pointer

HINT = "give a folder with config.json, tokenizer and weights, or a Hugging Face name"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "*.tiktoken")

# Keys of config.json that quantisation, or another version of transformers, changes.
_APART = frozenset(
    {"quantization_config", "compression_config", "dtype", "torch_dtype", "transformers_version", "use_cache"}
    | {"_name_or_path", "architectures", "auto_map"}
)


def fault_of_folder(folder: Path, *, tokenizer: bool, weights: bool) -> str:
    """What a model's folder lacks, and what to do; empty for a whole one. Weights are not read, only their headers."""
    if not isdir(folder):
        return f"there is no folder {folder}{_neighbours(folder)}: {HINT}"
    if pointers := sorted(each.name for each in folder.glob("*.json") if is_lfs_pointer(each)):
        return f"{folder}: {', '.join(pointers)}: a pointer of Git LFS instead of the file: run `git lfs pull` there"
    if not config_of(folder):
        return f"{folder / 'config.json'} is missing or is not a JSON object: {HINT}"
    if tokenizer and not any(next(folder.glob(pattern), None) for pattern in _TOKENIZERS):
        return f"{folder} has no tokenizer ({', '.join(_TOKENIZERS)}): {HINT}"
    return fault_of_weights(folder) if weights else ""


def fault_of_quantised(weights: Path, base: Path) -> str:
    """Why the checkpoint in `weights` is not a quantisation of the model in `base`; empty if it may be one.

    Their configurations must agree, apart from what quantisation changes, and their token embeddings, which quantisers
    leave as they are. Weights that were trained further with the same embeddings are not recognised.
    """
    ours, theirs = config_of(weights), config_of(base)
    for key in sorted(ours.keys() & theirs.keys() - _APART):
        if ours[key] != theirs[key]:
            return (
                f"{weights} is not a quantised checkpoint of {base}: {key} of config.json is {ours[key]!r}, the "
                f"model's {theirs[key]!r}"
            )
    own, its = embeddings_of(weights), embeddings_of(base)
    if own is None or its is None or own.dtype != its.dtype or own == its:
        return ""
    return f"{weights} is not a quantised checkpoint of {base}: its token embeddings are others"


def _neighbours(folder: Path) -> str:
    if not isdir(folder.parent):
        return ""
    others = sorted(each.name for each in folder.parent.iterdir() if each.is_dir())
    return f" (beside it: {', '.join(others[:8])}{', …' if len(others) > 8 else ''})" if others else ""
