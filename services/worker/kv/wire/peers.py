"""The importer's connections to exporters, kept and reused, and what it asks of them."""

import logging
import time
from dataclasses import replace
from itertools import pairwise

from services.worker.kv.errors import KvError
from services.worker.kv.shards import Source, exporting, sources, unasked
from services.worker.kv.wire.frames import Confirm, Message, Pull, Renew, encode_message
from services.worker.kv.wire.importing import DTYPES, Import, ImportShape, Part, PullLimits
from services.worker.kv.wire.transport import Link, Place, Transport
from shared.domain.kv import KvHandle

_log = logging.getLogger(__name__)
LOST_S = 10.0  # how long an unused link tries to reach an address where nobody is
IDLE_S = 600.0  # how long it keeps a connection that nobody uses
LANE_BYTES = 4 << 20  # of KV: less than this is not worth a connection of its own


class Peers:
    """Links by address, several where that is set; belongs to the puller's thread."""

    def __init__(self, transport: Transport, shape: ImportShape, limits: PullLimits, place: Place) -> None:
        self._transport = transport
        self._shape = shape
        self._window_bytes = limits.window_bytes
        self._connections = limits.connections
        self._place = place
        self._links: dict[tuple[str, int], Link] = {}
        self._last_pull_id = 0
        self._used_s: dict[tuple[str, int], float] = {}  # monotonic

    def ask(self, wanted: Import, silence_s: float) -> None:
        """Send a pull to every exporter rank that has layers and heads of ours, to be forgotten after so much silence.

        Where that is large each connection has some of the layers: all of them are busy with each chunk. Raises KvError
        or OSError, parts filled so far.
        """
        handle, shape = wanted.handle, self._shape
        asked = sources(shape.rank, shape.shards, exporting(handle, shape.shards))
        lanes = [(lane, part) for source in asked for lane, part in enumerate(self._shared_out(source, wanted))]
        window_bytes = max(1, self._window_bytes // len(lanes))
        for lane, source in lanes:
            link = self._link(handle.endpoints[source.rank], lane)
            self._last_pull_id += 1
            tokens = (wanted.token_start, wanted.token_end)
            part = Part(source, link, self._last_pull_id, tokens, window_bytes)
            wanted.parts[part.pull_id] = part
            self.send(
                link,
                Pull(
                    pull_id=part.pull_id,
                    transfer_id=handle.transfer_id,
                    generation=handle.generation,
                    fingerprint=handle.fingerprint,
                    codec=handle.codec,
                    layer_start=source.layer_start,
                    layer_end=source.layer_end,
                    token_start=wanted.token_start,
                    token_end=wanted.token_end,
                    head_start=source.head_start,
                    head_end=source.head_end,
                    rank=shape.rank,
                    ranks=shape.shards.ranks,
                    consumers=source.consumers,
                    credit_bytes=window_bytes,
                    timeout_s=silence_s,
                ),
            )

    def _shared_out(self, source: Source, wanted: Import) -> list[Source]:
        """The source's layers, by connection."""
        layers, heads = source.layer_end - source.layer_start, source.head_end - source.head_start
        dtype = DTYPES.get(wanted.handle.dtype)
        layer_bytes = (wanted.token_end - wanted.token_start) * 2 * heads * self._shape.head_dim
        size_bytes = layers * layer_bytes * (dtype.itemsize if dtype is not None else 1)
        count = max(1, min(self._connections, layers, size_bytes // LANE_BYTES))
        if count == 1:
            return [source]
        bounds = [source.layer_start + layers * each // count for each in range(count + 1)]
        return [replace(source, layer_start=start, layer_end=end) for start, end in pairwise(bounds)]

    def confirm(self, handle: KvHandle) -> None:
        """Tell the exporters that this rank needs no more of the handle; best effort, their leases end
        anyway.
        """
        rank, ours = self._shape.rank, self._shape.shards
        try:
            exporters = exporting(handle, ours)
            asked = {each.rank: each.consumers for each in sources(rank, ours, exporters)}
            if rank == 0:
                asked |= dict.fromkeys(unasked(ours, exporters), 1)
            for exporter, consumers in asked.items():
                message = Confirm(handle.transfer_id, handle.generation, rank, consumers)
                self.send(self._link(handle.endpoints[exporter], 0), message)
        except (KvError, OSError) as error:
            _log.debug("cannot confirm %s: %s", handle.transfer_id, error)

    def renew(self, handle: KvHandle) -> None:
        """Have the exporter ranks that this rank is going to pull from keep the handle; best effort, the next renewal
        follows soon.
        """
        try:
            for source in sources(self._shape.rank, self._shape.shards, exporting(handle, self._shape.shards)):
                link = self._link(handle.endpoints[source.rank], 0)
                self.send(link, Renew(handle.transfer_id, handle.generation))
        except (KvError, OSError) as error:
            _log.debug("cannot renew the lease of %s: %s", handle.transfer_id, error)

    def send(self, link: Link, message: Message) -> None:
        """Send, or not when the peer takes nothing: deadlines find that out."""
        link.send(encode_message(message))

    def close_unused(self, in_use: set[int]) -> None:
        """Close links that nobody has used for a while: exporters come and go, each with an address of its own.

        `in_use` holds the id() of links that imports wait for.
        """
        now_s = time.monotonic()
        for key, link in list(self._links.items()):
            unused_s = now_s - self._used_s[key]
            if id(link) not in in_use and unused_s > (IDLE_S if link.connected else LOST_S):
                link.close()
                del self._links[key], self._used_s[key]

    def _link(self, address: str, lane: int) -> Link:
        key = address, lane
        self._used_s[key] = time.monotonic()
        link = self._links.get(key)
        if link is None:
            link = self._links[key] = self._transport.connect(address, self._place)
        return link
