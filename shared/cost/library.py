"""The cost model by name: catalogue, bundled models and shipped efficiencies in one place."""

from dataclasses import dataclass
from pathlib import Path

from shared.cost.catalogue import Catalogue
from shared.cost.efficiency import EfficiencyTable
from shared.cost.geometry import ExpertSplit, ModelGeometry
from shared.cost.models import bundled_geometry, geometry_from_file
from shared.cost.step import StepModel


@dataclass(frozen=True, slots=True)
class Library:
    """Everything that a step model is made from. Instances of one kind should share one `StepModel`."""

    catalogue: Catalogue
    efficiencies: EfficiencyTable

    @classmethod
    def built_in(cls, accelerators: Path | None = None, efficiencies: Path | None = None) -> "Library":
        """What ships with the product, with the user's own files on top."""
        catalogue = Catalogue.built_in()
        table = EfficiencyTable.from_file(efficiencies) if efficiencies else EfficiencyTable.from_file()
        return cls(catalogue.with_file(accelerators) if accelerators else catalogue, table)

    def geometry(self, model: str) -> ModelGeometry:
        """A bundled model by name or hub id, or the path of a config.json (or of its folder)."""
        path = Path(model)
        return geometry_from_file(path) if path.exists() else bundled_geometry(model)

    def step_model(
        self,
        accelerator: str,
        model: str,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        dtype: str | None = None,
        experts: ExpertSplit = ExpertSplit(),
    ) -> StepModel:
        """The step model of `model` on accelerators of that name."""
        device = self.catalogue.get(accelerator)
        fitted = self.efficiencies.for_device(device.name)
        geometry = self.geometry(model)
        return StepModel(device, geometry, tensor_parallel, pipeline_parallel, dtype, fitted, experts=experts)
