"""What the connector's scheduler half tells its worker halves each step, and the settings both read.

vLLM carries the metadata to its own worker processes in its own way; it is never on a socket of ours.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from services.worker.kv.staging import LEASE_RENEWALS
from services.worker.kv.wire.nixl_state import NIXL_SCHEME
from shared.domain.kv import Codec, KvHandle


class ExportParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stage the prompt's KV under that id, on a device coded by `codec` already, where that is known to be lossy."""

    transfer_id: str
    codec: Codec = Codec.RAW


class TransferParams(msgspec.Struct, frozen=True, rename={"import_": "import"}, forbid_unknown_fields=True):
    """`kv_transfer_params` of a request. `deadline_s` is relative: seconds that the import may take."""

    export: ExportParams | None = None
    import_: KvHandle | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class ExportChunk:
    """After this step's forward, tokens [start, end) of a transfer of `total` lie in `blocks`, which cover the
    sequence from 0.
    """

    transfer_id: str
    start: int
    end: int
    total: int
    blocks: list[int]
    codec: Codec = Codec.RAW


@dataclass(frozen=True, slots=True)
class ImportStart:
    """Tokens [start, end) of the handle go into `blocks`, which cover the sequence from token 0."""

    request_id: str
    handle: KvHandle
    start: int
    end: int
    blocks: list[int]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ImportSkip:
    """Nothing is pulled: all is cached (`error` empty), or the handle cannot be used."""

    handle: KvHandle
    error: str


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """One step. `idle` when the engine computes nothing in it."""

    exports: list[ExportChunk] = field(default_factory=list)
    imports: list[ImportStart] = field(default_factory=list)
    skips: list[ImportSkip] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)  # transfer ids of imports
    drops: list[str] = field(default_factory=list)  # transfer ids of exports
    idle: bool = False


class ConnectorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config`; `services.worker.kv` documents each key."""

    endpoints: tuple[str, ...]
    events: str
    control_key: str
    instance_id: str
    generation: int
    fingerprint: str
    staging_bytes: int | None = None
    lease_s: float = 60.0
    lease_renewals: int = LEASE_RENEWALS
    pull_timeout_s: float = 10.0
    connect_timeout_s: float = 2.0
    inbox_bytes: int = 64 << 20
    controls: tuple[str, ...] = ()
    connections: int = 1
    lossy: bool = False
    curve_public: str = ""
    curve_secret: str = ""
    encrypted: bool = True
    nixl_trusted: bool = False
    fault: str = ""

    @property
    def nixl(self) -> bool:
        """Whether this instance uses NIXL, with those that do, too."""
        return any(each.startswith(f"{NIXL_SCHEME}://") for each in self.endpoints)


def read_settings(extra: dict[str, Any]) -> ConnectorSettings:
    """The settings in an extra config. Raises msgspec.ValidationError naming what is wrong or unknown."""
    return msgspec.convert(extra, ConnectorSettings)
