"""Settings of one gateway."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import SettingsConfigDict

from shared.domain.kv import Codec
from shared.runtime.settings import ServiceSettings


class SloTarget(BaseModel):
    """Targets of one class, in seconds. lossy_kv: the coarsest codec its KV may be sent with where the link is slow."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_s: float = 2.0
    tpot_s: float = 0.2
    lossy_kv: Codec = Codec.RAW


class GatewaySettings(ServiceSettings):
    """The API process. Prefix `POLYPHASE_GATEWAY_`."""

    model_config = SettingsConfigDict(
        env_prefix="POLYPHASE_GATEWAY_", frozen=True, extra="forbid", protected_namespaces=()
    )

    gateway_id: str = "gateway-0"
    host: str = "127.0.0.1"
    port: int = 8000
    schedulers: tuple[str, ...]  # RPC addresses
    model: str
    served_model_name: str = ""
    dtype: str = "bfloat16"
    max_model_len: int = 2048
    vllm_args: dict[str, Any] = {}  # further options of vLLM's API server, such as tool_call_parser

    api_keys_file: Path | None = None
    max_body_bytes: int = Field(4 << 20, gt=0)
    body_timeout_s: float = Field(30.0, gt=0)  # for all of a body to come
    max_queued_jobs: int = Field(512, gt=0)  # jobs without a first token; beyond it the answer is 429
    max_queued_tokens: int = Field(1 << 20, gt=0)  # prompt tokens of those
    caller_share: float = Field(0.5, gt=0, le=1)  # of max_queued_jobs, for each key where there are several
    max_jobs_a_body: int = Field(128, gt=0)  # prompts times n; beyond it the answer is 400
    jobs_at_once: int = Field(16, gt=0)  # of one body, in the cluster and without a first token
    grammar_cpu_s: float = Field(2.0, gt=0)  # what it may cost to compile a grammar; beyond it the answer is 400
    job_timeout_s: float = Field(600.0, gt=0)
    patience_s: float = Field(10.0, gt=0)  # how long a job waits for a scheduler or an instance to come back
    attempts: int = Field(4, gt=0)
    slo: dict[str, SloTarget] = {"default": SloTarget()}
    kv_codec: Codec = Codec.RAW  # of all transfers, if it is lossy; see `slo` for one by class and link

    predictor: str = ""  # its RPC address; empty: nobody predicts lengths
    predict_wait_s: float = Field(0.005, ge=0)  # at most so long a placement waits for a classifier that is so quick
    predict_timeout_s: float = Field(0.25, gt=0)  # what comes later is given up; before that dispatch may still use it
