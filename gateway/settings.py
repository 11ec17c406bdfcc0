"""The settings of one gateway process, and of its SLO classes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from gateway import vllm_options
from shared.domain.job import FirstTokenOut, Slo, WhenFull, default_itl_s, tight_gaps
from shared.domain.kv import Codec
from shared.model.adapters import LoraSection
from shared.model.source import ModelSource, source_of
from shared.runtime.settings import Name, TracedSettings


class SloClass(BaseModel):
    """One SLO class: its targets in seconds, and how its requests are treated while the cluster is full.

    itl_s: for the 99th percentile of the gaps between the tokens of a stream; by default 0.25, or 1.25 times `tpot_s`
    where that is more.
    """

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="forbid")

    ttft_s: float = Field(2.0, gt=0)
    tpot_s: float = Field(0.2, gt=0)
    itl_s: float | None = Field(None, gt=0)
    weight: float = Field(1.0, gt=0)  # the weight of its SLO cost; heavier classes go first
    when_full: WhenFull = WhenFull.NEVER
    lossy_kv: Codec = Codec.RAW  # the coarsest codec its KV may be sent with where the link is slow
    first_token: FirstTokenOut = FirstTokenOut.EARLY  # or "smooth": together with the second token
    queue_s: float = Field(600.0, gt=0)  # the longest wait of a job in the gateway, of a class that yields
    mixed_precision: bool = True  # where the cluster allows it; false: one precision computes prompt and answer

    @model_validator(mode="after")
    def _gaps_at_least_mean(self) -> Self:
        if self.itl_s is not None and (wrong := tight_gaps(self.itl_s, self.tpot_s)):
            raise ValueError(wrong)
        return self

    def as_slo(self, name: str) -> Slo:
        """The class as policies see it."""
        itl_s = default_itl_s(self.tpot_s) if self.itl_s is None else self.itl_s
        return Slo(
            name,
            self.ttft_s,
            self.tpot_s,
            self.weight,
            self.when_full,
            self.lossy_kv,
            itl_s,
            self.first_token,
            self.mixed_precision,
        )


BUILT_IN = {"default": SloClass(), "batch": SloClass(ttft_s=600.0, tpot_s=1.0, weight=0.1, when_full=WhenFull.DELAY)}


TIERS = ("flex", "priority", "scale")  # tiers of OpenAI that may stand for an SLO class
USUAL_TIERS = ("auto", "default")  # tiers that keep the SLO class that a request would have without them
BUILT_IN_TIERS = {"flex": "batch"}


class GatewaySettings(TracedSettings):
    """The API process. Environment variables have the prefix `POLYPHASE_GATEWAY_`."""

    model_config = SettingsConfigDict(
        env_prefix="POLYPHASE_GATEWAY_", frozen=True, extra="forbid", protected_namespaces=()
    )

    gateway_id: Name = "gateway-0"
    host: str = "127.0.0.1"
    port: int = 8000
    processes: int = Field(1, gt=0, le=16)  # that listen on the port; limits and key rates hold for all together
    process: int = Field(0, ge=0)  # the number of this process among them
    own_port: int = 0  # of this process alone, if there are several
    shared_table: Path | None = None  # their shared counters, see `gateway.table`
    schedulers: tuple[str, ...]  # RPC addresses
    model: str
    trust_remote_code: bool = False  # Python code of the model's repository may run
    served_model_name: str = ""
    dtype: str = "bfloat16"
    max_model_len: int = 2048
    lora: LoraSection = LoraSection()  # the cluster's
    vllm_args: dict[str, Any] = {}  # more options of vLLM's API server, such as tool_call_parser; see `vllm_options`

    api_keys_file: Path | None = None
    max_body_bytes: int = Field(4 << 20, gt=0)
    body_timeout_s: float = Field(30.0, gt=0)  # for the whole body to arrive
    max_items_per_body: int = Field(4096, gt=0)  # messages, parts, tools, prompts, ...; more: 400
    # Images and other media of a prompt, once they are processed; more: 400. An RPC message has room for 48 MiB.
    max_media_bytes: int = Field(32 << 20, gt=0, le=40 << 20)
    max_held_bytes: int = Field(256 << 20, gt=0)  # bodies and media of all requests of this process; more: 429
    write_timeout_s: float = Field(60.0, gt=0)  # a client that reads nothing of its answer for so long is disconnected
    max_queued_jobs: int = Field(512, gt=0)  # jobs that do not decode yet; more: 429
    max_queued_tokens: int = Field(1 << 20, gt=0)  # prompt tokens of those jobs
    max_delayed_jobs: int = Field(8192, gt=0)  # the same two limits for the classes that yield
    max_delayed_tokens: int = Field(1 << 24, gt=0)
    caller_share: float = Field(0.5, gt=0, le=1)  # of queued jobs, tokens and held bytes, for each of several keys
    max_jobs_a_body: int = Field(128, gt=0)  # prompts times n; more: 400
    jobs_at_once: int = Field(16, gt=0)  # of one body, placed or waiting for placement, and not decoding yet
    max_prompt_logprobs: int = Field(20_000, gt=0)  # of a body: prompt tokens times candidates; more: 400
    grammar_cpu_s: float = Field(2.0, gt=0)  # to compile a grammar; more: 400
    grammar_cache_bytes: int = Field(32 << 20, ge=0)  # cached verdicts on grammars
    lean_streams: bool = True  # plain streams take the fast path; off: vLLM writes all streams
    stream_interval_share: float = Field(0.5, ge=0, le=1)  # of its class's TPOT target that a token may wait under load
    drain_s: int = Field(5, ge=0)  # after SIGTERM new requests get 503, and open requests may end within this time
    head_timeout_s: float = Field(10.0, gt=0)  # for the request line and headers to arrive
    idle_timeout_s: float = Field(75.0, gt=0)  # a connection without a request is closed after this time
    max_connections: int = Field(16384, gt=0)  # of one process; fewer where it may open fewer files
    max_connections_an_address: int = Field(4096, ge=0)  # from one address; 0: no limit
    proxy_addresses: tuple[str, ...] = (
        "127.0.0.1",
        "::1",
    )  # of reverse proxies, to which the limit per address does not apply
    job_timeout_s: float = Field(600.0, gt=0)
    patience_s: float = Field(10.0, gt=0)  # how long a job waits for a scheduler or an instance
    attempts: int = Field(4, gt=0)  # losses that end a job, without those that its progress forgave
    loss_forgiven_tokens: int = Field(256, gt=0)  # of the answer since the last loss that forgive one loss
    losses_at_one_token: int = Field(2, gt=0)  # instances lost without a token in between that end a job
    migration: bool = True  # decodes go on elsewhere with their KV, where their instance wants that
    # Sessions whose last turns one process remembers at most, and their bytes; 0 sessions: session ids have no effect.
    sessions: int = Field(4096, ge=0)
    session_bytes: int = Field(64 << 20, gt=0)
    moves: int = Field(2, ge=0)  # of a paused stream to another instance; 0: none
    slo: dict[str, SloClass] = BUILT_IN
    service_tiers: dict[str, str] = BUILT_IN_TIERS  # OpenAI's tier → a class of `slo`
    kv_codec: Codec = Codec.RAW  # of all transfers, if it is lossy; `slo` sets one by class and link

    record_lengths: Path | None = (
        None  # a file with training data for a length classifier; it contains parts of prompts
    )
    record_bytes: int = Field(64 << 20, ge=1 << 16)  # of that file and its predecessor together

    predictors: tuple[str, ...] = ()  # RPC addresses of replicas; none: no predictions
    predictors_beside: dict[str, str] = {}  # instead: by instance, the RPC address of the predictor beside it
    # Beside placement, before it, or not at all; with predictors beside instances: beside the prefill, or before it.
    predict: Literal["parallel", "sequential", "off"] = "parallel"
    predict_wait_s: float = Field(0.005, ge=0)  # parallel: the longest wait of a placement
    predict_timeout_s: float = Field(0.25, gt=0)  # a later answer is ignored; until then dispatch may use it

    @property
    def source(self) -> ModelSource:
        return source_of(self.model, self.vllm_args)

    @field_validator("slo")
    @classmethod
    def _with_built_in(cls, slo: dict[str, SloClass]) -> dict[str, SloClass]:
        return {**BUILT_IN, **slo}

    @field_validator("service_tiers")
    @classmethod
    def _with_built_in_tiers(cls, tiers: dict[str, str]) -> dict[str, str]:
        return {**BUILT_IN_TIERS, **tiers}

    @field_validator("predict", mode="before")
    @classmethod
    def _off_in_yaml(cls, predict: object) -> object:
        return "off" if predict is False else predict  # YAML reads a plain `off` as False

    @model_validator(mode="after")
    def _one_kind_of_predictors(self) -> Self:
        if self.predictors and self.predictors_beside:
            raise ValueError("predictors_beside and predictors exclude each other: set one of them")
        return self

    @field_validator("vllm_args")
    @classmethod
    def _known_options(cls, args: dict[str, Any]) -> dict[str, Any]:
        if faults := [*vllm_options.faults_of(args)]:
            raise ValueError("\n".join(faults))
        return args

    @staticmethod
    def engine_args(vllm_args: Mapping[str, Any]) -> dict[str, Any]:
        """The engine arguments of instances that follow from `vllm_args`, which need not be valid."""
        return vllm_options.shared_with_engines(vllm_args)

    @model_validator(mode="after")
    def _several_processes(self) -> Self:
        if self.process >= self.processes:
            raise ValueError(f"process must be between 0 and {self.processes - 1}, got {self.process}")
        if self.processes > 1 and not (self.shared_table and self.own_port):
            raise ValueError("processes: more than one needs a `shared_table`, and an `own_port` for each")
        return self

    @model_validator(mode="after")
    def _known_tiers(self) -> Self:
        for tier, slo in self.service_tiers.items():
            if tier not in TIERS:
                raise ValueError(f"service_tiers: unknown tier {tier!r}; expected one of {', '.join(TIERS)}")
            if slo not in self.slo:
                known = ", ".join(sorted(self.slo))
                raise ValueError(f"service_tiers: {tier}: unknown SLO class {slo!r}; known: {known}")
        return self
