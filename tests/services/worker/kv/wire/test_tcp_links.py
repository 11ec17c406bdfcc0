"""How KV links over TCP are made and watched: names, greetings, silence, and what an idle one costs."""

import os
import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch

from services.worker.kv.wire import tcp_link, tcp_streams
from services.worker.kv.wire.importing import PullLimits
from services.worker.kv.wire.tcp_framing import HEARTBEAT
from services.worker.kv.wire.tcp_streams import Where, host_and_port, numeric, resolve
from services.worker.kv.wire.tcp_transport import TcpTransport
from tests.services.worker.kv.rig import Rig, model_kv, stage
from tests.services.worker.kv.wire.proxy import framed

TOKENS = 40


@pytest.mark.parametrize(
    ("address", "found"),
    [("kv://10.0.0.3:7100", ("10.0.0.3", 7100)), ("kv://[::1]:7100", ("::1", 7100)), ("kv://name:*", ("name", 0))],
)
def test_addresses(address: str, found: tuple[str, int]) -> None:
    assert host_and_port(address) == found


@pytest.mark.parametrize("address", ["", "10.0.0.3:7100", "kv://:7100", "kv://host", "kv://host:70000", "kv://host:x"])
def test_what_is_no_address_is_an_error(address: str) -> None:
    with pytest.raises(OSError, match="is not an address"):
        host_and_port(address)


def test_numbers_need_no_name_server_and_names_prefer_ipv4() -> None:
    assert numeric("127.0.0.1", 5) == [(socket.AF_INET, ("127.0.0.1", 5))]
    assert numeric("localhost", 5) == []
    assert resolve("localhost", 5)[0] == (socket.AF_INET, ("127.0.0.1", 5))


def test_a_name_that_cannot_be_is_an_error() -> None:
    with pytest.raises(OSError):  # noqa: PT011
        resolve("a" * 70 + ".b", 5)


@pytest.mark.parametrize("rig", ["kv"], indirect=True)
def test_an_exporter_may_be_given_by_name(rig: Rig) -> None:
    exporter, importer, kv = rig.endpoint(address="kv://localhost:*"), rig.endpoint(), model_kv(TOKENS)
    assert exporter.address.startswith("kv://localhost:")
    stage(exporter, kv)
    got = rig.load(importer, rig.handle([exporter], TOKENS))
    assert rig.result().ok
    assert torch.equal(got.kv, kv)


@pytest.mark.parametrize("rig", ["kv"], indirect=True)
def test_a_name_server_that_is_silent_holds_up_nobody_else(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    silent, asked = threading.Event(), []

    def slow(host: str, port: int) -> list[Where]:
        asked.append(host)
        silent.wait(20)
        raise OSError("no answer")

    exporter, importer = rig.endpoint(), rig.endpoint(limits=PullLimits(connect_timeout_s=4.0))
    monkeypatch.setattr(tcp_streams, "resolve", slow)
    handle = rig.handle([], TOKENS, "named", endpoints=("kv://far.invalid:7",))
    rig.load(importer, handle)
    for number in range(5):
        kv = model_kv(TOKENS, seed=number)
        stage(exporter, kv, f"t{number}")
        began = time.monotonic()
        got = rig.load(importer, rig.handle([exporter], TOKENS, f"t{number}"))
        result = rig.result()
        assert (result.ok, result.transfer_id) == (True, f"t{number}")
        assert time.monotonic() - began < 2.0
        assert torch.equal(got.kv, kv)
    assert rig.result().error.startswith("unreachable")
    assert asked == ["far.invalid"]  # once, however often the link tried
    silent.set()


def test_idle_endpoints_cost_nothing_that_can_be_measured(rig: Rig) -> None:
    exporter, importer, kv = rig.endpoint(), rig.endpoint(), model_kv(TOKENS)
    stage(exporter, kv)
    rig.load(importer, rig.handle([exporter], TOKENS))
    assert rig.result().ok
    threads = [importer._puller._thread, exporter._server._thread]
    before = [_cpu_s(thread.native_id) for thread in threads]
    threading.Event().wait(2.0)
    spent = [_cpu_s(thread.native_id) - at for thread, at in zip(threads, before, strict=True)]
    assert max(spent) < 0.02  # of 2 s: a hundredth of a core, on a machine that is busy


def _cpu_s(thread: int | None) -> float:
    with open(f"/proc/{os.getpid()}/task/{thread}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


def _until(transport: TcpTransport, condition: Callable[[], bool], within_s: float = 10.0) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s
        transport.wait(0.05)
    return time.monotonic() - began


def test_a_peer_that_accepts_and_says_nothing_is_never_connected() -> None:
    transport = TcpTransport()
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = transport.connect(f"kv://127.0.0.1:{server.getsockname()[1]}")
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            transport.wait(0.05)
            assert not link.connected
    transport.close()


def test_a_link_finds_an_exporter_that_comes_later_and_again_after_it_has_gone() -> None:
    ours, theirs = TcpTransport(), TcpTransport()
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"kv://127.0.0.1:{reserved.getsockname()[1]}"
    link = ours.connect(address)
    for _ in range(5):
        ours.wait(0.05)
    assert not link.connected
    assert link.losses == 0
    for losses in range(2):
        theirs.listen(address)

        def greeted(theirs: TcpTransport = theirs) -> bool:
            theirs.wait(0.0)
            return link.connected

        _until(ours, greeted)
        assert link.losses == losses
        theirs.close()
        _until(ours, lambda: bool(link.receive()) or not link.connected)
        theirs = TcpTransport()
    theirs.close()
    ours.close()


def test_a_payload_that_trickles_in_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far less at a time than the kernel wakes us for, from a peer that answers no heartbeat meanwhile."""
    monkeypatch.setattr(tcp_link, "_BEAT_S", 0.2)
    monkeypatch.setattr(tcp_link, "_SILENCE_S", 0.8)
    transport, payload = TcpTransport(), bytes(100_000)
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = transport.connect(f"kv://127.0.0.1:{server.getsockname()[1]}")
        link.send(b"hello")
        near, _ = server.accept()
        with near:
            near.sendall(HEARTBEAT)
            _until(transport, lambda: link.connected)
            data = framed([b"header", payload])
            received = None
            for start in range(0, len(data), 4000):
                near.sendall(data[start : start + 4000])
                end = time.monotonic() + 0.1
                while time.monotonic() < end:
                    transport.wait(0.05)
                    received = received or link.receive()
            assert received is not None
            assert bytes(received.payload or b"") == payload
            assert link.connected
            assert link.losses == 0
    transport.close()
