"""Simulation files: a cluster of accelerators that need not exist. Errors name file and key."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.launcher.cluster_file import CLUSTERS, with_defaults
from services.worker.settings import ChunkSetting
from shared.cost.geometry import RESERVE_BYTES, UTILISATION
from shared.cost.network import LinkEntry, NetworkEntry
from shared.domain.instance import Role
from shared.domain.job import FirstTokenOut, WhenFull, tight_gaps
from shared.domain.kv import SESSION_KEEP_S, SESSION_SHARE, Codec
from shared.errors import InvalidRequest, PolyphaseError
from shared.files.faults import describe, unknown
from shared.files.places import Places
from shared.files.yaml_file import read_document, read_yaml
from shared.sim.spec import FirstToken

Count = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Model = TypeVar("Model", bound=BaseModel)
Id = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class _Part(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="forbid", protected_namespaces=())


class SloEntry(_Part):
    """The SLO class of all requests: targets in seconds, and how they are treated while the cluster is full."""

    ttft_s: Positive = 2.0
    tpot_s: Positive = 0.2
    itl_s: Positive | None = None  # of the gaps between tokens; default: as of an SLO class
    when_full: WhenFull = WhenFull.NEVER
    queue_s: Positive = 600.0
    lossy_kv: Codec = Codec.RAW
    first_token: FirstTokenOut = FirstTokenOut.EARLY
    mixed_precision: bool = True

    @model_validator(mode="after")
    def _gaps_at_least_mean(self) -> Self:
        if self.itl_s is not None and (wrong := tight_gaps(self.itl_s, self.tpot_s)):
            raise ValueError(wrong)
        return self


class PredictionEntry(_Part):
    """The length predictor, see `shared.sim.prediction.Prediction`."""

    width_tokens: Count = 200
    buckets: Count = 10
    accuracy: Share = 1.0
    confusion: tuple[tuple[float, ...], ...] | None = None
    prior: tuple[float, ...] | None = None
    answer_s: Seconds = 0.0
    wait_s: Seconds = 0.005


class PredictionFile(_Part):
    """The output of `polyphase predictor evaluate --out`."""

    prediction: PredictionEntry


class FlipEntry(_Part):
    """An instance is drained and changes its role."""

    instance: str
    at_s: Seconds


class LossEntry(FlipEntry):
    """An instance is lost, and may come back without KV."""

    back_s: Seconds | None = None


class RunEntry(_Part):
    """The cluster apart from its engines, see `shared.sim.spec.RunSpec`. Times in seconds."""

    broadcast_s: Positive = 0.1
    fresh_prefixes: bool = False
    gateway_s: Seconds = 0.0
    hop_s: Seconds = 0.0
    token_s: Seconds = 0.0
    flip_s: Seconds = 0.006
    role_flip_every_s: Positive = 1.0
    role_flip_respects_s: Seconds = 600.0
    patience_s: Annotated[float, Field(ge=0)] = float("inf")
    moves: Annotated[int, Field(ge=0)] = 2
    migration: bool = True
    sessions: bool = True
    job_timeout_s: Annotated[float, Field(gt=0)] = float("inf")
    max_queued_jobs: Count | None = None
    max_queued_tokens: Count | None = None
    drain_timeout_s: Annotated[float, Field(gt=0)] = float("inf")
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    codec: Codec = Codec.RAW
    first_token: FirstToken = FirstToken.PREFILL
    streaming: bool = True


class InstanceEntry(_Part):
    """One instance, or `count` equal ones, named id-0, id-1, …

    kv_cache_bytes: KV over all its accelerators; by default the memory beside the weights. staging_bytes: host memory
    for KV of prompts that is not sent yet, over all its accelerators; by default unlimited; `auto`: a worker's default.
    host_kv_bytes: host memory for KV that left the prefix cache, over all its accelerators.
    price_usd_hour: of one accelerator. link: a name of `links`, or a link; by default `links.default`, else the
    catalogue's network for each of its accelerators. node: its place in the file's `network`, which then applies.
    pipeline_layers: of each stage, by default as vLLM divides them; stage_accelerators: of each stage, where they
    differ; hop: the link from a stage to the next. chunk_size: tokens of a step; `auto`: as many as saturate a step, at
    most `max_chunk_size`. step_s, prefill_s_per_token: fixed times instead of the cost model's. slowdown: factor on the
    times of its steps and its link.
    """

    id: Id | None = None
    accelerator: str
    role: Role
    count: Annotated[int, Field(gt=0, le=10_000)] = 1
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    pipeline_layers: tuple[Count, ...] = ()
    stage_accelerators: tuple[str, ...] = ()
    hop: LinkEntry | None = None
    node: str = ""
    dtype: str | None = None
    kv_dtype: str | None = None
    kv_cache_bytes: Count | None = None
    memory_utilisation: Annotated[float, Field(gt=0, le=1)] = UTILISATION
    reserve_bytes: Seconds = RESERVE_BYTES
    chunk_size: ChunkSetting = 2048
    max_chunk_size: Count = 2048
    max_seqs: Count = 256
    block_size: Count = 16
    max_model_len: Count | None = None
    prefill_first: bool = False
    reserves_output: bool = False
    prefix_cache: bool = False
    host_kv_bytes: Annotated[int, Field(ge=0)] = 0
    session_keep_s: Seconds = SESSION_KEEP_S
    session_share: Annotated[float, Field(ge=0, le=0.9)] = SESSION_SHARE
    staging_bytes: Count | Literal["auto"] | None = None
    max_prefills: Count | None = None
    price_usd_hour: Seconds | None = None
    weight: Positive = 1.0
    link: str | LinkEntry | None = None
    step_s: Positive | None = None
    prefill_s_per_token: Seconds = 0.0
    slowdown: Positive = 1.0

    @model_validator(mode="after")
    def _stages(self) -> Self:
        for key in ("pipeline_layers", "stage_accelerators"):
            if (count := len(getattr(self, key))) not in (0, self.pipeline_parallel):
                raise ValueError(f"{key}: {count} for {self.pipeline_parallel} stages (pipeline_parallel)")
        return self

    @model_validator(mode="after")
    def _keeps_what_it_caches(self) -> Self:
        if self.host_kv_bytes and not self.prefix_cache:
            raise ValueError(
                "host_kv_bytes: the instance has no prefix cache (prefix_cache), whose KV would stay there"
            )
        return self

    @property
    def name(self) -> str:
        """Its id, or role and accelerator."""
        kind = "".join(letter if letter.isalnum() else "-" for letter in self.accelerator.lower()).strip("-")
        return self.id or f"{self.role.value}-{kind}"

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the entry's instances."""
        return (self.name,) if self.count == 1 else tuple(f"{self.name}-{at}" for at in range(self.count))


class SimFile(_Part):
    """A file. calibration: efficiencies; accelerators: catalogue entries; both paths are relative to the file."""

    name: str = ""
    model: str  # a bundled name, or a config.json or its folder
    max_model_len: Count | None = None  # default: the model's own
    calibration: Path | None = None
    accelerators: Path | None = None
    instance_defaults: dict[str, object] = {}
    instances: tuple[InstanceEntry, ...] = Field(min_length=1)
    links: dict[str, LinkEntry] = {}
    network: NetworkEntry | None = None
    policies: dict[str, object] = {}  # as `shared.policy.registry.from_file` reads it
    prediction: PredictionEntry | None = None
    slo: SloEntry = SloEntry()
    losses: tuple[LossEntry, ...] = ()
    flips: tuple[FlipEntry, ...] = ()
    run: RunEntry = RunEntry()

    @model_validator(mode="before")
    @classmethod
    def _apply_defaults(cls, data: Any) -> Any:
        return with_defaults(data)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        seen: set[str] = set()
        for name in (name for entry in self.instances for name in entry.ids):
            if name in seen:
                raise ValueError(f"instances: {name!r} is used twice; give each entry an `id`")
            seen.add(name)
        for index, entry in enumerate(self.instances):
            if isinstance(entry.link, str) and entry.link not in self.links:
                raise ValueError(f"instances.{index}.link: {unknown('link', entry.link, self.links)}")
            if entry.node and self.network is None:
                raise ValueError(f"instances.{index}.node: the file has no `network`")
        for key in ("losses", "flips"):
            for index, event in enumerate(getattr(self, key)):
                if event.instance not in seen:
                    raise ValueError(f"{key}.{index}.instance: {unknown('instance', event.instance, seen)}")
        return self


def find_file(file: Path) -> Path:
    """The file, or the shipped file of that bare name."""
    shipped = CLUSTERS / f"{file}.yaml"
    return shipped if not file.exists() and shipped.exists() else file


def is_sim_file(file: Path) -> bool:
    """Whether it is a simulation file and no cluster file: without sections of services and without engines."""
    data = read_yaml(file)
    if set(data) & {"gateway", "scheduler", "monitor", "predictor", "dashboard", "served_model_name", "hosts", "ports"}:
        return False
    entries = data.get("instances")
    rows = [data.get("instance_defaults"), *(entries if isinstance(entries, list) else ())]
    keys = {str(key) for row in rows if isinstance(row, dict) for key in row}
    return "engine" not in keys and ("accelerator" in keys or not {"name", "model"} <= set(data))


@contextmanager
def at_key(places: Places, key: str) -> Iterator[None]:
    """Errors of the block name the file, the line and the key; an empty key is that with which the message begins."""
    try:
        yield
    except PolyphaseError as error:
        message = places.tell(key, error.message) if key else places.tell_of_text(error.message)
        raise type(error)(message) from error


def _read(file: Path, kind: type[Model]) -> Model:
    document = read_document(file)
    try:
        return kind.model_validate(document.mapping())
    except ValidationError as error:
        raise InvalidRequest(describe(document.places, error, kind=kind)) from error


def load_prediction(file: Path) -> PredictionEntry:
    """Read the `prediction.yaml` of an evaluation. Raises InvalidRequest."""
    return _read(file, PredictionFile).prediction


def load_sim_file(file: Path) -> SimFile:
    """Read a simulation file, whose paths are relative to its folder. Raises InvalidRequest."""
    read = _read(file, SimFile)
    beside: dict[str, object] = {
        key: file.parent / path for key in ("calibration", "accelerators") if (path := getattr(read, key)) is not None
    }
    if (model := file.parent / read.model).exists():
        beside["model"] = str(model)
    return read.model_copy(update=beside)
