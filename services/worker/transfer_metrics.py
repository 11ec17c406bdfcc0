"""KV that came here, by what carried it: the exporter is in no label, so that series grow with instances, not pairs."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram

from shared.domain.kv import KvHandle, TransferOutcome, TransferReport
from shared.runtime.metrics import Bound

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
NOTHING = "none"  # no transport carried anything


class TransferMetrics:
    """Of the importing instance. `then` hears of each, too."""

    def __init__(self, registry: CollectorRegistry, then: Callable[[KvHandle, TransferReport], None]) -> None:
        self._then = then
        by = ["transport", "codec"]
        imports = Counter(
            "polyphase_kv_imports",
            "KV of others that jobs here came with, by how that went.",
            [*by, "outcome"],
            registry=registry,
        )
        moved = Counter("polyphase_kv_import_bytes", "Of those, bytes on the wire.", by, registry=registry)
        tokens = Counter("polyphase_kv_import_tokens", "Of those, prompt tokens.", by, registry=registry)
        took = Histogram(
            "polyphase_kv_import_seconds", "Time of those that moved bytes.", by, buckets=_SECONDS, registry=registry
        )
        self._imports, self._bytes, self._tokens, self._took = Bound(imports), Bound(moved), Bound(tokens), Bound(took)

    def ended(self, handle: KvHandle, report: TransferReport) -> None:
        """Count one, and hand it on."""
        self._then(handle, report)
        transport, codec = report.transport or NOTHING, handle.codec.value
        self._imports.of(transport, codec, report.outcome.value).inc()
        if report.outcome is TransferOutcome.PULLED:
            self._bytes.of(transport, codec).inc(report.wire_bytes)
            self._tokens.of(transport, codec).inc(report.tokens)
            self._took.of(transport, codec).observe(max(0.0, report.ended_s - report.started_s))
