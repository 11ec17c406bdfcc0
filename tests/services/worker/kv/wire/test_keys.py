"""With keys, KV over TCP is TLS, or plain after a proof on one host; without the cluster's pair no peer gets any."""

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import zmq

from services.worker.kv.wire.importing import PullLimits
from services.worker.kv.wire.tcp_streams import HEARTBEAT, TlsContexts, identity, prefix
from services.worker.kv.wire.tcp_transport import TcpTransport, host_and_port
from tests.services.worker.kv.conftest import NIXL
from tests.services.worker.kv.rig import Capture, Rig, model_kv, stage
from tests.services.worker.kv.wire.peers import Proxy, Stranger

over_tcp = pytest.mark.parametrize("rig", ["kv"], indirect=True)
LIMITS = PullLimits(connect_timeout_s=3.0)
TOKENS = 600
SOON_S = 15.0


def pair() -> tuple[str, str]:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return public, secret


OURS, OTHERS = pair(), pair()
HALF = (OURS[0], OTHERS[1])
TLS, PROOF, NONE = {"curve": OURS}, {"curve": OURS, "encrypted": False}, {}


@pytest.mark.parametrize(
    ("rig", "exporters", "importers", "reason"),
    [
        pytest.param("kv", TLS, {"curve": OTHERS}, "CERTIFICATE", id="other keys"),
        pytest.param("kv", TLS, NONE, "keys", id="an importer without keys"),
        pytest.param("kv", NONE, TLS, "", id="an exporter without keys"),
        pytest.param("kv", TLS, {"curve": HALF}, "CERTIFICATE", id="the public key alone"),
        pytest.param("kv", PROOF, {"curve": OTHERS, "encrypted": False}, "key", id="proof: another key"),
        pytest.param("kv", PROOF, NONE, "keys", id="proof: an importer without a key"),
        pytest.param("kv", NONE, PROOF, "shows no key", id="proof: an exporter without a key"),
        pytest.param("kv", PROOF, TLS, "", id="proof: an importer that wants TLS"),
        pytest.param("kv", TLS, PROOF, "key", id="proof: an exporter that wants TLS"),
        pytest.param("nixl", TLS, {"curve": OTHERS}, "CERTIFICATE", id="nixl: other keys", marks=NIXL.marks),
    ],
    indirect=["rig"],
)
def test_wrong_keys_are_refused_and_disturb_no_friend(
    rig: Rig, exporters: dict[str, object], importers: dict[str, object], reason: str
) -> None:
    exporter, stranger = rig.endpoint(**exporters), rig.endpoint(limits=LIMITS, **importers)
    stage(exporter, model_kv(40))
    began = time.monotonic()
    error = rig.refused(stranger, rig.handle([exporter], 40))
    assert time.monotonic() - began < SOON_S
    assert error.startswith("unreachable")
    assert reason in error
    assert (exporter.stats().sent_bytes, exporter.stats().serving) == (0, 0)
    rig.transfer(exporter, name="friend", tokens=TOKENS)


def test_an_identity_follows_from_the_pair() -> None:
    assert identity(OURS) == identity(OURS)
    assert identity(OURS) != identity(OTHERS)
    assert identity(HALF)[1] != identity(OURS)[1]
    with pytest.raises(ValueError, match="keys"):
        TlsContexts(("abcde", "abcde"))


@over_tcp
def test_a_reader_that_pauses_gets_everything_over_tls(rig: Rig) -> None:
    """More than the sockets' buffers hold waits meanwhile: writes go on where they stopped, within a record."""
    tokens = 20_000
    limits = PullLimits(window_bytes=16 << 20)
    exporter, importer, kv = rig.endpoint(curve=OURS), rig.endpoint(curve=OURS, limits=limits), model_kv(tokens)
    stage(exporter, kv, each=2000)
    paused = Capture(0, tokens)
    paused.before = lambda: threading.Event().wait(0.01)
    rig.load(importer, rig.handle([exporter], tokens), capture=paused)
    assert rig.result().ok
    assert torch.equal(paused.kv, kv)


@over_tcp
def test_nothing_of_the_kv_can_be_read_on_the_way(rig: Rig) -> None:
    exporter, kv, wire = rig.endpoint(curve=OURS), model_kv(TOKENS), bytearray()
    stage(exporter, kv)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as far:
        address = f"kv://127.0.0.1:{server.getsockname()[1]}"
        got = rig.load(rig.endpoint(curve=OURS), rig.handle([], TOKENS, endpoints=(address,)))
        near, _ = server.accept()
        far.connect(host_and_port(exporter.address))
        other = {near: far, far: near}
        with near:
            while rig.results.empty():
                for each in select.select([near, far], [], [], 0.1)[0]:
                    data = each.recv(1 << 16)
                    wire += data
                    other[each].sendall(data)
            assert rig.result().ok
    assert torch.equal(got.kv, kv)
    assert len(wire) > kv.numel() * 4
    assert kv[0, 0, :4].numpy().tobytes() not in wire
    assert b"Frame" not in wire


def ends(read: Callable[[], bytes]) -> bool:
    """Whether a connection ends, by an end or an error."""
    try:
        return not read()
    except OSError:
        return True


@over_tcp
def test_a_certificate_of_the_same_name_that_is_not_ours_is_refused(rig: Rig) -> None:
    exporter = rig.endpoint(curve=OURS)
    context = TlsContexts(OTHERS).client
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection(host_and_port(exporter.address), timeout=10) as plain:
        assert ends(lambda: context.wrap_socket(plain).recv(1))
    rig.transfer(exporter)


@over_tcp
def test_a_peer_that_begins_no_handshake_is_dropped_and_holds_up_no_other(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.kv.wire.tcp_transport._GREETING_S", 1.0)
    exporter = rig.endpoint()
    with socket.create_connection(host_and_port(exporter.address), timeout=10) as silent:
        rig.transfer(exporter)
        assert silent.recv(100)  # its greeting, and then the end
        assert ends(lambda: silent.recv(100))


FIRST = prefix(36, 0) + b"PKA1" + bytes(32)  # the importer's random number


@over_tcp
@pytest.mark.parametrize(
    "data",
    [HEARTBEAT, prefix(36, 0) + b"PKA0" + bytes(32), 2 * FIRST, bytes(200)],
    ids=["a greeting", "another magic", "a wrong proof", "garbage"],
)
def test_a_stranger_without_a_proof_is_disconnected(rig: Rig, data: bytes) -> None:
    exporter = rig.endpoint(**PROOF)
    with socket.create_connection(host_and_port(exporter.address), timeout=20) as stranger:
        stranger.sendall(data)
        with suppress(ConnectionError):
            while stranger.recv(1000):
                pass
    rig.transfer(exporter)


@over_tcp
def test_a_proof_is_of_one_connection(rig: Rig) -> None:
    """The server's number is another one each time."""
    exporter, answers = rig.endpoint(**PROOF), set()
    for _ in range(2):
        with socket.create_connection(host_and_port(exporter.address), timeout=20) as stranger:
            stranger.sendall(FIRST)
            answers.add(stranger.recv(200))
    assert len(answers) == 2


@over_tcp
def test_a_tls_client_does_not_connect_to_a_plain_server(rig: Rig) -> None:
    with Proxy(rig.endpoint().address) as proxy, Stranger(proxy.address):
        transport = TcpTransport(OURS)
        link = transport.connect(proxy.address)
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            transport.wait(0.1)
            assert not link.connected
        transport.close()
