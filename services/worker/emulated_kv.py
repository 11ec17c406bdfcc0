"""The KV side of an emulated instance: handles and reports without bytes."""

from collections.abc import Callable

from shared.domain.kv import Codec, KvHandle, TransferOutcome, TransferReport
from shared.runtime.tasks import Background


class EmulatedPort:
    """Exports are always ready, imports are always there; nothing is moved."""

    staged_bytes = 0

    def __init__(self, template: KvHandle) -> None:
        self._template = template

    def start(self, tasks: Background) -> None:
        """Nothing runs in the background."""

    def handle(self, transfer_id: str, tokens: int, codec: Codec) -> KvHandle:
        """A handle of ours."""
        t = self._template
        return KvHandle(
            transfer_id, t.instance_id, t.generation, t.fingerprint, t.endpoints, tokens, t.dtype, codec
        )

    def when_staged(self, transfer_id: str, callback: Callable[[], None]) -> None:
        """No chunk is ever staged ahead of the rest."""

    def forget(self, transfer_id: str) -> None:
        """Nothing is kept."""

    async def import_report(self, transfer_id: str) -> TransferReport:
        """An import that cost nothing."""
        return TransferReport(TransferOutcome.PULLED)

    async def release(self, transfer_ids: list[str]) -> None:
        """Nothing is staged."""

    async def prefetch(self, handle: KvHandle, timeout_s: float) -> None:
        """Nothing to fetch."""

    async def drop(self, transfer_id: str) -> None:
        """Nothing was fetched."""
