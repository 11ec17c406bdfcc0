"""How Kubernetes calls an accelerator: the resource that a device plugin counts, the labels of nodes that have it."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.launcher.render.options import RenderOptions
from services.worker.settings import WorkerSettings
from shared.cost.catalogue import Catalogue
from shared.errors import InvalidRequest, PolyphaseError

_RESOURCES = {
    "NVIDIA": "nvidia.com/gpu",
    "AMD": "amd.com/gpu",
    "Huawei": "huawei.com/Ascend910",
    "Google": "google.com/tpu",
    "AWS": "aws.amazon.com/neuron",
    "Intel": "habana.ai/gaudi",
}
_CPUS = frozenset({"cpu", "Xeon-8480", "EPYC-9654"})
_NVIDIA = "nvidia.com/gpu.product"  # as NVIDIA's feature discovery writes it
_PRODUCTS = {
    "P40": "Tesla-P40",
    "RTX-2080-Ti": "NVIDIA-GeForce-RTX-2080-Ti",
    "RTX-3080": "NVIDIA-GeForce-RTX-3080",
    "RTX-3090": "NVIDIA-GeForce-RTX-3090",
    "RTX-4080": "NVIDIA-GeForce-RTX-4080",
    "RTX-5080": "NVIDIA-GeForce-RTX-5080",
    "RTX-6000-Ada": "NVIDIA-RTX-6000-Ada-Generation",
    "L20": "NVIDIA-L20",
    "L40": "NVIDIA-L40",
    "A800-PCIe-80": "NVIDIA-A800-80GB-PCIe",
    "A800-SXM-80": "NVIDIA-A800-SXM4-80GB",
    "H800-SXM": "NVIDIA-H800",
    "GH200-96": "NVIDIA-GH200-480GB",
    "GH200-144": "NVIDIA-GH200-144G-HBM3e",
    "GB200": "NVIDIA-GB200",
    "T4": "Tesla-T4",
    "V100-PCIe-16": "Tesla-V100-PCIE-16GB",
    "V100-SXM2-16": "Tesla-V100-SXM2-16GB",
    "V100-SXM2-32": "Tesla-V100-SXM2-32GB",
    "A10": "NVIDIA-A10",
    "A10G": "NVIDIA-A10G",
    "A30": "NVIDIA-A30",
    "A40": "NVIDIA-A40",
    "A100-PCIe-40": "NVIDIA-A100-PCIE-40GB",
    "A100-PCIe-80": "NVIDIA-A100-80GB-PCIe",
    "A100-SXM-40": "NVIDIA-A100-SXM4-40GB",
    "A100-SXM-80": "NVIDIA-A100-SXM4-80GB",
    "RTX-A5000": "NVIDIA-RTX-A5000",
    "RTX-A6000": "NVIDIA-RTX-A6000",
    "RTX-3090-Ti": "NVIDIA-GeForce-RTX-3090-Ti",
    "RTX-4090": "NVIDIA-GeForce-RTX-4090",
    "RTX-5090": "NVIDIA-GeForce-RTX-5090",
    "L4": "NVIDIA-L4",
    "L40S": "NVIDIA-L40S",
    "RTX-PRO-6000-Server": "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
    "H100-PCIe": "NVIDIA-H100-PCIe",
    "H100-NVL": "NVIDIA-H100-NVL",
    "H100-SXM": "NVIDIA-H100-80GB-HBM3",
    "H20": "NVIDIA-H20",
    "H200-SXM": "NVIDIA-H200",
    "B200-SXM": "NVIDIA-B200",
    "B300-SXM": "NVIDIA-B300-SXM6-AC",
}
_LABELS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    **{name: {_NVIDIA: (product,)} for name, product in _PRODUCTS.items()},
    "MI210": {"amd.com/gpu.product-name": ("AMD_Instinct_MI210",)},
    "MI250": {"amd.com/gpu.product-name": ("AMD_Instinct_MI250", "AMD_Instinct_MI250X")},
    "MI300X": {"amd.com/gpu.product-name": ("AMD_Instinct_MI300X", "AMD_Instinct_MI300X_OAM")},
    "MI325X": {"amd.com/gpu.product-name": ("AMD_Instinct_MI325X", "AMD_Instinct_MI325_OAM")},
    "MI300A": {"amd.com/gpu.product-name": ("AMD_Instinct_MI300A",)},
    "MI350X": {"amd.com/gpu.product-name": ("AMD_Instinct_MI350X",)},
    "MI355X": {"amd.com/gpu.product-name": ("AMD_Instinct_MI355X",)},
    "Ascend-910B": {"accelerator": ("huawei-Ascend910",)},
    "Ascend-910B4": {"accelerator": ("huawei-Ascend910",)},
    "TPU-v5e": {"cloud.google.com/gke-tpu-accelerator": ("tpu-v5-lite-podslice",)},
}


@dataclass(frozen=True, slots=True)
class Devices:
    """What a pod of an instance asks its node for."""

    vendor: str
    resource: str
    count: int
    labels: Mapping[str, tuple[str, ...]]  # of the node: a value of each will do


def devices_of(settings: WorkerSettings, options: RenderOptions, at: str) -> Devices | None:
    """Nothing for emulated engines and those on CPUs. Raises InvalidRequest that names the key below `at`."""
    names = {settings.accelerator, *settings.stage_accelerators}
    if settings.engine == "emulated" or names <= _CPUS:
        return None
    if len(names) > 1:
        kinds = ", ".join(sorted(names))
        raise InvalidRequest(f"{at}.stage_accelerators: a pod is on one node, which has not all of {kinds}")
    try:
        known = Catalogue.built_in().get(settings.accelerator)
    except PolyphaseError as error:
        raise InvalidRequest(f"{at}.accelerator: {error.message}") from error
    labels = options.selectors.get(settings.accelerator, _LABELS.get(known.name, {}))
    return Devices(known.vendor, _RESOURCES[known.vendor], settings.ranks, labels)
