"""NIXL between endpoints: who uses it, what goes by it, and what becomes of KV when it fails."""

import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.worker.kv.wire import nixl_transport
from services.worker.kv.wire.importing import PullLimits
from services.worker.kv.wire.nixl_agent import (
    Hello,
    HelloAck,
    NixlAgent,
    NixlError,
    Offer,
    Read,
    Ready,
    decode_nixl,
    encode_nixl,
    this_host,
)
from services.worker.kv.wire.nixl_transport import ExportMemory, NixlTransport
from services.worker.kv.wire.protocol import MAX_FRAME_BYTES, encode_message
from services.worker.kv.wire.tcp_transport import TcpTransport
from shared.domain.kv import Codec
from tests.services.worker.kv.conftest import NIXL
from tests.services.worker.kv.rig import Capture, Rig, model_kv, stage, wait_until
from tests.services.worker.kv.wire.peers import Stranger, pull
from tests.services.worker.kv.wire.test_faults import line_of, peer

pytestmark = pytest.mark.parametrize("rig", [NIXL], indirect=True)
TOKENS = 600


def test_all_of_it_goes_by_nixl_where_both_have_it_and_nothing_is_polled_after(rig: Rig) -> None:
    exporter, importer = rig.endpoint(), rig.endpoint()
    assert rig.transfer(exporter, importer).transport == "nixl"
    wait_until(lambda: exporter.stats().serving == 0)  # it counts what it has sent after the importer may have it
    sent, received = exporter.stats(), importer.stats()
    assert sent.nixl_sent_bytes == sent.sent_bytes == received.nixl_received_bytes == received.received_bytes > 0
    assert (received.nixl_failures, received.nixl_refused) == (0, 0)
    for transport in (exporter.exporting, importer.importing):
        assert isinstance(transport, NixlTransport)
        wait_until(lambda transport=transport: not transport.active)


@pytest.mark.parametrize(("exports", "imports"), [("nixl", "kv"), ("kv", "nixl"), ("nixl", "tcp")])
def test_where_one_of_them_has_it_not_it_goes_over_tcp(rig: Rig, exports: str, imports: str) -> None:
    exporter, importer = rig.endpoint(scheme=exports), rig.endpoint(scheme=imports)
    assert rig.transfer(exporter, importer).transport == "tcp"
    assert exporter.stats().nixl_sent_bytes == importer.stats().nixl_received_bytes == 0


@pytest.mark.parametrize("room", [True, False])
def test_coded_kv_and_parts_of_the_heads_go_by_nixl_from_copies_while_there_is_room(
    rig: Rig, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not room:
        monkeypatch.setattr(nixl_transport, "_OUTGOING_BYTES", 4096)
    transport = "nixl" if room else "tcp"
    exporter, kv = rig.endpoint(lossy=True), model_kv(TOKENS)
    stage(exporter, kv, "coded")
    stage(exporter, kv, "heads")
    coded = rig.load(rig.endpoint(lossy=True), rig.handle([exporter], TOKENS, "coded", codec=Codec.INT8))
    assert (rig.result().transport, bool((coded.kv - kv).abs().max() < 0.1)) == (transport, True)
    heads = Capture(0, TOKENS)
    for rank in range(2):
        rig.load(rig.endpoint(rank, 2), rig.handle([exporter], TOKENS, "heads"), capture=heads)
    assert [rig.result().transport for _ in range(2)] == [transport, transport]
    assert torch.equal(heads.kv, kv)


@pytest.mark.parametrize(("trusts", "transport"), [((False, True), "tcp"), ((True, True), "nixl")])
def test_other_hosts_are_read_only_where_both_trust_the_network(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, trusts: tuple[bool, bool], transport: str
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")  # nothing here listens elsewhere
    exporter = rig.endpoint(nixl_trusted=trusts[0])
    monkeypatch.setattr(nixl_transport, "this_host", lambda: "another")
    importer = rig.endpoint(nixl_trusted=trusts[1])
    assert rig.transfer(exporter, importer).transport == transport
    assert (importer.stats().nixl_refused, importer.stats().nixl_failures) == (transport == "tcp", 0)


def test_without_trust_agents_listen_on_loopback_only(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "all")
    seen: list[str] = []
    real = nixl_transport.NixlAgent

    def made(trusted: bool) -> NixlAgent:
        before = listening()
        agent = real(trusted)
        seen.extend(listening() - before)
        return agent

    monkeypatch.setattr(nixl_transport, "NixlAgent", made)
    rig.endpoint()
    assert seen
    assert all(address.startswith("0100007F:") for address in seen)  # 127.0.0.1
    assert os.environ["UCX_NET_DEVICES"] == "all"


def listening() -> set[str]:
    """Local addresses of this process's listening sockets, IPv6 included, as the kernel writes them."""
    files = [Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")]
    lines = [line.split() for file in files if file.exists() for line in file.read_text().splitlines()[1:]]
    inodes = {_target(each) for each in Path("/proc/self/fd").iterdir()}
    return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes}


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:
        return ""


def test_a_trial_that_fails_is_logged_once_and_the_pair_uses_tcp(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer = ExportMemory.hello_ack
    monkeypatch.setattr(ExportMemory, "hello_ack", lambda self: HelloAck("", answer(self).address, 4096, 1))
    exporter, importer = rig.endpoint(), rig.endpoint()
    with caplog.at_level(logging.WARNING):
        for name in ("t", "again"):
            assert rig.transfer(exporter, importer, name).transport == "tcp"
    logged = [record.getMessage() for record in caplog.records if "NIXL has failed" in record.getMessage()]
    wrong = "the trial failed: other bytes came than were to be read"
    assert logged == [f"KV of {exporter.address} goes over TCP, NIXL has failed: {wrong}"]
    assert importer.stats().nixl_failures == 1


def test_an_exporter_that_does_not_answer_costs_a_moment_and_the_pair_uses_tcp(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transport, "_HELLO_S", 0.2)
    monkeypatch.setattr(nixl_transport.NixlListener, "_greet", lambda *_: None)
    exporter, importer = rig.endpoint(), rig.endpoint()
    assert rig.transfer(exporter, importer).transport == "tcp"
    assert importer.stats().nixl_failures == 1


def test_a_read_that_fails_ends_its_import_and_later_ones_use_tcp(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, importer = rig.endpoint(), rig.endpoint()
    assert rig.transfer(exporter, importer).transport == "nixl"

    def fail(*_: object) -> Read:
        raise NixlError("it is broken")

    monkeypatch.setattr(NixlAgent, "read", fail)
    stage(exporter, model_kv(TOKENS), "broken")
    assert rig.refused(importer, rig.handle([exporter], TOKENS, "broken")) == "nixl: it is broken"
    assert rig.transfer(exporter, importer, "after").transport == "tcp"
    assert importer.stats().nixl_failures == 1


def test_a_read_that_does_not_end_ends_its_import_and_its_memory_is_not_used_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transport, "_QUARANTINE_S", 0.0)  # NIXL may call it failed when the peer is removed
    exporter, importer = rig.endpoint(), rig.endpoint()
    transport = importer.importing
    assert isinstance(transport, NixlTransport)
    free = transport.free_bytes
    assert rig.transfer(exporter, importer).transport == "nixl"
    wait_until(lambda: transport.free_bytes == free)

    def never(read: Read) -> bool:
        read._state = "PROC"
        return False

    with monkeypatch.context() as stuck:
        stuck.setattr(Read, "done", never)
        stuck.setattr(nixl_transport, "_READ_S", 0.2)
        stage(exporter, model_kv(TOKENS), "stuck")
        assert rig.refused(importer, rig.handle([exporter], TOKENS, "stuck")) == "nixl: nothing came within 0.2 s"
        assert transport.free_bytes < free
        assert rig.transfer(exporter, importer, "after").transport == "tcp"
        assert transport.free_bytes < free
    transport.wake()
    wait_until(lambda: transport.free_bytes == free)


@pytest.mark.parametrize("stuck_s", [30.0, 0.3])
def test_an_offer_keeps_its_memory_until_the_peer_has_read_it_or_is_given_up(
    rig: Rig, stuck_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transport, "_STUCK_S", stuck_s)
    exporter = rig.endpoint()
    memory = exporter.copies.memory
    free = memory.free_places  # type: ignore[attr-defined]
    with Stranger(exporter.address) as stranger:
        stranger.send(encode_nixl(Hello(1, this_host(), trusted=False)))
        assert isinstance(decode_nixl(stranger.receive()[0]), HelloAck)
        stranger.send(encode_nixl(Ready()))
        stage(exporter, model_kv(40))
        stranger.send(encode_message(pull(credit_bytes=1 << 20)))
        assert isinstance(decode_nixl(stranger.receive()[0]), Offer)
        exporter.release("t")
        wait_until(lambda: exporter.staged_bytes == 0)
        if stuck_s > 1:
            assert memory.free_places == free - 40  # type: ignore[attr-defined]
        else:
            with pytest.raises(OSError):  # noqa: PT011
                stranger.receive()
    exporter.exporting.wake()
    wait_until(lambda: memory.free_places == free)  # type: ignore[attr-defined]


Lie = Callable[[ExportMemory], tuple[HelloAck | Offer, bytes | None]]
LIES: dict[str, Lie] = {
    "metadata": lambda memory: (memory.hello_ack(), b"garbage" * 40),
    "no metadata": lambda memory: (memory.hello_ack(), None),
    "an address": lambda memory: (HelloAck("", 4096, 100, 0), memory.metadata),
    "a size": lambda memory: (HelloAck("", memory.hello_ack().address, MAX_FRAME_BYTES + 1), memory.metadata),
    "a negative size": lambda memory: (HelloAck("", memory.hello_ack().address, -1), memory.metadata),
    "an early offer": lambda memory: (Offer(1, memory.hello_ack().address, 100, b""), None),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_an_exporter_that_lies_about_its_memory_is_not_read(
    rig: Rig, lie: Lie, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transport, "_HELLO_S", 0.5)
    importer, exporter, transport = rig.endpoint(), rig.endpoint(), TcpTransport()
    listener = transport.listen("nixl://127.0.0.1:*")  # plain TCP: what it sends is ours to write
    rig.load(importer, rig.handle([], TOKENS, endpoints=(listener.address,)), timeout_s=1.0)
    while (message := listener.receive()) is None:
        transport.wait(0.1)
    assert isinstance(decode_nixl(message[1]), Hello)
    answer, payload = lie(ExportMemory(False, []))
    listener.send(message[0], encode_nixl(answer), payload)
    while importer.stats().nixl_failures == 0:
        transport.wait(0.02)
    assert not rig.result().ok
    transport.close()
    monkeypatch.undo()
    assert rig.transfer(exporter, importer).transport == "nixl"


@pytest.mark.parametrize("tls", ["tcp", "tcp,sm,self"])
def test_two_processes_over_ucx(rig: Rig, tls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact over TCP and over shared memory; killed in the middle of a transfer, the other one goes on."""
    monkeypatch.setenv("UCX_TLS", tls)
    importer, other, tokens = rig.endpoint(limits=PullLimits(stall_s=60.0)), rig.endpoint(), 30_000
    with peer(rig, tokens=tokens) as exporter:
        address = json.loads(line_of(exporter))
        got = rig.load(importer, rig.handle([], tokens, "whole", endpoints=(address,)))
        result = rig.result()
        assert (result.ok, result.transport) == (True, "nixl")
        assert torch.equal(got.kv, model_kv(tokens))
        got = Capture(0, tokens)
        got.before = lambda: exporter.send_signal(signal.SIGKILL)
        rig.load(importer, rig.handle([], tokens, "half", endpoints=(address,)), capture=got)
        assert rig.result().error.startswith("peer_lost")
        assert got.finished
    assert rig.transfer(other, importer).transport == "nixl"


def test_an_importer_that_is_killed_while_it_reads_holds_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    exporter = rig.endpoint(lease_s=0.5)
    memory = exporter.copies.memory
    free = memory.free_places  # type: ignore[attr-defined]
    with peer(rig, exporter.address, tokens=30_000) as importer:
        line_of(importer)  # it is up
        wait_until(lambda: exporter.stats().serving == 1)  # a lease ends soon where no importer pulls
        stage(exporter, model_kv(30_000))
        while line_of(importer) != "writing":
            pass
        importer.send_signal(signal.SIGKILL)
        wait_until(lambda: exporter.stats().serving == 0)
        wait_until(lambda: (exporter.staged_bytes, memory.free_places) == (0, free))  # type: ignore[attr-defined]
    assert rig.transfer(exporter, name="after").transport == "nixl"
