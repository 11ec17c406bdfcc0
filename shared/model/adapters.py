"""LoRA adapters: the section `lora` of the cluster file, and what an adapter's folder says of it.

A folder has the format of PEFT: adapter_config.json, and the weights in adapter_model.safetensors or adapter_model.bin.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from shared.domain.adapters import DIGEST_CHARS, is_version
from shared.errors import InvalidRequest
from shared.files.text import read_json

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM 0.32 accepts as `max_lora_rank`
CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_READ_BYTES = 1 << 20
# With loading at run time, unless the file says otherwise.
_RUNTIME_RANK = 16
_RUNTIME_TOGETHER = 4
_RUNTIME_ROOM = 64

AdapterName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w./:@+-]+$")]


class LoraSection(BaseModel):
    """The adapters that all instances serve, each as a model of that name. Folders are paths on the instances' hosts.

    allow_runtime_updating: operators may load and unload other adapters while the cluster serves. max_adapters: that an
    instance holds in host memory, those of `adapters` included; only with `allow_runtime_updating`. max_loras: adapters
    whose requests share a step; None: all of `adapters`, and at least 4 with `allow_runtime_updating`. max_rank: the
    rank for which the engine makes room; None: the largest among `adapters`, rounded up to one that vLLM has, and at
    least 16 with `allow_runtime_updating`.
    """

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="forbid")

    adapters: dict[AdapterName, Annotated[str, Field(min_length=1)]] = {}
    allow_runtime_updating: bool = False
    max_adapters: int | None = Field(None, gt=0)
    max_loras: int | None = Field(None, gt=0)
    max_rank: int | None = Field(None, gt=0)

    def faults(self, served: str) -> Iterator[tuple[str, str]]:
        """Key and text of each mistake; `served`: the name of the base model."""
        if not self.enabled and (self.max_loras is not None or self.max_rank is not None):
            yield "adapters", "there is no adapter: name one, set allow_runtime_updating, or leave `lora` out"
        if served in self.adapters:
            yield f"adapters.{served}", "the base model has this name: choose another"
        for name in filter(is_version, self.adapters):
            yield f"adapters.{name}", f"a name must not end in @ and {DIGEST_CHARS} hexadecimal digits"
        if self.max_rank is not None and self.max_rank not in RANKS:
            yield "max_rank", f"must be one of {', '.join(map(str, RANKS))}, got {self.max_rank}"
        if self.max_adapters is None:
            return
        if not self.allow_runtime_updating:
            yield "max_adapters", "only with allow_runtime_updating: otherwise instances hold those of `adapters`"
        least = max(len(self.adapters), self.max_loras or 0)
        if self.max_adapters < least:
            yield "max_adapters", f"must be at least {least}, for `adapters` and max_loras, got {self.max_adapters}"

    @property
    def enabled(self) -> bool:
        """Whether engines are started with LoRA."""
        return bool(self.adapters) or self.allow_runtime_updating

    @property
    def room(self) -> int:
        """Adapters that an instance holds in host memory."""
        if not self.allow_runtime_updating:
            return len(self.adapters)
        return self.max_adapters or max(_RUNTIME_ROOM, len(self.adapters), self.max_loras or 0)

    @property
    def together(self) -> int:
        """Adapters whose requests share a step."""
        least = _RUNTIME_TOGETHER if self.allow_runtime_updating else 0
        return min(self.max_loras or max(least, len(self.adapters)), self.room)

    def rank(self) -> int:
        """The rank that the engine makes room for. Raises InvalidRequest as `rank_of` does."""
        if self.max_rank is not None:
            return self.max_rank
        ranks = [rank_of(name, Path(folder)) for name, folder in self.adapters.items()]
        largest = max(ranks, default=RANKS[0])
        if self.allow_runtime_updating:
            largest = max(largest, _RUNTIME_RANK)
        return next((rank for rank in RANKS if rank >= largest), largest)

    def digests(self) -> dict[str, str]:
        """By name, the digest of each adapter. Raises InvalidRequest as `digest_of` does."""
        return {name: digest_of(name, Path(folder)) for name, folder in self.adapters.items()}


def require_files(name: str, folder: Path) -> None:
    """Raises InvalidRequest where the folder has no configuration with a rank, or no weights."""
    rank_of(name, folder)
    _file(name, folder, *_WEIGHTS)


def rank_of(name: str, folder: Path) -> int:
    """Raises InvalidRequest where the folder has no configuration with a rank."""
    rank = read_json(_file(name, folder, CONFIG)).get("r")
    if not isinstance(rank, int) or rank < 1:
        raise InvalidRequest(f"adapter {name}: {folder / CONFIG}: `r` must be a rank of 1 or more, got {rank!r}")
    return rank


def digest_of(name: str, folder: Path) -> str:
    """Of the adapter's configuration and weights, whatever their path. Raises InvalidRequest for a missing file."""
    digest = hashlib.sha256()
    for file in (_file(name, folder, CONFIG), _file(name, folder, *_WEIGHTS)):
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
        with file.open("rb") as data:
            while part := data.read(_READ_BYTES):
                digest.update(part)
    return digest.hexdigest()[:DIGEST_CHARS]


def _file(name: str, folder: Path, *names: str) -> Path:
    found = next((folder / each for each in names if (folder / each).is_file()), None)
    if found is None:
        wanted = " or ".join(names)
        raise InvalidRequest(f"adapter {name}: {folder} has no {wanted}: give a folder in the format of PEFT")
    return found
