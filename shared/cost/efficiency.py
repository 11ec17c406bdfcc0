"""Fitted constants of each operator, by device: read from YAML, with defaults where a device has no table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shared.cost.catalogue import Links, precision_of
from shared.cost.operators import Collective, DecodeAttention, Elementwise, ExpertMlp, Gemm, VarlenAttention
from shared.errors import InvalidRequest
from shared.files.yaml_file import read_yaml

T = TypeVar("T")
BY_PRECISION = ("gemm", "experts", "decode", "varlen")  # operators with constants for each precision
SHIPPED = Path(__file__).with_name("efficiencies.yaml")
# The precisions whose constants stand in for one that was not fitted.
_STAND_IN: Mapping[str, tuple[str, ...]] = {
    "fp16": ("bf16",),
    "fp32": ("bf16",),
    "fp8": ("int8", "bf16"),
    "int8": ("fp8", "bf16"),
    "fp4": ("fp8", "bf16"),
    "int4": ("bf16",),
}


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """Fitted constants of one device. Mappings go from a precision, of weights or of KV, to constants."""

    gemm: Mapping[str, Gemm]
    decode: Mapping[str, DecodeAttention]
    varlen: Mapping[str, VarlenAttention]
    elementwise: Elementwise
    collective: Collective  # over a scale-up link (NVLink)
    pcie_collective: Collective  # over PCIe, through the host's memory
    step_s: float = 0.0  # what a step costs besides its kernels: scheduling, launches, sampling
    sequence_s: float = 0.0  # the same for each sequence
    sources: tuple[str, ...] = ()  # tables that the constants come from; empty for stand-ins
    experts: Mapping[str, Gemm] = field(default_factory=dict)  # grouped products; empty: as plain products

    def gemm_for(self, precision: str) -> Gemm:
        """Constants of a matrix product with weights of that precision, as a checkpoint names it (`fp8_block`)."""
        return _pick(self.gemm, precision)

    def experts_for(self, precision: str) -> ExpertMlp:
        """Constants of a mixture's experts with weights of that precision."""
        return ExpertMlp(_pick(self.experts or self.gemm, precision), self.elementwise)

    def decode_for(self, precision: str) -> DecodeAttention:
        """Constants of decode attention over KV of that precision."""
        return _pick(self.decode, precision)

    def collective_over(self, links: Links) -> Collective:
        """Constants of the link that joins accelerators: PCIe where no link is faster."""
        return self.collective if links.scale_up > links.pcie else self.pcie_collective

    def varlen_for(self, precision: str) -> VarlenAttention:
        """Constants of prefill and mixed attention over KV of that precision."""
        return _pick(self.varlen, precision)


class _Table(msgspec.Struct):
    """A file of efficiencies, before the constants of a device are merged."""

    date: Any = ""
    default: dict[str, Any] | None = None
    devices: dict[str, dict[str, Any]] | None = None
    like: dict[str, str] | None = None


class EfficiencyTable:
    """Efficiencies of all devices. An operator that a device lacks comes from a similar device, else from the default.

    Raises InvalidRequest that names `where` the table comes from and the key.
    """

    def __init__(self, raw: Mapping[str, Any], where: str = "efficiencies") -> None:
        try:
            table = msgspec.convert(raw, _Table)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{where}: {error}") from error
        self.date = str(table.date)
        self._where = where
        self._default = table.default or {}
        self._devices = table.devices or {}
        self._like = table.like or {}

    @classmethod
    def from_file(cls, path: Path = SHIPPED) -> "EfficiencyTable":
        """The table in a YAML file; by default the one that ships with the product."""
        return cls(read_yaml(path), str(path))

    def fitted(self) -> tuple[str, ...]:
        """Names of the devices that have constants of their own."""
        return tuple(self._devices)

    def for_device(self, name: str) -> Efficiencies:
        """Constants of the accelerator of that catalogue name."""
        merged: dict[str, Any] = {}
        for layer in (self._default, *self._chain(name)):
            for key, value in layer.items():
                nested = isinstance(value, Mapping) and key in BY_PRECISION
                known = merged.get(key)
                merged[key] = {**(known if isinstance(known, Mapping) else {}), **value} if nested else value
        if name not in self._devices:
            merged["sources"] = ()
        try:
            found = msgspec.convert(merged, Efficiencies, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{self._where}: device {name!r}: {error}") from error
        for key in ("gemm", "decode", "varlen"):
            if not getattr(found, key):
                raise InvalidRequest(f"{self._where}: device {name!r}: {key} has no constants for any precision")
        return found

    def _chain(self, name: str) -> list[Mapping[str, Any]]:
        """Constants of the device and of the devices that it is like, the most general first."""
        layers: list[Mapping[str, Any]] = []
        seen: set[str] = set()
        while name and name not in seen:
            seen.add(name)
            layers.insert(0, self._devices.get(name, {}))
            name = self._like.get(name, "")
        return layers


def _pick(by_precision: Mapping[str, T], precision: str) -> T:
    short = precision_of(precision)
    for candidate in (precision, short, *_STAND_IN.get(short, ())):
        if candidate in by_precision:
            return by_precision[candidate]
    return next(iter(by_precision.values()))
