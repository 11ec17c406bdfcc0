"""Addresses of KV endpoints over TCP, and their names resolved without holding up the thread that moves KV."""

import ipaddress
import socket
import threading
from collections.abc import Callable

Where = tuple[int, tuple[object, ...]]  # family and socket address
Told = Callable[[list[Where], str], None]  # places, or none of them and the reason


def host_and_port(address: str) -> tuple[str, int]:
    """Of `scheme://host:port`; a port of `*` is 0. Raises OSError for what is no such address."""
    _, found, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not found or not host or not (port == "*" or (port.isdecimal() and int(port) < 65536)):
        raise OSError(f"{address!r} is no address of a host and a port")
    return host, 0 if port == "*" else int(port)


def numeric(host: str, port: int) -> list[Where]:
    """Where a host is that is given by its number; none for a name."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return []
    return [(socket.AF_INET, (host, port)) if version == 4 else (socket.AF_INET6, (host, port, 0, 0))]


def resolve(host: str, port: int) -> list[Where]:
    """Where a host may be, IPv4 first, as ZeroMQ's sockets have it. May take seconds. Raises OSError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # an empty or overlong label
        raise OSError(f"{host!r} is no name of a host: {error}") from error
    places: list[Where] = [(int(family), where) for family, _, _, _, where in found]
    return sorted(places, key=lambda place: place[0] != socket.AF_INET)


class Resolver:
    """Looks names up in threads of their own: a name server that is silent holds up nobody but who waits for it.

    One thread a name at a time, however often it is asked for meanwhile.
    """

    def __init__(self, on_done: Callable[[Callable[[], None]], None]) -> None:
        """`on_done(tell)` is called in such a thread; `tell` is to be called on the owner's."""
        self._on_done = on_done
        self._asking: dict[tuple[str, int], list[Told]] = {}

    def look_up(self, host: str, port: int, told: Told) -> None:
        """`told(places, error)` once it is known."""
        asking = self._asking.get((host, port))
        if asking is not None:
            asking.append(told)
            return
        self._asking[host, port] = [told]
        threading.Thread(target=self._run, args=(host, port), name="kv-resolve", daemon=True).start()

    def _run(self, host: str, port: int) -> None:
        places: list[Where] = []
        try:
            places, error = resolve(host, port), ""
        except OSError as failure:
            error = f"{host}: {failure}"

        def tell() -> None:
            for each in self._asking.pop((host, port)):
                each(places, error)

        self._on_done(tell)
