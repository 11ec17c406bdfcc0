"""Settings of the planner."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from shared.domain.kv import Codec
from shared.runtime.settings import ServiceSettings


class PlannerSettings(ServiceSettings):
    """Prefix `POLYPHASE_PLANNER_`."""

    model_config = SettingsConfigDict(env_prefix="POLYPHASE_PLANNER_", frozen=True, extra="forbid")

    http_host: str = "127.0.0.1"
    http_port: int = Field(8500, ge=0, le=65535)
    monitor_url: str = "http://127.0.0.1:8200"
    broadcast_address: str = "tcp://127.0.0.1:8203"
    database_url: str = Field("sqlite:///polyphase.db", repr=False)

    auto: bool = False  # proposals are applied at once
    target: float = Field(0.9, gt=0, lt=1)  # SLO attainment at which a rate counts as served
    promise: dict[str, float] = {}  # of the plan that the cluster was started from, as `polyphase plan` writes it
    codec: Codec = Codec.RAW  # of KV transfers
    step_s: float = Field(0.25, gt=0)  # between two looks at the cluster
    review_s: float = Field(15.0, gt=0)  # between two reviews while nothing changes
    alert_s: float = Field(30.0, ge=0)  # reviews are more frequent for so long after news
    loss_s: float = Field(0.0, ge=0)  # an instance must be gone for so long before it counts as lost
    hold_s: float = Field(600.0, ge=0)  # a proposal that was refused or failed is not repeated for so long
    drain_timeout_s: float = Field(60.0, gt=0)  # of each flip of a proposal

    queue_rows: int = Field(5_000, ge=1)  # rows that may wait for the database
    searches: int = Field(1, ge=1, le=16)  # that run at once
    waiting: int = Field(32, ge=0)  # searches that may wait
    search_s: float = Field(600.0, gt=0)  # the longest a search may take
    prune_period_s: float = Field(60.0, gt=0)
    retention_s: float = Field(90 * 86_400.0, gt=0)  # of searches and proposals
    retention_rows: int = Field(100_000, ge=1)  # of each of both tables; the oldest beyond it are deleted
    retention_bytes: int = Field(500_000_000, ge=1)  # of each of both tables with its indexes
