"""Settings of one global scheduler."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from shared.policy.prefix_index import MAX_BLOCKS
from shared.runtime.settings import Name, TracedSettings


class SchedulerSettings(TracedSettings):
    """Prefix `POLYPHASE_SCHEDULER_`. Policies come with the monitor's broadcasts."""

    model_config = SettingsConfigDict(env_prefix="POLYPHASE_SCHEDULER_", frozen=True, extra="forbid")

    scheduler_id: Name = "scheduler-0"
    http_host: str = "127.0.0.1"
    http_port: int = Field(8100, ge=0, le=65535)
    rpc_address: str = "tcp://127.0.0.1:8101"
    broadcast_address: str = "tcp://127.0.0.1:8203"  # where the monitor publishes
    monitor_url: str = "http://127.0.0.1:8200"  # empty: outcomes are not forwarded
    predictor_urls: tuple[str, ...] = ()  # each replica gets all lengths

    database_url: str = Field("sqlite:///polyphase.db", repr=False)
    queue_rows: int = Field(20_000, ge=1)  # rows that may wait for the database
    retention_s: float = Field(7 * 86_400.0, gt=0)
    retention_rows: int = Field(500_000, ge=1)  # the oldest requests beyond it are deleted
    retention_bytes: int = Field(2_000_000_000, ge=1)  # of their rows and indexes
    prune_period_s: float = Field(60.0, gt=0)
    ring_jobs: int = Field(5_000, ge=1)  # newest jobs kept in memory with their timelines
    # Blocks of 64 tokens known to be in prefix caches, each counted once for each instance that holds it.
    prefix_blocks: int = Field(MAX_BLOCKS, ge=1)

    # An open job that is not reported for so long ends here; gateways report every 3 s (gateway.reports.REFRESH_S).
    lost_after_s: float = Field(10.0, gt=0)

    policy_seed: int | None = None  # None: random
    decision_log: Path | None = None  # see services.global_scheduler.journal
    decision_log_bytes: int = Field(256 << 20, ge=1)  # at which the log stops
