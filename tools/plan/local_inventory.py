"""An inventory of this machine: its accelerators, or its processors where it has none."""

import os
import platform
import shutil
import subprocess
from collections import Counter
from contextlib import suppress

from shared.cost.catalogue import Accelerator, Catalogue
from shared.cost.kinds import HOP_LATENCY_S
from shared.cost.network import INSIDE_EFFICIENCY, Link, Network
from shared.errors import NotFound
from shared.plan.inventory import Inventory, Pool

_QUERY = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
_TIMEOUT_S = 10.0


def inventory_here(catalogue: Catalogue) -> tuple[Inventory, str]:
    """This machine as a node, and a note for the user, which names accelerators that the catalogue lacks."""
    node = platform.node().split(".")[0] or "here"
    counts = Counter(_accelerators())
    found = {name: _known(catalogue, name) for name in counts}
    pools = [Pool(node, device, counts[name], device.price_usd_hour) for name, device in found.items() if device]
    unknown = [name for name, device in found.items() if device is None]
    note = f"not in the catalogue, left out: {', '.join(unknown)}" if unknown else ""
    if not pools:
        device = catalogue.get("Xeon-8480")
        pools.append(Pool(node, device, 1, device.price_usd_hour))
        note = note or f"no accelerator found; {os.cpu_count()} cores are entered as one {device.name}: please correct"
    link = Link(pools[0].accelerator.links.scale_up, HOP_LATENCY_S, INSIDE_EFFICIENCY)
    return Inventory(tuple(pools), Network({node: link})), note


def _accelerators() -> list[str]:
    if shutil.which(_QUERY[0]) is None:
        return []
    try:
        answer = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (subprocess.SubprocessError, OSError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _known(catalogue: Catalogue, name: str) -> Accelerator | None:
    """Look a driver's name up in the catalogue, also without vendor, generation of the socket and unit of memory."""
    words = [word for word in name.replace("-", " ").split() if word.lower() not in ("nvidia", "geforce", "tesla")]
    short = " ".join(words).removesuffix("GB")
    for form in (name, " ".join(words), short, short.replace("SXM4", "SXM").replace("SXM5", "SXM")):
        with suppress(NotFound):
            return catalogue.get(form)
    return None
