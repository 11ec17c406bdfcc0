"""Where a gateway process listens: on a port alone, or on one that it shares and on one of its own beside it."""

import socket

from gateway.settings import GatewaySettings
from shared.errors import Conflict

BACKLOG = 2048  # uvicorn's


def sockets_of(settings: GatewaySettings) -> list[socket.socket] | None:
    """Those of a process that shares its port; None where the server opens its only one. Raises Conflict.

    The kernel gives each new connection to one of the processes that listen on the port, all of one user.
    """
    if settings.processes == 1:
        return None
    shared = _listening(settings.host, settings.port, share=True)
    try:
        return [shared, _listening(settings.host, settings.own_port)]
    except BaseException:
        shared.close()
        raise


def _listening(host: str, port: int, *, share: bool = False) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise Conflict(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise Conflict(f"cannot listen on {host}, port {port}: {error.strerror}") from error
    return listening
