"""What a cluster file does not say, and a Kubernetes cluster wants to know."""

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
    """Where models and what is compiled for them are kept: a claim that all pods share, or one of each worker's own."""

    claim: str = ""  # an existing claim that every pod may mount; empty: each worker gets one
    size: str = "100Gi"
    storage_class: str = ""  # empty: the cluster's default


class Postgres(_Part):
    """A database for trying out: one pod, one volume."""

    enabled: bool = False
    image: str = "postgres:16"
    size: str = "10Gi"
    storage_class: str = ""


class Resources(_Part):
    """Of a container, in Kubernetes' words: `{cpu: "2", memory: 4Gi}`."""

    requests: dict[str, str] = {}
    limits: dict[str, str] = {}


class RenderOptions(_Part):
    """How the manifests are made. Times in seconds."""

    namespace: str = Field("polyphase", pattern=_NAME)
    image: str = "polyphase:cpu"
    images: dict[str, str] = {"NVIDIA": "polyphase:gpu"}  # of instances, by their accelerator's vendor; else `image`
    pull_secrets: tuple[str, ...] = ()
    secret: str = Field("polyphase", pattern=_NAME)  # the Secret that holds keys, tokens and the database's URL
    plain: tuple[str, ...] = ()  # variables of `env` that hold no secret, beside the usual ones
    model: str = ""  # as pods find it, where the file names a folder of this machine
    models: ModelVolume = ModelVolume()
    postgres: Postgres = Postgres()
    # Node labels of an accelerator and the values that will do, beside or in place of ours.
    selectors: dict[str, dict[str, tuple[str, ...]]] = {}
    resources: dict[str, Resources] = {}  # by component (gateway, worker …) or by an instance's id in the file
    shared_memory: str = "8Gi"  # of instances with more than one accelerator: they talk through it
    runtime_class: str = ""  # of pods with accelerators
    worker_start_s: int = Field(1800, gt=0)  # to fetch and load a model
    worker_drain_s: int = Field(120, ge=0)  # what an instance has begun may take so long when its pod ends
    gateway_drain_s: int = Field(60, ge=0)  # the same of a gateway's open answers
    monitors: bool = True  # ServiceMonitors, for Prometheus' operator
    monitor_labels: dict[str, str] = {}  # by which an operator finds ServiceMonitors, such as {release: prometheus}
    monitoring_namespace: str = "monitoring"  # from where metrics may be fetched
    network_policies: bool = True

    @classmethod
    def read(cls, file: Path | None, **given: Any) -> Self:
        """From a YAML file, and over that what was `given`. Raises InvalidRequest that names the file and the key."""
        document = read_document(file) if file is not None else Document({}, Places("options"))
        data = document.mapping()
        images: Any = data.get("images") or {}
        if isinstance(images, dict):  # else it is refused below
            images = {**cls().images, **images, **given.pop("images", {})}
        try:
            return cls.model_validate({**data, **given, "images": images})
        except ValidationError as error:
            raise InvalidRequest(describe(document.places, error, kind=cls)) from error
