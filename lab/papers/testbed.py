"""What all five papers are simulated with: one library, one set of coefficients, instances made from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from lab.papers.engine_steps import EngineSteps
from shared.cost.catalogue import Accelerator, Catalogue
from shared.cost.efficiency import Efficiencies
from shared.cost.geometry import ModelGeometry, kv_capacity_tokens
from shared.cost.library import Library
from shared.cost.operators import Collective
from shared.cost.step import StepModel
from shared.files.yaml_file import read_yaml

ACCELERATORS = Path(__file__).with_name("accelerators.yaml")
COEFFICIENTS = Path(__file__).with_name("coefficients.yaml")


class Shares(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the papers' engines reach of the compute and of the bandwidth that the shipped constants predict."""

    compute: float = 1.0
    bandwidth: float = 1.0


class EngineCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a step of the papers' engines costs besides its kernels, and each sequence in it."""

    step_s: float
    sequence_s: float


class PcieCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All-reduces over PCIe, and the devices that need them."""

    collective: Collective
    devices: tuple[str, ...]


class Coefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The one set; see `coefficients.yaml`. like: device → whose operators stand in."""

    engine: EngineCost
    default: Shares
    devices: Mapping[str, Shares]
    pcie: PcieCost
    before_ampere: tuple[str, ...]
    like: Mapping[str, str]

    @classmethod
    def from_file(cls, path: Path = COEFFICIENTS) -> "Coefficients":
        """Those that the bench states."""
        return msgspec.convert(read_yaml(path), cls, strict=False)


@dataclass(slots=True)
class Testbed:
    """Step models of the papers' GPUs; each is made once."""

    coefficients: Coefficients = field(default_factory=Coefficients.from_file)
    library: Library = field(default_factory=lambda: Library.built_in(ACCELERATORS))
    _models: dict[tuple[str, str, int], StepModel] = field(default_factory=dict)

    @property
    def catalogue(self) -> Catalogue:
        """The shipped accelerators and the testbeds' own."""
        return self.library.catalogue

    def geometry(self, model: str) -> ModelGeometry:
        """A bundled model."""
        return self.library.geometry(model)

    def model(self, accelerator: str, model: str, tensor_parallel: int = 1) -> StepModel:
        """Step times as the papers' engines have them."""
        return self._model(accelerator, model, self.geometry(model), tensor_parallel)

    def stage(self, accelerator: str, model: str, tensor_parallel: int, layers: int) -> StepModel:
        """Step times of some of a model's layers, the output projection counted with them."""
        part = replace(self.geometry(model), layers=layers)
        return self._model(accelerator, f"{layers} layers of {model}", part, tensor_parallel)

    def kv_tokens(self, accelerator: str, model: str, tensor_parallel: int = 1) -> int:
        """KV capacity of an instance."""
        device = self.catalogue.get(accelerator)
        return kv_capacity_tokens(device, self.geometry(model), tensor_parallel=tensor_parallel)

    def _model(self, accelerator: str, name: str, geometry: ModelGeometry, tensor_parallel: int) -> StepModel:
        device = self.catalogue.get(accelerator)
        key = (device.name, name, tensor_parallel)
        if key not in self._models:
            self._models[key] = EngineSteps(
                self._derated(device),
                geometry,
                tensor_parallel,
                self._efficiencies(device.name),
                shares_heads=device.name not in self.coefficients.before_ampere,
            )
        return self._models[key]

    def _derated(self, device: Accelerator) -> Accelerator:
        shares = self.coefficients.devices.get(device.name, self.coefficients.default)
        return replace(
            device,
            bandwidth_bytes_s=device.bandwidth_bytes_s * shares.bandwidth,
            matrix_flops={precision: rate * shares.compute for precision, rate in device.matrix_flops.items()},
        )

    def _efficiencies(self, name: str) -> Efficiencies:
        known = self.coefficients
        fitted = self.library.efficiencies.for_device(known.like.get(name, name))
        return replace(
            fitted,
            pcie_collective=known.pcie.collective if name in known.pcie.devices else fitted.pcie_collective,
            step_s=known.engine.step_s,
            sequence_s=known.engine.sequence_s,
        )
