"""A cluster file, read as a simulation: the settings of the live services that the simulator knows."""

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gateway.settings import GatewaySettings
from lab.simulate.sim_file import SimFile
from services.global_scheduler.settings import SchedulerSettings
from services.launcher.cluster_file import Cluster, InstanceSection, describe, load_cluster
from services.worker.settings import WorkerSettings
from shared.errors import InvalidRequest

# The worker's settings that are an instance's keys here, under the same name.
_SAME = ("accelerator", "dtype", "tensor_parallel", "chunk_size", "max_seqs", "block_size")


def read_cluster(file: Path) -> SimFile:
    """The instances, policies and SLO of a cluster file. Raises InvalidRequest that names file and key.

    Emulated engines keep room for a request's whole output, and have the model that they imitate. KV is as much as the
    file says, links are `emulated_link_gbps`, else the catalogue's network.
    """
    cluster = load_cluster(file)
    entries = [_Read(file, cluster, entry) for entry in cluster.instances if entry.enabled]
    if not entries:
        raise InvalidRequest(f"{file}: instances: none is enabled")
    models = {read.model for read in entries}
    if len(models) > 1:
        raise InvalidRequest(f"{file}: instances: one model can be simulated, not {', '.join(sorted(models))}")
    gateway = cluster.gateway.extra
    data = {
        "name": cluster.name,
        "model": models.pop(),
        "max_model_len": cluster.max_model_len,
        "instances": [read.entry() for read in entries],
        "policies": _policies(file, cluster, entries),
        "slo": gateway.get("slo", {}).get("default", {}),
        "run": {
            "codec": gateway.get("kv_codec", GatewaySettings.model_fields["kv_codec"].default),
            "patience_s": gateway.get("patience_s", GatewaySettings.model_fields["patience_s"].default),
        },
    }
    try:
        return SimFile.model_validate(data)
    except ValidationError as error:
        raise InvalidRequest(describe(file, error)) from error


class _Read:
    """One entry with the worker's defaults for what it leaves out, checked as the worker would."""

    def __init__(self, file: Path, cluster: Cluster, entry: InstanceSection) -> None:
        self._file = file
        self._section = entry
        self.emulated = self.get("engine") == "emulated"
        self.model = str(self.get("emulated_model")) if self.emulated else cluster.model

    def get(self, key: str) -> Any:
        """A setting of the worker."""
        field = WorkerSettings.model_fields[key]
        if key not in self._section.extra:
            return field.get_default(call_default_factory=True)
        try:
            annotated: Any = TypeAdapter(field.annotation)
            return annotated.validate_python(self._section.extra[key])
        except ValidationError as error:
            raise InvalidRequest(describe(self._file, error, f"instances.{self._section.id}.{key}")) from error

    def entry(self) -> dict[str, Any]:
        """As a simulation file has it."""
        ranks, gbps = self.get("tensor_parallel"), self.get("emulated_link_gbps")
        engine_args = self.get("engine_args")
        prefix_cache = not self.emulated and bool(engine_args.get("enable_prefix_caching", True))
        return {
            "id": self._section.id,
            "role": self._section.role,
            "count": self._section.count,
            **{key: self.get(key) for key in _SAME},
            "kv_cache_bytes": self.get("kv_cache_bytes") * (1 if self.emulated else ranks),  # vLLM's is one rank's
            "pipeline_parallel": engine_args.get("pipeline_parallel_size", 1),
            "reserves_output": self.emulated,
            "prefix_cache": prefix_cache,
            "link": {"gbps": gbps} if gbps else None,
            "step_s": self.get("emulated_step_s") if self.emulated else None,
            "prefill_s_per_token": (self.get("emulated_prefill_s_per_token") or 0.0) if self.emulated else 0.0,
        }


def _policies(file: Path, cluster: Cluster, entries: list[_Read]) -> dict[str, Any]:
    """The scheduler's; order of prefill and dispatch are the prefill instances' own, alike in all."""
    extra = cluster.scheduler.extra
    found: dict[str, Any] = {}
    for kind in ("placement", "split", "dispatch"):
        name = extra.get(kind, SchedulerSettings.model_fields[kind].default)
        found[kind] = {"name": name, **extra.get(f"{kind}_parameters", {})}
    for kind, setting in (("prefill_order", "prefill_order"), ("dispatch", "dispatch")):
        names = {str(read.get(setting)) for read in entries}
        if len(names) > 1:
            raise InvalidRequest(f"{file}: instances: {setting} must be one for all, not {', '.join(sorted(names))}")
        if names != {found.get(kind, {}).get("name")}:
            found[kind] = {"name": names.pop()}
    return found
