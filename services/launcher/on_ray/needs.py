"""What an instance asks of the Ray node that it is to run on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.launcher.cluster_sections import InstanceSection
from services.launcher.devices import VISIBLE
from services.worker.settings import WorkerSettings
from shared.cost.catalogue import Catalogue
from shared.errors import InvalidRequest, PolyphaseError

_ANY = 0.001  # of a node's `accelerator_type:…`: it says what is there, and is never used up
_DEVICE = {"Huawei": "NPU"}  # what Ray calls one accelerator, by vendor; else GPU
# The catalogue's names → what Ray calls the type. It tells only these apart; others need `resources`.
_TYPES = {
    "T4": "T4",
    "V100": "V100",
    "A10G": "A10G",
    "A100": "A100",
    "L4": "L4",
    "L40S": "L40S",
    "H100": "H100",
    "H200": "H200",
    "H20": "H20",
    "B200": "B200",
    "B300": "B300",
    "PRO": "RTX-PRO-6000",
    "MI210": "AMD-Instinct-MI210",
    "MI300X": "AMD-Instinct-MI300X-OAM",
    "MI325X": "AMD-Instinct-MI325X-OAM",
    "910B": "Ascend910B",
    "910B4": "Ascend910B4",
}


@dataclass(frozen=True, slots=True)
class Needs:
    """Ray's resources by name, all on one node."""

    bundle: Mapping[str, float]

    def __str__(self) -> str:
        return ", ".join(f"{name} {amount:g}" for name, amount in self.bundle.items()) or "nothing"


def needs_of(entry: InstanceSection, settings: WorkerSettings, entries: Sequence[InstanceSection]) -> Needs:
    """Of one instance of `entry`, one of the file's `entries`.

    Raises InvalidRequest where Ray could not tell the file's accelerators apart, and where the file chooses devices
    itself.
    """
    at = f"instances.{entry.id}"
    for name in VISIBLE:
        if name in entry.env:
            raise InvalidRequest(f"{at}.env.{name}: Ray chooses the devices: leave it out, or run without --on ray")
    if settings.engine == "emulated":
        return Needs(entry.resources)
    if settings.accelerator == "cpu":
        return Needs({"CPU": float(settings.threads * settings.ranks), **entry.resources})
    device, kind = _device(settings.accelerator)
    bundle = {"CPU": 1.0, device: float(settings.ranks), **entry.resources}
    if not entry.resources and kind:
        bundle[f"accelerator_type:{kind}"] = _ANY
    elif not entry.resources and len(_kinds(entries)) > 1:
        named = settings.accelerator
        raise InvalidRequest(
            f"{at}.resources: Ray does not tell {named} from other accelerators: start its nodes with "
            f"`ray start --resources='{{\"{named}\": 1}}'` and write `resources: {{{named}: 1}}`"
        )
    return Needs(bundle)


def _kinds(entries: Iterable[InstanceSection]) -> set[object]:
    return {entry.extra.get("accelerator", "cpu") for entry in entries if entry.extra.get("engine") != "emulated"}


def _device(accelerator: str) -> tuple[str, str]:
    """What Ray calls a device of that kind, and its type, empty where Ray has none."""
    try:
        vendor = Catalogue.built_in().get(accelerator).vendor
    except PolyphaseError:
        vendor = ""
    head = next((word for word in accelerator.split("-") if word in _TYPES), "")
    return _DEVICE.get(vendor, "GPU"), _TYPES.get(head, "")
