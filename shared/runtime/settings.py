"""Settings of a process: one frozen model, read from the environment; unknown keys are errors."""

import json
import os
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.errors import InvalidRequest
from shared.files.faults import OTLP
from shared.runtime.keys import checked, read_pair, read_token

# Of a process, as it is reported to others: a name that the monitor refused would cost the whole report.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:@-]{1,128}$")]
PEER_SILENCE_S = 1.5


class Tracing(BaseModel):
    """Where spans are exported, and of which share of the requests.

    endpoint: of an OTLP collector: `http://host:4318` (`/v1/traces` unless it has a path; also https) or
    `grpc://host:4317` (grpcs: over TLS). sample: the share of traces that begin here; a client's `traceparent` decides
    on its own trace. queue_spans: of the export queue; further spans are dropped and counted.
    """

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="forbid", hide_input_in_errors=True)

    endpoint: str = Field(pattern=OTLP, repr=False)
    sample: float = Field(1.0, ge=0, le=1)
    queue_spans: int = Field(8192, ge=512)

    @field_validator("endpoint")
    @classmethod
    def _usable(cls, endpoint: str) -> str:
        where = urlsplit(endpoint)
        try:
            known = where.port is None or where.port > 0
        except ValueError:
            known = False
        if not known:
            raise ValueError("its port must be a number between 1 and 65535")
        if where.scheme.startswith("grpc") and where.username is not None:
            raise ValueError("OTLP over gRPC has no user in the endpoint: use OTEL_EXPORTER_OTLP_HEADERS instead")
        return endpoint


class ServiceSettings(BaseSettings):
    """Base of every process's settings. Subclasses set `env_prefix`; nested values are JSON."""

    # Errors do not repeat values: an error of a whole object would repeat its keys and passwords, too.
    model_config = SettingsConfigDict(allow_inf_nan=False, frozen=True, extra="forbid", hide_input_in_errors=True)

    log_level: str = "INFO"
    # A connection between processes whose other end answers no heartbeat for so long is lost, and with it all calls.
    peer_silence_s: float = Field(PEER_SILENCE_S, gt=0, le=600)
    # Keys of the cluster for CurveZMQ, both or none; needed for anything that leaves a host.
    curve_public: str = ""
    curve_secret: str = Field("", repr=False)
    # The key of a suite on one host, where there is no such pair: it is needed to connect to a ZeroMQ socket and to
    # pull KV, which is authenticated by it and not encrypted.
    curve_file: Path | None = None
    # The cluster's secret, or its file, for HTTP calls that change something, sent and received. Without one such calls
    # are refused here; "open": all are allowed.
    cluster_token: SecretStr = SecretStr("")
    cluster_token_file: Path | None = None

    @classmethod
    def load(cls) -> Self:
        """Read the environment. Raises InvalidRequest that names all unknown keys with our prefix."""
        prefix = str(cls.model_config.get("env_prefix", "")).upper()
        known = {f"{prefix}{name.upper()}" for name in cls.model_fields}
        unknown = sorted(key for key in os.environ if prefix and key.startswith(prefix) and key not in known)
        if unknown:
            raise InvalidRequest(f"unknown settings: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        return cls()

    def curve_pair(self) -> tuple[str, str] | None:
        """The CurveZMQ pair (public, secret; Z85) of this process's sockets. Raises InvalidRequest for a bad file."""
        if self.curve_public:
            return self.curve_public, self.curve_secret
        return read_pair(self.curve_file) if self.curve_file is not None else None

    def token(self) -> str:
        """The cluster's secret, "open", or nothing. Raises InvalidRequest that names the setting or the file."""
        given = self.cluster_token.get_secret_value()
        if given:
            return checked(given, "cluster_token")
        return read_token(self.cluster_token_file) if self.cluster_token_file is not None else ""

    def to_environment(self) -> dict[str, str]:
        """The environment from which `load` returns this object; only what differs from the defaults."""
        prefix = str(type(self).model_config.get("env_prefix", "")).upper()
        dumped: dict[str, Any] = self.model_dump(mode="json", exclude_defaults=True)
        if "cluster_token" in dumped:  # dumped as asterisks
            dumped["cluster_token"] = self.cluster_token.get_secret_value()
        return {f"{prefix}{name.upper()}": _text(value) for name, value in dumped.items()}


class TracedSettings(ServiceSettings):
    """Settings of a process that requests pass through."""

    tracing: Tracing | None = None  # None: off, and OpenTelemetry is not imported


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
