"""Many streams open at once, read by one process that spends next to nothing on each: a protocol a stream, no tasks."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

_EVENT, _DONE, _ERROR = b"data: {", b"data: [DONE]", b'data: {"error"'
_TOKENS = b'"completion_tokens":'  # of the usage that the last event of a whole answer tells


@dataclass(slots=True)
class Watched:
    """One stream as it was seen. Times are seconds on the performance counter; `fault` is empty for a whole one."""

    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    events: int = 0
    tokens: int = 0  # as the server counts them, in the end
    done: bool = False
    fault: str = ""
    gaps: list[tuple[float, float]] = field(default_factory=list)  # (when it ended, how long): those over `slow_s`

    def late(self, after_s: float, before_s: float) -> int:
        """How many slow gaps ended in that time."""
        return sum(after_s <= when < before_s for when, _ in self.gaps)


class _Reader(asyncio.Protocol):
    """Counts a stream's events as they come; never waits, never parses JSON."""

    def __init__(self, request: bytes, slow_s: float) -> None:
        self.seen = Watched(time.perf_counter())
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._slow_s = slow_s
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        data = self._tail + data
        whole = data.rfind(b"\n") + 1
        self._tail = data[whole:]
        self._take(data[:whole])

    def _take(self, lines: bytes) -> None:
        seen, now = self.seen, time.perf_counter()
        if lines.startswith(b"HTTP/1.1 ") and not lines.startswith(b"HTTP/1.1 200 "):
            seen.fault = lines[:200].decode(errors="replace")
        if (at := lines.find(_ERROR)) >= 0:
            seen.fault = lines[at:][:200].decode(errors="replace")
        seen.done = seen.done or _DONE in lines
        if (at := lines.rfind(_TOKENS)) >= 0:
            digits = lines[at + len(_TOKENS) :][:12]
            seen.tokens = int(digits[: len(digits) - len(digits.lstrip(b"0123456789"))])
        if events := lines.count(_EVENT):
            if seen.first_s and now - seen.last_s > self._slow_s:
                seen.gaps.append((now, now - seen.last_s))
            seen.first_s, seen.last_s = seen.first_s or now, now
            seen.events += events
            if not self.began.done():
                self.began.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.seen.done:
            self.seen.fault = self.seen.fault or f"the stream ended without [DONE]: {exc}"
        for future in (self.began, self.ended):
            if not future.done():
                future.set_result(None)


class Crowd:
    """Streams of one server, opened one after the other and held until each has ended."""

    def __init__(self, host: str, port: int, slow_s: float) -> None:
        """slow_s: from how long on a gap between two events of a stream is noted."""
        self._address = (host, port)
        self._slow_s = slow_s
        self._readers: list[_Reader] = []

    async def open(self, bodies: Sequence[dict[str, object]], path: str, per_s: float) -> None:
        """Open a stream for each body, so many a second, and wait until each has its first event. Raises OSError."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        for number, body in enumerate(bodies):
            await asyncio.sleep(max(0.0, began + number / per_s - loop.time()))
            request = _request(path, body)
            _, reader = await loop.create_connection(partial(_Reader, request, self._slow_s), *self._address)
            self._readers.append(reader)
        await asyncio.gather(*(reader.began for reader in self._readers))

    async def ended(self, timeout_s: float) -> list[Watched]:
        """What was seen of each, once all have ended. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*(reader.ended for reader in self._readers))
        return [reader.seen for reader in self._readers]


def _request(path: str, body: dict[str, object]) -> bytes:
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload
