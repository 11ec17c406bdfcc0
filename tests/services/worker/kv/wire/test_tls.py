"""With keys, KV over TCP is TLS, and nobody gets or gives anything without the cluster's pair."""

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable

import pytest
import torch
import zmq

from services.worker.kv.wire.importing import PullLimits
from services.worker.kv.wire.tcp_streams import TlsContexts, host_and_port, identity
from services.worker.kv.wire.tcp_transport import TcpTransport
from tests.services.worker.kv.rig import Capture, Rig, model_kv, stage
from tests.services.worker.kv.wire.hostile import Stranger, assert_serves
from tests.services.worker.kv.wire.proxy import Proxy

pytestmark = pytest.mark.parametrize("rig", ["kv"], indirect=True)
LIMITS = PullLimits(connect_timeout_s=1.0)
TOKENS = 600
SOON_S = 6.0


def pair() -> tuple[str, str]:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return public, secret


OURS, OTHERS = pair(), pair()


def ended(read: Callable[[], bytes]) -> bool:
    """Whether a connection ends, by an end or an error."""
    try:
        return not read()
    except OSError:
        return True


def test_the_same_keys_give_the_same_identity_and_others_another(rig: Rig) -> None:
    assert identity(OURS) == identity(OURS)
    assert identity(OURS) != identity(OTHERS)
    assert identity((OURS[0], OTHERS[1]))[1] != identity(OURS)[1]


def test_keys_that_are_none_are_an_error(rig: Rig) -> None:
    with pytest.raises(ValueError, match="keys"):
        TlsContexts(("abcde", "abcde"))


def test_a_reader_that_pauses_gets_everything_over_tls(rig: Rig) -> None:
    """More than the sockets' buffers hold waits meanwhile: writes go on where they stopped, within a record."""
    tokens = 20_000
    limits = PullLimits(window_bytes=16 << 20)
    exporter, importer, kv = rig.endpoint(curve=OURS), rig.endpoint(curve=OURS, limits=limits), model_kv(tokens)
    for first in range(0, tokens, 2000):
        stage(exporter, kv, start=first, end=first + 2000)
    paused = Capture(0, tokens)
    paused.before = lambda: threading.Event().wait(0.01)
    rig.load(importer, rig.handle([exporter], tokens), capture=paused)
    assert rig.result().ok
    assert torch.equal(paused.kv, kv)


def test_nothing_of_the_kv_can_be_read_on_the_way(rig: Rig) -> None:
    exporter, kv = rig.endpoint(curve=OURS), model_kv(TOKENS)
    stage(exporter, kv)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as far:
        importer = rig.endpoint(curve=OURS)
        address = f"kv://127.0.0.1:{server.getsockname()[1]}"
        got = rig.load(importer, rig.handle([], TOKENS, endpoints=(address,)))
        near, _ = server.accept()
        far.connect(host_and_port(exporter.address))
        heard = overheard(near, far, rig)
    assert torch.equal(got.kv, kv)
    assert len(heard) > kv.numel() * 4
    assert kv[0, 0, :4].numpy().tobytes() not in heard
    assert b"Frame" not in heard


def overheard(near: socket.socket, far: socket.socket, rig: Rig) -> bytes:
    """What two connections say to each other until the import ends."""
    heard = bytearray()
    other = {near: far, far: near}
    while rig.results.empty():
        for each in select.select([near, far], [], [], 0.1)[0]:
            data = each.recv(1 << 16)
            heard += data
            other[each].sendall(data)
    assert rig.result().ok
    near.close()
    return bytes(heard)


def test_a_certificate_of_the_same_name_that_is_not_ours_is_refused(rig: Rig) -> None:
    """Who has made a certificate with all of our names, but not our key."""
    exporter = rig.endpoint(curve=OURS)
    context = TlsContexts(OTHERS).client
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection(host_and_port(exporter.address), timeout=10) as plain:
        plain.settimeout(10)
        assert ended(lambda: context.wrap_socket(plain).recv(1))
    stage(exporter, model_kv(40))
    rig.load(rig.endpoint(curve=OURS), rig.handle([exporter], 40))
    assert rig.result().ok


def test_a_peer_that_begins_no_handshake_is_dropped_and_holds_up_nobody(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.kv.wire.tcp_transport._GREETING_S", 0.3)
    exporter = rig.endpoint()
    with socket.create_connection(host_and_port(exporter.address), timeout=10) as silent:
        silent.settimeout(10)
        assert_serves(rig, exporter)
        greeting = silent.recv(100)  # its hello, and then the end
        assert greeting
        assert ended(lambda: silent.recv(100))


def test_a_client_of_ours_meets_one_without_a_word_of_tls(rig: Rig) -> None:
    """It gives up soon, and says that it is not connected."""
    with Proxy(rig.endpoint().address) as proxy, Stranger(proxy.address):
        transport = TcpTransport(OURS)
        link = transport.connect(proxy.address)
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            transport.wait(0.1)
            assert not link.connected
        transport.close()
