"""The importer's connections to exporters, kept and reused, and what it asks of them."""

import logging
import time

from services.worker.kv.errors import KvError
from services.worker.kv.shards import exporting, sources, unasked
from services.worker.kv.wire.frames import Confirm, Message, Pull, encode_message
from services.worker.kv.wire.importing import Import, ImportShape, Part
from services.worker.kv.wire.transport import Link, Transport
from shared.domain.kv import KvHandle

_log = logging.getLogger(__name__)
LOST_S = 10.0  # how long an unused link tries to reach an address where nobody is
IDLE_S = 600.0  # how long it keeps a connection that nobody uses


class Peers:
    """One link an address; belongs to the puller's thread."""

    def __init__(self, transport: Transport, shape: ImportShape, window_bytes: int) -> None:
        self._transport = transport
        self._shape = shape
        self._window_bytes = window_bytes
        self._links: dict[str, Link] = {}
        self._last_pull_id = 0
        self._used_s: dict[str, float] = {}  # monotonic, by address

    def ask(self, wanted: Import, silence_s: float) -> None:
        """Send a pull to every exporter rank that has layers and heads of ours, to be forgotten after so much silence.

        Raises KvError or OSError, parts filled so far.
        """
        handle, shape = wanted.handle, self._shape
        asked = sources(shape.rank, shape.shards, exporting(handle, shape.shards))
        window_bytes = max(1, self._window_bytes // len(asked))
        for source in asked:
            link = self._link(handle.endpoints[source.rank])
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
                self.send(self._link(handle.endpoints[exporter]), message)
        except (KvError, OSError) as error:
            _log.debug("cannot confirm %s: %s", handle.transfer_id, error)

    def send(self, link: Link, message: Message) -> None:
        """Send, or not when the peer takes nothing: deadlines find that out."""
        link.send(encode_message(message))

    def close_unused(self, in_use: set[int]) -> None:
        """Close links that nobody has used for a while: exporters come and go, each with an address of its own.

        `in_use` holds the id() of links that imports wait for.
        """
        now_s = time.monotonic()
        for address, link in list(self._links.items()):
            unused_s = now_s - self._used_s[address]
            if id(link) not in in_use and unused_s > (IDLE_S if link.connected else LOST_S):
                link.close()
                del self._links[address], self._used_s[address]

    def _link(self, address: str) -> Link:
        self._used_s[address] = time.monotonic()
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = self._transport.connect(address)
        return link
