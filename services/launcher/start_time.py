"""How long an instance's start may take, by the size of its model."""

from services.launcher.watch import Limits
from services.worker.settings import WorkerSettings
from shared.model.weights import weights_of

READ_BYTES_S = 200e6  # weights from a slow or shared disk
CAPTURE_S = 300.0  # off CPUs: compiling the model, and capturing its graphs
FETCH_S = 1800.0  # in all, where the model's size is not known, since it has to be fetched first


def start_s_of(settings: WorkerSettings) -> float:
    """300 s, and what it takes to read the weights at 200 MB/s, and 300 s for graphs where an engine captures some."""
    if settings.engine == "emulated":
        return Limits().start_s
    weights = weights_of(settings.model)
    if weights is None:
        return FETCH_S
    captures = settings.accelerator != "cpu" and not settings.engine_args.get("enforce_eager")
    return Limits().start_s + weights.stored / READ_BYTES_S + (CAPTURE_S if captures else 0.0)
