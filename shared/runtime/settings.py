"""Settings of a process: one frozen model, read from the environment, unknown keys refused."""

import json
import os
from typing import Any, Self

from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.errors import InvalidRequest


class ServiceSettings(BaseSettings):
    """Base of every process's settings. Subclasses set `env_prefix`; nested values are JSON."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    log_level: str = "INFO"
    # Keys of the cluster for CurveZMQ, both or none; needed for anything that leaves a host.
    curve_public: str = ""
    curve_secret: str = ""

    @classmethod
    def load(cls) -> Self:
        """Read the environment. Raises InvalidRequest that names every key of our prefix that means nothing."""
        prefix = str(cls.model_config.get("env_prefix", "")).upper()
        known = {f"{prefix}{name.upper()}" for name in cls.model_fields}
        unknown = sorted(key for key in os.environ if prefix and key.startswith(prefix) and key not in known)
        if unknown:
            raise InvalidRequest(f"unknown settings: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        return cls()

    def to_environment(self) -> dict[str, str]:
        """The environment from which `load` gives this object back; only what differs from the defaults."""
        prefix = str(type(self).model_config.get("env_prefix", "")).upper()
        dumped: dict[str, Any] = self.model_dump(mode="json", exclude_defaults=True)
        return {f"{prefix}{name.upper()}": _text(value) for name, value in dumped.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
