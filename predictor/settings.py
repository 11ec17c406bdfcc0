"""Settings of the predictor service."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from predictor.buckets import Buckets
from shared.runtime.settings import ServiceSettings


class PredictorSettings(ServiceSettings):
    """Read from POLYPHASE_PREDICTOR_…; every key has a default that works without a checkpoint."""

    model_config = SettingsConfigDict(env_prefix="POLYPHASE_PREDICTOR_", frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8300, ge=0, le=65535)
    rpc_address: str = ""  # where gateways ask, such as tcp://127.0.0.1:8301; empty: over HTTP only
    # The folder that `predictor.train` wrote; it may appear later (POST /v1/model/reload).
    checkpoint: Path | None = None
    # The served model (folder or Hugging Face name): its tokenizer turns token ids back into text.
    model: str = ""
    # A prediction that takes longer is not given; a request may ask for less or more.
    timeout_ms: float = Field(default=250.0, gt=0, le=60_000)
    queue_depth: int = Field(default=8, ge=0, le=10_000)
    threads: int = Field(default=1, ge=1, le=256)
    dtype: Literal["float32", "bfloat16"] = "float32"
    # Granularity of the observed estimator; a classifier's is in its checkpoint.
    bucket_tokens: int = Field(default=200, ge=1)
    bucket_count: int = Field(default=10, ge=2, le=1000)
    half_life_observations: float = Field(default=500.0, gt=0)
    max_body_bytes: int = Field(default=4 << 20, ge=1024)

    @property
    def buckets(self) -> Buckets:
        """The classes of the observed estimator."""
        return Buckets(self.bucket_tokens, self.bucket_count)
