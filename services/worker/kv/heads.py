"""Which rank holds which KV heads, and whom an importer rank therefore asks."""

from dataclasses import dataclass

from services.worker.kv.errors import KvError, KvFault


@dataclass(frozen=True, slots=True)
class Source:
    """Heads [head_start, head_end) come from exporter `rank`, which `consumers` importer ranks ask."""

    rank: int
    head_start: int
    head_end: int
    consumers: int


def heads_of(rank: int, ranks: int, kv_heads: int) -> tuple[int, int]:
    """KV heads [start, end) of a tensor-parallel rank; with more ranks than heads, neighbours hold the same
    one.

    Raises KvError(INVALID) when they do not divide evenly.
    """
    if ranks <= kv_heads and kv_heads % ranks == 0:
        each = kv_heads // ranks
        return rank * each, (rank + 1) * each
    if ranks > kv_heads and ranks % kv_heads == 0:
        head = rank // (ranks // kv_heads)
        return head, head + 1
    raise KvError(KvFault.INVALID, f"{kv_heads} KV heads over {ranks} ranks")


def sources(rank: int, importers: int, exporters: int, kv_heads: int) -> list[Source]:
    """Whom importer `rank` asks for its heads, each head once, in head order. Raises KvError(INVALID)."""
    asked = [_asked(each, importers, exporters, kv_heads) for each in range(importers)]
    consumers = [sum(exporter in ranges for ranges in asked) for exporter in range(exporters)]
    return [Source(exporter, start, end, consumers[exporter]) for exporter, (start, end) in asked[rank].items()]


def unasked(importers: int, exporters: int, kv_heads: int) -> list[int]:
    """Exporter ranks that nobody asks, since they hold copies. Raises KvError(INVALID)."""
    asked = [_asked(each, importers, exporters, kv_heads) for each in range(importers)]
    return [exporter for exporter in range(exporters) if not any(exporter in ranges for ranges in asked)]


def _asked(rank: int, importers: int, exporters: int, kv_heads: int) -> dict[int, tuple[int, int]]:
    start, end = heads_of(rank, importers, kv_heads)
    ranges: dict[int, tuple[int, int]] = {}
    at = start
    for exporter in range(exporters):
        first, last = heads_of(exporter, exporters, kv_heads)
        if first <= at < min(last, end):
            ranges[exporter] = (at, min(last, end))
            at = min(last, end)
    return ranges
