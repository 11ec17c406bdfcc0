"""A lean streaming client for measurements: what a general HTTP library costs a chunk would hide what we measure."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from shared.domain.job import itl_met


@dataclass(frozen=True, slots=True)
class StreamResult:
    """One streamed completion as the client saw it. Times are seconds from its sending."""

    ttft_s: float
    total_s: float
    chunks: int  # events that carried a token
    last_s: float = 0.0  # the last of those
    gaps_s: tuple[float, ...] = ()  # between one of those and the next

    def gaps_met(self, itl_s: float) -> bool:
        """Whether at most one of its gaps in a hundred exceeds the target."""
        return itl_met(len(self.gaps_s), sum(gap_s > itl_s for gap_s in self.gaps_s))


class StreamFailed(Exception):
    """The server answered something else than a complete stream."""


class Refused(StreamFailed):
    """The server was too busy."""


async def stream_completion(
    host: str, port: int, body: dict[str, object], api_key: str = "", slo: str = "", path: str = "/v1/completions"
) -> StreamResult:
    """Send one streaming request on a connection of its own and read it to the end. slo: its class, "" for the default.

    Raises Refused, StreamFailed, OSError.
    """
    payload = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        began = time.perf_counter()
        writer.write(
            b"POST %s HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\n%sContent-Length: %d\r\n\r\n"
            % (path.encode(), _headers(api_key, slo), len(payload))
            + payload
        )
        status = await reader.readline()
        if b" 429 " in status:
            raise Refused(f"{status!r}")
        if b" 200 " not in status:
            raise StreamFailed(f"{status!r}: {(await reader.read(2000))[-500:]!r}")
        first, last, gaps = 0.0, 0.0, list[float]()
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                if line.startswith(b'data: {"error"'):
                    raise StreamFailed(line.decode())
                now = time.perf_counter() - began
                if first:
                    gaps.append(now - last)
                first, last = first or now, now
            elif line.startswith(b"data: [DONE]"):
                return StreamResult(first, time.perf_counter() - began, len(gaps) + bool(first), last, tuple(gaps))
        raise StreamFailed("the stream ended without [DONE]")
    finally:
        writer.close()


def _headers(api_key: str, slo: str) -> bytes:
    key = b"Authorization: Bearer %s\r\n" % api_key.encode() if api_key else b""
    return key + (b"X-Polyphase-SLO: %s\r\n" % slo.encode() if slo else b"")


async def run_load(
    host: str, port: int, bodies: Sequence[dict[str, object]], concurrency: int, path: str = "/v1/completions"
) -> list[StreamResult]:
    """All requests, `concurrency` at a time, in order of their sending."""
    pending = list(enumerate(bodies))[::-1]
    results: dict[int, StreamResult] = {}

    async def worker() -> None:
        while pending:
            index, body = pending.pop()
            results[index] = await stream_completion(host, port, body, path=path)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    return [results[index] for index in range(len(bodies))]
