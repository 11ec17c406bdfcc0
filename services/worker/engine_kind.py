"""The engine that a worker's settings describe, as the cost model has it."""

from services.worker.settings import WorkerSettings
from shared.cost.kinds import EngineKind, Stage, Workshop, even_layers


def kind_of(settings: WorkerSettings, shop: Workshop) -> EngineKind:
    """Its stages on their accelerators. Raises NotFound for one that nobody knows."""
    stages = settings.pipeline_parallel
    names = settings.stage_accelerators or (settings.accelerator,) * stages
    layers = settings.pipeline_layers or even_layers(shop.geometry.layers, stages)
    made = tuple(Stage(shop.device(name).name, count) for name, count in zip(names, layers, strict=True))
    hop = settings.emulated_hop.link if settings.emulated_hop is not None else None
    return EngineKind(made, settings.tensor_parallel, settings.dtype, hop=hop)
