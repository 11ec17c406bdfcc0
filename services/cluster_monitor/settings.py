"""Settings of the cluster monitor."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import SettingsConfigDict

from services.cluster_monitor.request_stats import KEPT_S
from shared.domain.instance import Role
from shared.model.adapters import LoraSection
from shared.runtime.settings import ServiceSettings


class ScrapeTarget(BaseModel):
    """A process that does not register here. `url`: of its HTTP server, without a path."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="forbid")

    service: str
    process: str
    url: str


class MonitorSettings(ServiceSettings):
    """Prefix `POLYPHASE_MONITOR_`; tuples and dicts are JSON."""

    model_config = SettingsConfigDict(env_prefix="POLYPHASE_MONITOR_", frozen=True, extra="forbid")

    monitor_id: str = "monitor"
    http_host: str = "127.0.0.1"
    http_port: int = Field(8200, ge=0, le=65535)
    heartbeat_address: str = "tcp://127.0.0.1:8202"  # bound here; workers connect
    broadcast_address: str = "tcp://127.0.0.1:8203"  # bound here; schedulers and workers connect
    broadcast_period_s: float = Field(0.1, gt=0)

    # Several monitors of one database: the holder of the lease acts, the others are standbys. 0: this one is alone.
    lease_s: float = Field(0.0, ge=0.0, le=60.0)
    advertise_url: str = ""  # of this monitor, for clients of a standby; empty: http_host and http_port

    silence_s: float = Field(0.8, gt=0)  # without a heartbeat for so long an instance is unresponsive
    connect_timeout_s: float = Field(5.0, gt=0)  # for the connection to a newly registered instance
    quiet_start_s: float = Field(1.0, ge=0)  # a restarted monitor waits so long for the instances that it remembers
    fingerprint: str = ""  # the only model allowed; empty: the first instance decides
    mixed_precision: bool = False  # instances whose weights are quantised otherwise than others' may register

    drain_timeout_s: float = Field(30.0, gt=0)  # of a flip or drain that names none
    rpc_timeout_s: float = Field(2.0, gt=0)  # of a flip's steps other than the drain, and of a move
    verify_timeout_s: float = Field(1.0, gt=0)  # for the heartbeat that shows the new role

    policies: dict[str, Any] = Field(default_factory=dict)  # the cluster file's: see `shared.policy.registry.from_file`
    role_flip_period_s: float = Field(1.0, gt=0)  # between two steps of the policy of role flips
    role_flip_respects_s: float = Field(
        600.0, ge=0
    )  # for so long policies and the planner do not reverse a person's flip

    lora: LoraSection = LoraSection()  # the cluster's
    served_model_name: str = ""  # of the base model, which no adapter may have
    # After an unload, instances keep the adapter for at least so long: gateways may have accepted requests for it.
    adapter_linger_s: float = Field(10.0, ge=0)

    scrape: tuple[ScrapeTarget, ...] = ()  # other processes with metrics: see `services.cluster_monitor.routes`
    expected_instances: dict[str, Role] = Field(
        default_factory=dict
    )  # of the cluster file: missing until they register

    slo_windows_s: tuple[float, ...] = (60.0, 300.0)
    served_late_s: float = Field(KEPT_S, gt=0)  # an end that is reported later counts as if it were so long ago

    database_url: str = Field("sqlite:///polyphase.db", repr=False)
    queue_rows: int = Field(20_000, ge=1)  # rows that may wait for the database
    load_sample_s: float = Field(1.0, gt=0)
    slo_sample_s: float = Field(10.0, gt=0)
    prune_period_s: float = Field(60.0, gt=0)
    retention_loads_s: float = Field(7_200.0, gt=0)  # of single samples
    retention_load_steps_s: float = Field(7 * 86_400.0, gt=0)
    retention_served_s: float = Field(30 * 86_400.0, gt=0)
    retention_fine_s: float = Field(3 * 3_600.0, gt=0)  # of steps shorter than a minute, of loads and of requests
    retention_slo_s: float = Field(7 * 86_400.0, gt=0)
    retention_flips_s: float = Field(90 * 86_400.0, gt=0)
    retention_events_s: float = Field(90 * 86_400.0, gt=0)
    retention_rows: int = Field(2_000_000, ge=1)  # of each of these tables; the oldest beyond it are deleted
    retention_bytes: int = Field(500_000_000, ge=1)  # of each of these tables with its indexes

    @property
    def url(self) -> str:
        """Of this one's HTTP API."""
        return self.advertise_url or f"http://{self.http_host}:{self.http_port}"
