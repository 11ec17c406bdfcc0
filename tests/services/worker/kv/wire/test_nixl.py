"""NIXL between endpoints: who uses it, what goes by it, and what becomes of KV when it fails."""

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from services.worker.kv.wire import nixl_agent, nixl_transport
from services.worker.kv.wire.endpoint import KvEndpoint
from services.worker.kv.wire.importing import PullLimits
from services.worker.kv.wire.nixl_agent import (
    Meet,
    Met,
    NixlAgent,
    NixlError,
    Offer,
    Read,
    Ready,
    decode_nixl,
    encode_nixl,
    this_host,
)
from services.worker.kv.wire.nixl_transport import Exports
from services.worker.kv.wire.protocol import MAX_FRAME_BYTES, encode_message
from services.worker.kv.wire.tcp_transport import TcpTransport
from shared.domain.kv import Codec
from tests.services.worker.kv.conftest import NIXL
from tests.services.worker.kv.rig import Capture, Rig, model_kv, stage
from tests.services.worker.kv.wire.hostile import Stranger, pull
from tests.services.worker.kv.wire.test_rude_peers import ROOT, line_of, wait_until

pytestmark = pytest.mark.parametrize("rig", [NIXL], indirect=True)
SCRIPT = Path(__file__).with_name("nixl_process.py")
TOKENS = 600


def assert_pulled(rig: Rig, importer: KvEndpoint, exporter: KvEndpoint, transport: str, name: str = "t") -> None:
    """It is exact, and that transport has carried it."""
    kv = model_kv(TOKENS)
    stage(exporter, kv, name)
    got = rig.load(importer, rig.handle([exporter], TOKENS, name))
    result = rig.result()
    assert result.ok, result.error
    assert torch.equal(got.kv, kv)
    assert result.transport == transport


def test_all_of_it_goes_by_nixl_where_both_have_it(rig: Rig) -> None:
    exporter, importer = rig.endpoint(), rig.endpoint()
    assert_pulled(rig, importer, exporter, "nixl")
    wait_until(lambda: exporter.stats().serving == 0)  # it counts what it has sent after the importer may have it
    sent, received = exporter.stats(), importer.stats()
    assert sent.nixl_sent_bytes == sent.sent_bytes == received.nixl_received_bytes == received.received_bytes > 0
    assert (received.nixl_failures, received.nixl_refused) == (0, 0)


@pytest.mark.parametrize(("exports", "imports"), [("nixl", "kv"), ("kv", "nixl"), ("nixl", "tcp")])
def test_where_one_of_them_has_it_not_it_goes_over_tcp(rig: Rig, exports: str, imports: str) -> None:
    exporter, importer = rig.endpoint(scheme=exports), rig.endpoint(scheme=imports)
    assert_pulled(rig, importer, exporter, "tcp")
    assert exporter.stats().nixl_sent_bytes == importer.stats().nixl_received_bytes == 0


def test_coded_kv_and_parts_of_the_heads_go_by_nixl_from_copies(rig: Rig) -> None:
    exporter, kv = rig.endpoint(lossy=True), model_kv(TOKENS)
    stage(exporter, kv, "coded")
    stage(exporter, kv, "heads")
    coded = rig.load(rig.endpoint(lossy=True), rig.handle([exporter], TOKENS, "coded", codec=Codec.INT8))
    assert (rig.result().transport, bool((coded.kv - kv).abs().max() < 0.1)) == ("nixl", True)
    heads = Capture(0, TOKENS)
    for rank in range(2):
        rig.load(rig.endpoint(rank, 2), rig.handle([exporter], TOKENS, "heads"), capture=heads)
    assert [rig.result().transport for _ in range(2)] == ["nixl", "nixl"]
    assert torch.equal(heads.kv, kv)


def test_a_payload_without_room_for_its_copy_goes_over_tcp(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_transport, "_OUTGOING_BYTES", 4096)
    exporter, kv, heads = rig.endpoint(), model_kv(TOKENS), Capture(0, TOKENS)
    stage(exporter, kv)
    for rank in range(2):
        rig.load(rig.endpoint(rank, 2), rig.handle([exporter], TOKENS), capture=heads)
    assert [rig.result().transport for _ in range(2)] == ["tcp", "tcp"]
    assert torch.equal(heads.kv, kv)


@pytest.mark.parametrize(("trusts", "transport"), [((False, True), "tcp"), ((True, True), "nixl")])
def test_other_hosts_are_read_only_where_both_trust_the_network(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, trusts: tuple[bool, bool], transport: str
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")  # nothing here listens elsewhere
    exporter = rig.endpoint(nixl_trusted=trusts[0])
    monkeypatch.setattr(nixl_agent, "this_host", lambda: "another")
    importer = rig.endpoint(nixl_trusted=trusts[1])
    assert_pulled(rig, importer, exporter, transport)
    assert importer.stats().nixl_refused == (transport == "tcp")
    assert importer.stats().nixl_failures == 0


def test_without_trust_nobody_outside_reaches_an_agent(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Local addresses of this network namespace's listening sockets, IPv6 included, as the kernel writes them."""
    files = [Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")]
    lines = [line.split() for file in files if file.exists() for line in file.read_text().splitlines()[1:]]
    inodes = {link for each in Path("/proc/self/fd").iterdir() if (link := _target(each)).startswith("socket:")}
    return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes}


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:
        return ""


def test_a_trial_that_fails_is_told_once_and_the_pair_uses_tcp(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    met = Exports.met
    monkeypatch.setattr(Exports, "met", lambda self: Met("", met(self).address, 4096, 1))
    exporter, importer = rig.endpoint(), rig.endpoint()
    with caplog.at_level(logging.WARNING):
        assert_pulled(rig, importer, exporter, "tcp")
        assert_pulled(rig, importer, exporter, "tcp", "again")
    told = [record.getMessage() for record in caplog.records if "NIXL has failed" in record.getMessage()]
    assert told == [f"KV of {exporter.address} goes over TCP, NIXL has failed: {WRONG}"]
    assert importer.stats().nixl_failures == 1


WRONG = "the trial failed: other bytes came than were to be read"


def test_an_exporter_that_does_not_answer_costs_a_moment_and_the_pair_uses_tcp(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transport, "_MEET_S", 0.2)
    monkeypatch.setattr(nixl_transport.NixlListener, "_meet", lambda *_: None)
    assert_pulled(rig, importer := rig.endpoint(), rig.endpoint(), "tcp")
    assert importer.stats().nixl_failures == 1


def test_a_read_that_fails_ends_its_import_and_later_ones_use_tcp(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, importer, kv = rig.endpoint(), rig.endpoint(), model_kv(TOKENS)
    assert_pulled(rig, importer, exporter, "nixl")

    def fail(*_: object) -> Read:
        raise NixlError("it is broken")

    monkeypatch.setattr(NixlAgent, "read", fail)
    stage(exporter, kv, "broken")
    got = rig.load(importer, rig.handle([exporter], TOKENS, "broken"))
    assert rig.result().error == "nixl: it is broken"
    assert not got.writes
    assert_pulled(rig, importer, exporter, "tcp", "after")
    assert importer.stats().nixl_failures == 1


def test_a_read_that_does_not_end_ends_its_import_and_its_memory_is_not_used_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transport, "_READ_S", 0.2)
    monkeypatch.setattr(nixl_agent, "_QUARANTINE_S", 0.0)  # NIXL calls it failed, if it was under way at the parting
    exporter, importer, kv = rig.endpoint(), rig.endpoint(), model_kv(TOKENS)
    assert_pulled(rig, importer, exporter, "nixl")
    imports = importer._puller._transport._imports  # type: ignore[attr-defined]
    assert imports is not None
    free = sum(slab.nbytes for slab in imports._arena.slabs) // 4096
    wait_until(lambda: imports._arena.free == free)

    def never(read: Read) -> bool:
        read._state = "PROC"
        return False

    with monkeypatch.context() as stuck:
        stuck.setattr(Read, "done", never)
        stage(exporter, kv, "stuck")
        rig.load(importer, rig.handle([exporter], TOKENS, "stuck"))
        assert rig.result().error == "nixl: nothing came within 0.2 s"
        assert imports._arena.free < free
        assert_pulled(rig, importer, exporter, "tcp", "after")
        assert imports._arena.free < free
    importer._puller._transport.wake()
    wait_until(lambda: imports._arena.free == free)


def test_released_kv_is_not_overwritten_before_it_was_read(rig: Rig) -> None:
    """An importer that has an offer and does not read it yet: the transfer ends, its places stay taken."""
    exporter = rig.endpoint()
    memory = exporter._copies._memory  # type: ignore[attr-defined]
    free = memory.free_tokens
    with Stranger(exporter.address) as peer:
        peer.send(encode_nixl(Meet(1, this_host(), trusted=False)))
        assert isinstance(decode_nixl(peer.recv_multipart()[0]), Met)
        peer.send(encode_nixl(Ready()))
        stage(exporter, model_kv(40))
        peer.send(encode_message(pull(credit_bytes=1 << 20)))
        assert isinstance(decode_nixl(peer.recv_multipart()[0]), Offer)
        exporter.release("t")
        wait_until(lambda: exporter.staged_bytes == 0)
        assert memory.free_tokens == free - 40
    exporter._server._transport.wake()
    wait_until(lambda: memory.free_tokens == free)  # it is gone


def test_who_does_not_read_is_given_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_transport, "_STUCK_S", 0.3)
    exporter = rig.endpoint()
    with Stranger(exporter.address) as peer:
        peer.send(encode_nixl(Meet(1, this_host(), trusted=False)))
        peer.send(encode_nixl(Ready()))
        stage(exporter, model_kv(40))
        peer.send(encode_message(pull(credit_bytes=1 << 20)))
        assert isinstance(decode_nixl(peer.recv_multipart()[0]), Met)
        assert isinstance(decode_nixl(peer.recv_multipart()[0]), Offer)
        with pytest.raises(OSError):  # noqa: PT011
            peer.recv_multipart()


Lie = Callable[[Exports], list[tuple[bytes, bytes | None]]]
LIES: dict[str, Lie] = {
    "metadata": lambda exports: [(encode_nixl(exports.met()), b"garbage" * 40)],
    "no metadata": lambda exports: [(encode_nixl(exports.met()), None)],
    "an address": lambda exports: [(encode_nixl(Met("", 4096, 100, 0)), exports.metadata)],
    "a size": lambda exports: [(encode_nixl(Met("", exports.met().address, MAX_FRAME_BYTES + 1)), exports.metadata)],
    "a negative size": lambda exports: [(encode_nixl(Met("", exports.met().address, -1)), exports.metadata)],
    "an early offer": lambda exports: [(encode_nixl(Offer(1, exports.met().address, 100, b"")), None)],
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_an_exporter_that_lies_of_its_memory_is_not_read(rig: Rig, lie: Lie, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_transport, "_MEET_S", 0.5)
    importer, exporter, transport = rig.endpoint(), rig.endpoint(), TcpTransport()
    exports = Exports(False, [])
    listener = transport.listen("nixl://127.0.0.1:*")  # plain TCP: what it says is ours to write
    rig.load(importer, rig.handle([], TOKENS, endpoints=(listener.address,)), timeout_s=1.0)
    while (message := listener.receive()) is None:
        transport.wait(0.1)
    assert isinstance(decode_nixl(message[1][0]), Meet)
    for header, payload in lie(exports):
        listener.send(message[0], header, payload)
    while importer.stats().nixl_failures == 0:
        transport.wait(0.02)
    assert not rig.result().ok
    transport.close()
    monkeypatch.undo()
    assert_pulled(rig, importer, exporter, "nixl")


def test_nothing_is_polled_when_nothing_moves(rig: Rig) -> None:
    exporter, importer = rig.endpoint(), rig.endpoint()
    assert_pulled(rig, importer, exporter, "nixl")
    exporting, importing = exporter._server._transport, importer._puller._transport
    assert exporting is not None
    assert importing is not None
    wait_until(lambda: not exporting._active and not importing._active)


@contextmanager
def process(rig: Rig, tls: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    made = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(rig.folder), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "UCX_TLS": tls},
    )
    try:
        yield made
    finally:
        made.kill()
        made.wait()


@pytest.mark.parametrize("tls", ["tcp", "tcp,sm,self"])
def test_two_processes_over_ucx(rig: Rig, tls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact over TCP and over shared memory; killed in the middle of a transfer, the other one goes on."""
    monkeypatch.setenv("UCX_TLS", tls)
    importer, other = rig.endpoint(limits=PullLimits(stall_s=60.0)), rig.endpoint()
    with process(rig, tls, "30000") as exporter:
        address = json.loads(line_of(exporter))
        whole, kv = Capture(0, 30000), model_kv(30000)
        rig.load(importer, rig.handle([], 30000, "whole", endpoints=(address,)), capture=whole)
        result = rig.result()
        assert (result.ok, result.transport) == (True, "nixl")
        assert torch.equal(whole.kv, kv)
        got = Capture(0, 30000)
        got.before = lambda: exporter.send_signal(signal.SIGKILL)
        rig.load(importer, rig.handle([], 30000, "half", endpoints=(address,)), capture=got)
        assert rig.result().error.startswith("peer_lost")
        assert got.finished
    assert_pulled(rig, importer, other, "nixl")


def test_an_importer_that_is_killed_while_it_reads_holds_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    exporter = rig.endpoint(lease_s=0.5)
    memory = exporter._copies._memory  # type: ignore[attr-defined]
    free = memory.free_tokens
    with process(rig, "tcp", "30000", exporter.address) as importer:
        line_of(importer)  # it is up
        stage(exporter, model_kv(30000))
        while line_of(importer) != "writing":
            pass
        importer.send_signal(signal.SIGKILL)
        wait_until(lambda: exporter.stats().serving == 0)
        wait_until(lambda: exporter.staged_bytes == 0)
        wait_until(lambda: memory.free_tokens == free)
    assert_pulled(rig, rig.endpoint(), exporter, "nixl", "after")
