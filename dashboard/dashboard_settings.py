"""Settings of the dashboard. Not `settings.py`: Streamlit puts this folder first on `sys.path`."""

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from shared.runtime.settings import ServiceSettings

Url = Annotated[str, Field(pattern=r"^https?://[A-Za-z0-9._\[\]:-]+(/[^\s]*)?$")]
Urls = Annotated[str, Field(pattern=r"^https?://[^\s,]+(,https?://[^\s,]+)*$")]  # of several monitors
OptionalUrl = Annotated[str, Field(pattern=r"^$|^https?://[A-Za-z0-9._\[\]:-]+(/[^\s]*)?$")]


class DashboardSettings(ServiceSettings):
    """Prefix `POLYPHASE_DASHBOARD_`. An empty URL: the dashboard does not show that service."""

    model_config = SettingsConfigDict(env_prefix="POLYPHASE_DASHBOARD_", frozen=True, extra="forbid")

    monitor_url: Urls = "http://127.0.0.1:8200"
    scheduler_url: Url = "http://127.0.0.1:8100"
    gateway_url: OptionalUrl = "http://127.0.0.1:8000"
    gateway_urls: tuple[Url, ...] = ()  # of each gateway process, where several share one port
    predictor_url: OptionalUrl = ""
    planner_url: OptionalUrl = ""

    # The gateway's keys. With this file the dashboard requires a login; without it, it must listen on loopback.
    api_keys_file: Path | None = None

    refresh_s: float = Field(2.0, ge=0.5, le=60.0)
    read_timeout_s: float = Field(1.5, gt=0)  # of one read; the reads of a page run at the same time
    drain_timeout_s: float = Field(30.0, gt=0)  # sent with each drain and flip
    slo_goal: float = Field(0.9, gt=0.0, le=1.0)  # a lower attainment is marked
    requests_shown: int = Field(100, ge=1, le=500)
    flips_shown: int = Field(100, ge=1, le=1_000)
    events_shown: int = Field(200, ge=1, le=1_000)
    log_lines: int = Field(200, ge=1, le=1_000)
    proposals_shown: int = Field(20, ge=1, le=500)
    searches_shown: int = Field(20, ge=1, le=500)
    cards_shown: int = Field(12, ge=1, le=60)  # more instances than this are shown as a table
