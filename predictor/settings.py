"""Settings of the predictor service."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from predictor.buckets import Buckets
from shared.runtime.settings import ServiceSettings


class PredictorSettings(ServiceSettings):
    """Prefix `POLYPHASE_PREDICTOR_`; the defaults work without a checkpoint."""

    model_config = SettingsConfigDict(env_prefix="POLYPHASE_PREDICTOR_", frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8300, ge=0, le=65535)
    rpc_address: str = ""  # for gateways, such as tcp://127.0.0.1:8301; empty: HTTP only
    checkpoint: Path | None = None  # folder of `polyphase predictor train`; it may appear later (POST /v1/model/reload)
    model: str = ""  # served model, folder or Hugging Face name: its tokenizer turns token ids into text
    trust_remote_code: bool = False  # Python code of that tokenizer's repository may run
    # auto: the classifier while it is better than the commonest bucket; classifier: in any case.
    use: Literal["auto", "classifier", "observed"] = "auto"
    # After this time the prediction comes from observed lengths; a request may set its own.
    timeout_ms: float = Field(default=250.0, gt=0, le=60_000)
    # Of a batch of several prompts, with padding; 0: no limit, but a prompt of more than 512 tokens runs alone.
    batch_tokens: int = Field(default=512, ge=0, le=1 << 20)
    queue_depth: int = Field(default=512, ge=0, le=10_000)
    threads: int = Field(default=1, ge=1, le=256)
    device: str = "auto"  # auto: a GPU if there is one; or "cpu", "cuda", "cuda:1"
    # auto, on a CPU: int8, and then fewer input tokens, if a prompt would take more than half of the deadline.
    dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    input_tokens: int = Field(default=0, ge=0)  # of a prompt, at most; 0: as in the training
    # Granularity of the observed estimator; a classifier's is in its checkpoint.
    bucket_tokens: int = Field(default=200, ge=1)
    bucket_count: int = Field(default=10, ge=2, le=1000)
    half_life_observations: float = Field(default=500.0, gt=0)
    max_body_bytes: int = Field(default=4 << 20, ge=1024)

    @property
    def buckets(self) -> Buckets:
        return Buckets(self.bucket_tokens, self.bucket_count)
