"""Health checks over HTTP, cheap enough for one every two seconds.

Run as `python -m services.launcher.health` it is the health check of a container: exit code 0 if
POLYPHASE_HEALTH_URL answers 2xx.
"""

import asyncio
import os
import sys
from typing import Protocol
from urllib.parse import urlsplit

HEALTH_URL = "POLYPHASE_HEALTH_URL"
_PROBE_S = 4.0
_HEAD_BYTES = 16 << 10


class Health(Protocol):
    async def check(self, deadline_s: float) -> str:
        """The fault, found within `deadline_s`; empty if there is none."""
        ...


class HttpHealth:
    """A URL that answers 2xx while its process is healthy.

    Each check opens a new connection, as clients do: a process that answers only on open connections serves none.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        query = f"?{parts.query}" if parts.query else ""
        head = f"GET {parts.path or '/'}{query} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
        self._request = head.encode()

    async def check(self, deadline_s: float) -> str:
        try:
            async with asyncio.timeout(deadline_s):
                return await self._fetch()
        except TimeoutError:
            return f"no answer within {deadline_s:g} s"
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            return f"{type(error).__name__}: {error}"

    async def _fetch(self) -> str:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=_HEAD_BYTES)
        try:
            writer.write(self._request)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status_line, *lines = head.split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            length = headers.get("content-length", "")
            body = await reader.readexactly(int(length)) if length else b""
        finally:
            writer.transport.abort()
        status = int(status_line.partition(" ")[2][:3])
        return "" if 200 <= status < 300 else f"HTTP {status} {body[:300].decode(errors='replace')}".rstrip()


async def _probe(url: str) -> bool:
    fault = await HttpHealth(url).check(_PROBE_S)
    if fault:
        print(fault, file=sys.stderr)
    return not fault


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(_probe(os.environ[HEALTH_URL])) else 1)
