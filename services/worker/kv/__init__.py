"""KV transfer between instances: export from the prefill side, import on the decode side.

The engine loads the connector (`kv.vllm.connector`: its settings and its requests' parameters); the worker process
sends operations to the connector's ranks (`kv.rank_control`) and receives their events (`kv.rank_events`), both defined
in `kv.rank_messages`, and the prefill and decode services use them through `kv.port`. A rank's own side is
`kv.wire.endpoint`.

A request that exports has its prompt's KV staged while it is computed, from token 0, prefix-cache hits included. The
worker may send the handle before the prefill has begun: pulls wait. An aborted request drops its staging; otherwise it
is kept until all importer ranks have confirmed, `Release` is called, or the lease expires. A transfer id is used once.
"""

from enum import StrEnum

from shared.domain.kv import KvHandle


class KvFault(StrEnum):
    """Stable codes; they begin `PullEnded.error` and travel from the exporter to the importer."""

    STALE = "stale_generation"  # the exporter has been restarted since the handle was made
    FINGERPRINT = "fingerprint_mismatch"  # another model
    ADAPTER = "adapter_mismatch"  # computed by another LoRA adapter than the request's, or by the base model
    EXPIRED = "expired_lease"
    RELEASED = "released"  # dropped by its owner, or taken by all its importers
    REFUSED = "refused"  # the exporter had no room to stage it
    INVALID = "invalid_request"
    CODEC = "codec"  # the exporter could not code it (values that are not finite)
    TIMEOUT = "timeout"  # nothing came for too long, or the rest did not come before the deadline
    UNREACHABLE = "unreachable"
    PEER_LOST = "peer_lost"
    NIXL = "nixl"  # the exporter's memory could not be read
    CHECKSUM = "checksum"
    PROTOCOL = "protocol"  # frames that do not belong together, overlap, or leave gaps
    CANCELLED = "cancelled"
    UNSALTED = "unsalted"  # KV that this engine would not have computed, for a request whose blocks others could find
    SKIPPED = "skipped"  # the engine did not want external KV for this request
    GAP = "gap"  # the engine has not the tokens before the first one of the handle
    STOPPED = "stopped"  # this side is shutting down
    INTERNAL = "internal"


class KvError(Exception):
    """A transfer cannot go on; the importer recomputes. `fault` is stable, the message is for people."""

    def __init__(self, fault: KvFault, message: str = "") -> None:
        super().__init__(f"{fault.value}: {message}" if message else fault.value)
        self.fault = fault
        self.message = message


_LOSSY, _MIXED = "lossy-kv:", "mixed-precision:"


def lossy_salt(transfer_id: str) -> str:
    """Cache salt of a request that imports lossy KV: its blocks are found by no other request."""
    return f"{_LOSSY}{transfer_id}"


def mixed_salt(precision: str, salt: str) -> str:
    """Cache salt of a request with that salt that imports KV of another precision than the importer's: its blocks are
    found only by requests that import KV of that precision, too.
    """
    return f"{_MIXED}{precision}:{salt}"


def import_salt(handle: KvHandle, precision: str, salt: str) -> str:
    """The cache salt that a request with that salt of its own has at an engine of that precision if it imports the
    handle's KV: no other request may find blocks that the engine would not have computed.
    """
    if handle.codec.lossy:
        return lossy_salt(handle.transfer_id)
    salt = handle.salt or salt
    return salt if handle.precision == precision else mixed_salt(handle.precision, salt)


def may_import(handle: KvHandle, precision: str, salt: str) -> bool:
    """Whether a request with that cache salt may import the handle's KV, whatever the salt was from which `import_salt`
    has made it.
    """
    if handle.codec.lossy or handle.salt:
        return salt == import_salt(handle, precision, "")
    return handle.precision == precision or salt.startswith(mixed_salt(handle.precision, ""))


def holds_exact_kv(salt: str) -> bool:
    """Whether blocks under that salt hold what the engine computes itself."""
    return not salt.startswith((_LOSSY, _MIXED))
