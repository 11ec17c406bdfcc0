"""Settings of one worker."""

from os.path import isabs
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from services.worker.engine_args import faults_of
from shared.cost.network import LinkEntry
from shared.domain.instance import Role
from shared.domain.kv import SESSION_KEEP_S, SESSION_SHARE
from shared.model.adapters import LoraSection
from shared.model.source import ModelSource, source_of
from shared.runtime.settings import Name, TracedSettings

DATA_PARALLEL_PORTS = 8
PP_LAYERS = "VLLM_PP_LAYER_PARTITION"  # vLLM's variable

# Of a device, beside its weights and KV: activations, captured graphs, communication, and KV on its way to the host.
MARGIN_BYTES = 1 << 30
DISK_QUEUE_BYTES = 256 << 20  # of each rank's host memory, for KV that is to be written to a disk
_WEIGHTS_CHANGE = ("cpu_offload_gb", "offload_backend", "offload_group_size", "quantization")  # engine_args


def _chunk_size(said: object) -> object:
    if said == "auto":
        return said
    if isinstance(said, bool) or not isinstance(said, int | str) or not str(said).isdecimal() or not int(said):
        raise ValueError(f"expected a number of tokens, 1 or more, or auto; not {said!r}")
    return int(said)


ChunkSetting = Annotated[int | Literal["auto"], PlainValidator(_chunk_size)]


class WorkerSettings(TracedSettings):
    """One instance: what it runs, where it listens, whom it reports to. Prefix `POLYPHASE_WORKER_`."""

    model_config = SettingsConfigDict(
        env_prefix="POLYPHASE_WORKER_", frozen=True, extra="forbid", protected_namespaces=()
    )

    instance_id: Name
    role: Role = Role.PREFILL
    engine: Literal["vllm", "emulated"] = "vllm"
    model: str
    weights: str = ""  # a quantised checkpoint of `model`, loaded in its place; a folder or a Hugging Face name
    trust_remote_code: bool = False  # Python code of the model's repository may run
    accelerator: str = "cpu"

    host: str = "127.0.0.1"
    rpc_port: int
    http_port: int
    kv_port: int  # the first of one port a rank
    advertise_host: str = ""  # what peers connect to, when it is not `host`
    served_model_name: str = ""  # the gateway's, for metrics; empty: `model`

    monitor_url: str
    heartbeat_address: str
    broadcast_address: str

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    block_size: int = Field(32, gt=0)
    chunk_size: ChunkSetting = 512  # tokens of a step; auto: as many as saturate it, by what it learns of its steps
    max_chunk_size: int = Field(2048, gt=0)  # the most that `auto` may come to
    max_model_len: int = Field(2048, gt=0)
    max_seqs: int = Field(64, gt=0)
    kv_cache_bytes: int = Field(256 << 20, gt=0)
    host_kv_bytes: int = Field(0, ge=0)  # of each rank: host memory for KV that left its cache; 0: none is kept
    # Of each rank: room for KV that leaves host memory, in a folder of the instance's name in `disk_kv_folder`.
    disk_kv_bytes: int = Field(0, ge=0)
    disk_kv_folder: str = ""
    tensor_parallel: int = Field(1, gt=0, le=1024)
    pipeline_parallel: int = Field(1, gt=0, le=1024)  # stages, each of `tensor_parallel` ranks
    pipeline_layers: tuple[Annotated[int, Field(gt=0)], ...] = ()  # of each stage, in order; empty: as vLLM has it
    # Engines of the instance, each a process with KV of its own; the experts of a model may be divided among them.
    data_parallel: int = Field(1, gt=0, le=64)
    rank_of: Name | Literal[""] = ""  # the instance of which it is one data-parallel rank: derived
    data_parallel_rank: int = Field(0, ge=0)  # its number: derived
    data_parallel_port: int = 0  # on this host, the first of `DATA_PARALLEL_PORTS` at which they meet: derived
    stage_accelerators: tuple[str, ...] = ()  # of each stage, in order, where they differ from `accelerator`
    node: str = ""  # where it stands in the cluster file's `network`
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)  # its share of the requests under `placement: weighted`
    threads: int = Field(1, gt=0)
    async_scheduling: bool | None = None  # the next step is scheduled while one computes; None: on GPUs, as vLLM can
    lora: LoraSection = LoraSection()  # the cluster's
    engine_args: dict[str, Any] = {}  # passed on to vLLM's EngineArgs; see `engine_args.REFUSED`
    # At SIGTERM it accepts no new jobs, and ends when its jobs are done and their KV was fetched, or after so long.
    drain_s: float = Field(0.0, ge=0)
    hang_s: float = Field(60.0, gt=0)  # an engine whose step lasts longer hangs: the instance is not healthy

    staging_bytes: int | None = Field(None, gt=0)  # of each rank; None: by its KV, see `default_staging`
    inbox_bytes: int = Field(256 << 20, gt=0)
    # nixl: between instances that both say so, KV is read from the exporter's memory; with all others it goes over TCP.
    kv_transport: Literal["tcp", "nixl"] = "tcp"
    kv_nixl_trusted: bool = False  # the networks that UCX uses reach this cluster alone: NIXL between hosts
    kv_connections: int = Field(1, ge=1, le=16)  # to each exporter's rank, for imports of 8 MB and more
    lease_s: float = Field(30.0, gt=0)  # staged KV that no decode instance pulls, or waits to pull, is kept for so long
    lease_renewals: int = Field(120, ge=0)  # of one transfer's lease, a third of it apart, while its decode waits
    pull_timeout_s: float = Field(10.0, gt=0)
    # A session's KV is kept for so long after its request, in at most this share of the KV blocks; 0: it is not kept.
    session_keep_s: float = Field(SESSION_KEEP_S, ge=0)
    session_share: float = Field(SESSION_SHARE, ge=0, le=0.9)
    lossy_kv: bool = False  # some class of requests allows it: codecs are loaded and measured at the start, not later
    kv_fault: str = ""  # fault injection for tests: see kv/vllm/connector.py

    rates_file: str = ""  # what `polyphase calibrate live` wrote: a better start than the catalogue for what it learns

    # An emulated engine's time: "cost" from the cost model of `accelerator` and `emulated_model`, or a fixed step.
    emulated_model: str = "Llama-3-8B"
    emulated_precision: Literal["", "fp8", "int8", "int4", "fp4"] = ""  # of its weights; empty: `dtype`
    emulated_step_s: float | None = None
    emulated_prefill_s_per_token: float | None = None
    emulated_link_gbps: float = Field(0.0, ge=0)  # of its network port, Gb/s; 0: KV transfers take no time
    emulated_links: dict[str, LinkEntry] = {}  # by instance id, paths from those on nodes: derived
    emulated_hop: LinkEntry | None = None  # from a pipeline stage to the next; by default the scale-up link
    emulated_slowdown: float = Field(1.0, gt=0)  # times as long: a cluster that this machine could not keep up with
    emulated_prefix_cache: bool = True

    policy_seed: int | None = None  # of the dispatcher; None: every instance and every start has its own

    @field_validator("kv_transport", mode="before")
    @classmethod
    def _kv_over_zeromq(cls, value: object) -> object:
        if value == "zeromq":
            raise ValueError("KV over ZeroMQ was removed: use `tcp`, which is the default and faster")
        return value

    @model_validator(mode="after")
    def _servable(self) -> Self:
        if faults := list(faults_of(self.engine_args)):
            raise ValueError("\n".join(f"engine_args: {fault}" for fault in faults))
        if self.lora.enabled and self.engine == "emulated":
            raise ValueError("lora: an emulated engine has no adapters: use `engine: vllm`, or leave `lora` out")
        caches = self.emulated_prefix_cache and self.pipeline_parallel == 1
        if self.host_kv_bytes and self.engine == "emulated" and not caches:
            raise ValueError("host_kv_bytes: this emulated engine has no prefix cache: leave it out")
        if self.disk_kv_bytes and self.engine == "emulated":
            raise ValueError("disk_kv_bytes: an emulated engine has no disk tier: use `engine: vllm`, or leave it out")
        if self.disk_kv_bytes and not self.host_kv_bytes:
            raise ValueError("disk_kv_bytes: the disk gets the KV that leaves host memory: set `host_kv_bytes`, too")
        if self.disk_kv_bytes and not self.disk_kv_folder:
            raise ValueError("disk_kv_bytes: set `disk_kv_folder`, too: a folder on the host of the instance")
        if self.disk_kv_folder and not self.disk_kv_bytes:
            raise ValueError("disk_kv_folder: nothing is kept there: set `disk_kv_bytes`, too, or leave it out")
        if self.disk_kv_folder and not isabs(self.disk_kv_folder):
            raise ValueError(f"disk_kv_folder: {self.disk_kv_folder!r} must be an absolute path")
        if self.weights and self.engine == "emulated":
            raise ValueError("weights: an emulated engine loads none: use `emulated_precision`")
        if self.emulated_precision and self.engine != "emulated":
            raise ValueError("emulated_precision: only emulated engines have it: use `weights`, or quantization")
        if self.pipeline_layers and len(self.pipeline_layers) != self.pipeline_parallel:
            stages = f"{self.pipeline_parallel} of `pipeline_parallel`"
            raise ValueError(f"pipeline_layers: {len(self.pipeline_layers)} stages, not the {stages}")
        if self.data_parallel_rank >= self.data_parallel:
            ranks = f"{self.data_parallel} of `data_parallel`"
            raise ValueError(f"data_parallel_rank: {self.data_parallel_rank}: must be below the {ranks}")
        if self.stage_accelerators and len(self.stage_accelerators) != self.pipeline_parallel:
            stages = f"{self.pipeline_parallel} of `pipeline_parallel`"
            raise ValueError(f"stage_accelerators: {len(self.stage_accelerators)} stages, not the {stages}")
        if self.chunk_size == "auto" and not self.engine_args.get("enable_chunked_prefill", True):
            raise ValueError("chunk_size: auto: `engine_args` turn chunked prefill off, so a prompt has to fit a step")
        return self

    @property
    def served_name(self) -> str:
        """The name by which clients request the model."""
        return self.served_model_name or self.model

    @property
    def step_tokens(self) -> int:
        """The most tokens of a step, prefill and decode together."""
        return self.chunk_size if isinstance(self.chunk_size, int) else self.max_chunk_size

    @property
    def source(self) -> ModelSource:
        """What its engine loads."""
        return source_of(self.weights or self.model, self.engine_args)

    @property
    def load_format(self) -> str:
        """vLLM's name of the format of the weights."""
        return str(self.engine_args.get("load_format", "auto"))

    @property
    def ranks(self) -> int:
        """Processes of the engine that compute, each with its KV: stages times tensor-parallel ranks."""
        return self.tensor_parallel * self.pipeline_parallel

    def device_bytes(self, weights: int) -> int:
        """What the fullest of its devices needs. weights: of the whole model, as they are loaded; 0: not known.

        The stage with the most layers has that share of the weights, and each of its ranks an equal part of those.
        """
        if any(name in self.engine_args for name in _WEIGHTS_CHANGE):
            weights = 0
        layers = self.pipeline_layers
        share = max(layers) / sum(layers) if layers else 1.0 / self.pipeline_parallel
        return int(weights * share / self.tensor_parallel) + self.kv_cache_bytes + MARGIN_BYTES

    @property
    def computes_here(self) -> bool:
        """Whether a step's work is done by the engine's thread, and by nothing else."""
        return self.accelerator == "cpu" and self.ranks == self.threads == 1

    def address(self, port: int) -> str:
        """A ZeroMQ address of this instance, as peers reach it."""
        return f"tcp://{self.advertise_host or self.host}:{port}"

    @property
    def kv_endpoints(self) -> tuple[str, ...]:
        """One address a rank: those of the first pipeline stage, then of the next. Its scheme is the transport."""
        addresses = (self.address(self.kv_port + rank) for rank in range(self.ranks))
        scheme = {"tcp": "kv", "nixl": "nixl"}[self.kv_transport]
        return tuple(f"{scheme}://{each.partition('://')[2]}" for each in addresses)
