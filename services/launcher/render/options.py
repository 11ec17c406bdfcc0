"""Options of `polyphase render kubernetes` that a cluster file does not have."""

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.errors import InvalidRequest
from shared.files.faults import describe
from shared.files.places import Places
from shared.files.yaml_file import Document, read_document

_NAME = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"  # RFC 1123


class _Part(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="forbid")


class ModelVolume(_Part):
    """The volume of models and compiled code: a claim that all pods share, or one for each worker."""

    claim: str = ""  # an existing claim that all pods can mount; empty: each worker gets one
    size: str = "100Gi"
    storage_class: str = ""  # empty: the cluster's default


class Postgres(_Part):
    """A database for trials: one pod, one volume."""

    enabled: bool = False
    image: str = "postgres:16"
    size: str = "10Gi"
    storage_class: str = ""


class Resources(_Part):
    """Resources of a container as in Kubernetes: `{cpu: "2", memory: 4Gi}`."""

    requests: dict[str, str] = {}
    limits: dict[str, str] = {}


class RenderOptions(_Part):
    """Times are in seconds."""

    namespace: str = Field("polyphase", pattern=_NAME)
    image: str = "polyphase:cpu"
    images: dict[str, str] = {"NVIDIA": "polyphase:gpu"}  # of instances, by their accelerator's vendor; else `image`
    pull_secrets: tuple[str, ...] = ()
    secret: str = Field("polyphase", pattern=_NAME)  # the Secret with keys, tokens and the URL of the database
    plain: tuple[str, ...] = ()  # further variables of `env` that are not secret
    model: str = ""  # as pods find it, if the file names a folder of this machine
    models: ModelVolume = ModelVolume()
    postgres: Postgres = Postgres()
    # Node labels of an accelerator and the acceptable values, in addition to or in place of the built-in ones.
    selectors: dict[str, dict[str, tuple[str, ...]]] = {}
    resources: dict[str, Resources] = {}  # by component (gateway, worker …) or by an instance's id in the file
    shared_memory: str = "8Gi"  # of instances with several accelerators, whose ranks communicate through it
    runtime_class: str = ""  # of pods with accelerators
    worker_start_s: int = Field(1800, gt=0)  # to fetch and load a model
    worker_drain_s: int = Field(120, ge=0)  # time limit for running requests of an instance whose pod ends
    gateway_drain_s: int = Field(60, ge=0)  # time limit for open answers of a gateway whose pod ends
    monitors: bool = True  # whether to render a ServiceMonitor for the Prometheus operator
    monitor_labels: dict[str, str] = {}  # by which an operator finds the ServiceMonitor, such as {release: prometheus}
    monitoring_namespace: str = "monitoring"  # from which metrics may be fetched
    network_policies: bool = True

    @classmethod
    def read(cls, file: Path | None, **given: Any) -> Self:
        """Options from a YAML file, overridden by `given`. Raises InvalidRequest that names the file and the key."""
        document = read_document(file) if file is not None else Document({}, Places("options"))
        data = document.mapping()
        images: Any = data.get("images") or {}
        if isinstance(images, dict):  # else it is refused below
            images = {**cls().images, **images, **given.pop("images", {})}
        try:
            return cls.model_validate({**data, **given, "images": images})
        except ValidationError as error:
            raise InvalidRequest(describe(document.places, error, kind=cls)) from error
