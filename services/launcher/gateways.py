"""The gateway's processes: one alone on its port, or several that share it and count together in a table."""

from pathlib import Path
from typing import Any

from gateway.auth import load_keys
from gateway.settings import GatewaySettings
from gateway.table import make_table
from services.launcher import ports
from services.launcher.cluster_sections import GatewaySection
from services.launcher.spec import Plan

TABLE = "gateways.table"  # in the data folder, made anew at each start of the suite
_LEAST_RECORD_BYTES = 1 << 16


def own_ports(section: GatewaySection, base: int) -> tuple[int, ...]:
    """Where each process is reached alone; that of the only one is everybody's."""
    if section.processes == 1:
        return (section.port,)
    return tuple(base + ports.GATEWAYS + index for index in range(section.processes))


def settings_of_process(section: GatewaySection, index: int, base: int, data_dir: Path) -> dict[str, Any]:
    """What the file says of the gateway, and what one of several processes has for itself."""
    if section.processes == 1:
        return section.extra
    several = {
        "gateway_id": section.names[index],
        "processes": section.processes,
        "process": index,
        "own_port": own_ports(section, base)[index],
        "shared_table": str(data_dir.resolve() / TABLE),
    }
    return {**section.extra, **several, **_records(section, index)}


def make_shared_table(plan: Plan) -> None:
    """Before the first of several processes starts. Raises InvalidRequest."""
    for spec in plan.processes:
        settings = spec.settings
        if isinstance(settings, GatewaySettings) and settings.shared_table is not None:
            callers = len(load_keys(settings.api_keys_file)) if settings.api_keys_file else 1
            make_table(settings.shared_table, settings.processes, callers)
            return


def _records(section: GatewaySection, index: int) -> dict[str, Any]:
    """A file for each, since one process alone writes one; together they have no more bytes than one would have."""
    named = section.extra.get("record_lengths")
    if not named:
        return {}
    whole, file = section.extra.get("record_bytes"), Path(named)
    most = whole if isinstance(whole, int) else GatewaySettings.model_fields["record_bytes"].default
    each = max(_LEAST_RECORD_BYTES, most // section.processes)
    return {"record_lengths": str(file.with_name(f"{file.stem}-{index}{file.suffix}")), "record_bytes": each}
