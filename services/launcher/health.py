"""Asking a process over HTTP whether it is well, cheaply enough to do so every second.

Run as `python -m services.launcher.health` it is a container's health check: exit code 0 if POLYPHASE_HEALTH_URL
answers 2xx.
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
    """Something that can be asked whether it is well."""

    async def ask(self, deadline_s: float) -> str:
        """What is wrong, within `deadline_s`; empty if nothing is."""
        ...

    def close(self) -> None:
        """Let go of what is held."""
        ...


class HttpHealth:
    """A URL that answers 2xx while its process is well.

    The connection is kept: a process that is flooded with new connections is not dead for that. After a question that
    was not answered in time the next one opens another.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        query = f"?{parts.query}" if parts.query else ""
        self._request = f"GET {parts.path or '/'}{query} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, deadline_s: float) -> str:
        """What is wrong, within `deadline_s`; empty if nothing is."""
        try:
            async with asyncio.timeout(deadline_s):
                return await self._ask()
        except TimeoutError:
            self.close()
            return f"no answer within {deadline_s:g} s"
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            self.close()
            return f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:  # an answer may still come, and would be taken for the next one's
            self.close()
            raise

    def close(self) -> None:
        """Drop the connection."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _ask(self) -> str:
        if self._streams is not None:
            try:
                return await self._exchange(*self._streams)
            except (OSError, EOFError):  # servers close what was idle for long
                self.close()
        self._streams = await asyncio.open_connection(self._host, self._port, limit=_HEAD_BYTES)
        return await self._exchange(*self._streams)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        writer.write(self._request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status_line, *lines = head.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length, kept = headers.get("content-length", ""), status_line.startswith("HTTP/1.1 ")
        body = await reader.readexactly(int(length)) if length else b""
        if not kept or not length or headers.get("connection", "").lower() == "close":
            self.close()
        status = int(status_line.partition(" ")[2][:3])
        return "" if 200 <= status < 300 else f"HTTP {status} {body[:300].decode(errors='replace')}".rstrip()


async def _probe(url: str) -> bool:
    health = HttpHealth(url)
    fault = await health.ask(_PROBE_S)
    health.close()
    if fault:
        print(fault, file=sys.stderr)
    return not fault


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(_probe(os.environ[HEALTH_URL])) else 1)
