"""The accelerators that the cost model knows, as data: memory, bandwidth, matrix rates, links, price, source.

`accelerators.yaml` holds those that ship with the product; a user's file of the same form adds others.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from shared.errors import InvalidRequest, NotFound
from shared.files.text import read_text
from shared.files.yaml_file import parse_yaml

BUILT_IN = Path(__file__).with_name("accelerators.yaml")

# Names that engines and papers use for one precision.
_PRECISIONS: Mapping[str, str] = {
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "fp8_block": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8": "fp8",
    "nvfp4": "fp4",
    "mxfp4": "fp4",
    "int8_wo": "int8",
}
_BYTES: Mapping[str, float] = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5, "int4": 0.5}
# The precisions that compute in place of one that the device's matrix unit lacks.
_FALLBACK: Mapping[str, tuple[str, ...]] = {
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "fp8": ("bf16", "fp16", "fp32"),
    "int8": ("bf16", "fp16", "fp32"),
    "fp4": ("fp8", "bf16", "fp16", "fp32"),
    "int4": ("bf16", "fp16", "fp32"),
    "fp32": ("bf16", "fp16"),
}

# The variables that tell a vendor's libraries which of a host's devices a process may use.
VISIBLE_BY: Mapping[str, str] = {
    "NVIDIA": "CUDA_VISIBLE_DEVICES",
    "AMD": "HIP_VISIBLE_DEVICES",
    "Huawei": "ASCEND_RT_VISIBLE_DEVICES",
    "Intel": "ZE_AFFINITY_MASK",
}


def precision_of(dtype: str) -> str:
    """The short name of a precision: `bfloat16` -> `bf16`. Raises InvalidRequest that names the known ones."""
    short = _PRECISIONS.get(dtype, dtype)
    if short not in _BYTES:
        raise InvalidRequest(f"unknown precision {dtype!r}; known: {', '.join(sorted(_BYTES))}")
    return short


def bytes_of(dtype: str) -> float:
    return _BYTES[precision_of(dtype)]


def kv_precision(weights: str, kv_dtype: str | None) -> str:
    """The short name of the KV's precision, by default that of the weights, or bf16 where these are quantised."""
    return precision_of(kv_dtype or ("bf16" if bytes_of(weights) < 2 else weights))


@dataclass(frozen=True, slots=True)
class Links:
    """Bandwidth of one accelerator's links, bytes/s in one direction."""

    scale_up: float
    pcie: float
    network: float


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator. Rates are dense peaks from its source; for what is reached of them see `efficiency`."""

    name: str
    vendor: str
    memory_bytes: float
    bandwidth_bytes_s: float
    compute_units: int
    matrix_flops: Mapping[str, float]  # operations/s by precision
    mode: str  # what `matrix_flops` counts
    links: Links
    price_usd_hour: float
    source: str
    price_source: str = ""
    aliases: tuple[str, ...] = ()
    cache_bytes: float = 0.0  # of the last cache before the memory; 0: not known, counted as none
    unit_memory_bytes: float = 0.0  # shared memory of one compute unit; 0: not known, counted as one tile's
    visible_by: str = ""  # the variable that restricts a process to some of a host's devices; empty: there is none

    def flops(self, dtype: str) -> float:
        """Dense peak, operations/s, of the precision or of the one that computes in its place (weight-only)."""
        precision = precision_of(dtype)
        for candidate in (precision, *_FALLBACK[precision]):
            if candidate in self.matrix_flops:
                return self.matrix_flops[candidate]
        raise InvalidRequest(f"accelerator {self.name!r} has no matrix rate for {dtype!r}")


_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class _LinksEntry(msgspec.Struct, forbid_unknown_fields=True):
    scale_up: float
    pcie: float
    network: float


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One entry of an accelerator file, in its units."""

    vendor: str
    memory_gib: _Positive
    bandwidth_gb_s: _Positive
    compute_units: Annotated[int, msgspec.Meta(gt=0)]
    matrix_tflops: Annotated[dict[str, _Positive], msgspec.Meta(min_length=1)]
    mode: str
    links: _LinksEntry
    price_usd_hour: float
    source: str
    price_source: str = ""
    aliases: list[str] = []
    cache_mib: _NotNegative = 0.0
    unit_memory_kib: _NotNegative = 0.0
    visible_by: str | None = None


class Catalogue:
    """Accelerators by name; names match without regard to case, spaces, dashes and underscores."""

    def __init__(self, accelerators: Iterable[Accelerator]) -> None:
        self._by_name = {accelerator.name: accelerator for accelerator in accelerators}
        self._index: dict[str, str] = {}
        for accelerator in self._by_name.values():
            for name in (accelerator.name, *accelerator.aliases):
                self._index[loose_key(name)] = accelerator.name

    @classmethod
    def built_in(cls) -> "Catalogue":
        return cls(parse_accelerators(BUILT_IN.read_text(encoding="utf-8"), str(BUILT_IN.name)))

    def with_file(self, path: Path) -> "Catalogue":
        """This catalogue and a user's file, whose entries replace ours of the same name."""
        return Catalogue((*self.all(), *parse_accelerators(read_text(path), str(path))))

    def get(self, name: str) -> Accelerator:
        """The accelerator of that name or alias. Raises NotFound that suggests similar names."""
        found = name if name in self._by_name else self._index.get(loose_key(name))
        if found is not None:
            return self._by_name[found]
        near = difflib.get_close_matches(loose_key(name), list(self._index), n=4, cutoff=0.5)
        close = dict.fromkeys(self._index[key] for key in near)
        hint = f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(self._by_name)}."
        raise NotFound(f"unknown accelerator {name!r}; {hint} Add your own in a YAML file of the catalogue's form.")

    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def all(self) -> tuple[Accelerator, ...]:
        return tuple(self._by_name.values())


def parse_accelerators(text: str, where: str) -> tuple[Accelerator, ...]:
    """Accelerators of one YAML text; an error names `where`, the entry and the key."""
    return tuple(_accelerator(name, entry, where) for name, entry in parse_yaml(text, where).items())


def _accelerator(name: str, raw: object, where: str) -> Accelerator:
    try:
        entry = msgspec.convert(raw, _Entry, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where}: accelerator {name!r}: {error}") from error
    try:
        rates = {precision_of(precision): rate * 1e12 for precision, rate in entry.matrix_tflops.items()}
    except InvalidRequest as error:
        raise InvalidRequest(f"{where}: accelerator {name!r}: matrix_tflops: {error.message}") from error
    return Accelerator(
        name=name,
        vendor=entry.vendor,
        memory_bytes=entry.memory_gib * 2.0**30,
        bandwidth_bytes_s=entry.bandwidth_gb_s * 1e9,
        compute_units=entry.compute_units,
        matrix_flops=rates,
        mode=entry.mode,
        links=Links(entry.links.scale_up * 1e9, entry.links.pcie * 1e9, entry.links.network * 1e9),
        price_usd_hour=entry.price_usd_hour,
        source=entry.source,
        price_source=entry.price_source,
        aliases=tuple(entry.aliases),
        cache_bytes=entry.cache_mib * 2.0**20,
        unit_memory_bytes=entry.unit_memory_kib * 2.0**10,
        visible_by=VISIBLE_BY.get(entry.vendor, "") if entry.visible_by is None else entry.visible_by,
    )


def loose_key(name: str) -> str:
    """What names that match have in common: letters and digits, in lower case."""
    return "".join(character for character in name.lower() if character.isalnum())
