"""On one host KV over TCP is not encrypted; nobody gets or gives any without the suite's key."""

import socket
from contextlib import suppress

import pytest
import torch

from services.worker.kv.wire.endpoint import KvEndpoint
from services.worker.kv.wire.importing import PullLimits
from services.worker.kv.wire.tcp_framing import HEARTBEAT, prefix
from services.worker.kv.wire.tcp_streams import host_and_port
from tests.services.worker.kv.rig import Rig, model_kv, stage
from tests.services.worker.kv.wire.test_wrong_keys import OTHERS, OURS, Pair

pytestmark = pytest.mark.parametrize("rig", ["kv"], indirect=True)
LIMITS = PullLimits(connect_timeout_s=1.0)
TOKENS = 600


def connected(exporter: KvEndpoint) -> socket.socket:
    return socket.create_connection(host_and_port(exporter.address), timeout=20)


def test_with_the_key_kv_is_pulled(rig: Rig) -> None:
    exporter, importer = (rig.endpoint(curve=OURS, encrypted=False) for _ in range(2))
    kv = model_kv(TOKENS)
    stage(exporter, kv)
    got = rig.load(importer, rig.handle([exporter], TOKENS))
    assert rig.result().ok
    assert torch.equal(got.kv, kv)


@pytest.mark.parametrize(
    ("exporter_keys", "importer_keys", "why"),
    [
        pytest.param((OURS, False), (OTHERS, False), "key", id="another key"),
        pytest.param((OURS, False), (None, True), "keys", id="an importer without a key"),
        pytest.param((None, True), (OURS, False), "shows no key", id="an exporter without a key"),
        pytest.param((OURS, False), (OURS, True), "", id="an importer that wants TLS"),
        pytest.param((OURS, True), (OURS, False), "key", id="an exporter that wants TLS"),
    ],
)
def test_without_the_key_no_kv_is_pulled(
    rig: Rig, exporter_keys: tuple[Pair, bool], importer_keys: tuple[Pair, bool], why: str
) -> None:
    exporter = rig.endpoint(curve=exporter_keys[0], encrypted=exporter_keys[1])
    importer = rig.endpoint(curve=importer_keys[0], encrypted=importer_keys[1], limits=LIMITS)
    stage(exporter, model_kv(40))
    got = rig.load(importer, rig.handle([exporter], 40))
    result = rig.result()
    assert result.error.startswith("unreachable")
    assert why in result.error
    assert not got.writes
    assert exporter.server_counters.sent_bytes == 0
    assert exporter.stats().serving == 0


@pytest.mark.parametrize(
    "said",
    [
        HEARTBEAT,
        prefix(36, 0) + b"PKA0" + bytes(32),
        prefix(36, 0) + b"PKA1" + bytes(32) + prefix(36, 0) + b"PKA1" + bytes(32),  # a proof without the key
        bytes(200),
    ],
    ids=["a greeting", "another magic", "a wrong proof", "garbage"],
)
def test_a_stranger_is_disconnected(rig: Rig, said: bytes) -> None:
    exporter = rig.endpoint(curve=OURS, encrypted=False)
    with connected(exporter) as stranger:
        stranger.sendall(said)
        with suppress(ConnectionError):
            while stranger.recv(1000):  # its own number, where it has seen one
                pass
    importer = rig.endpoint(curve=OURS, encrypted=False)
    stage(exporter, model_kv(40))
    rig.load(importer, rig.handle([exporter], 40))
    assert rig.result().ok


def test_a_proof_is_of_one_connection(rig: Rig) -> None:
    """What one connection has said proves nothing on another: the server's number is another one each time."""
    exporter = rig.endpoint(curve=OURS, encrypted=False)
    hello = prefix(36, 0) + b"PKA1" + bytes(32)
    answers = set()
    for _ in range(2):
        with connected(exporter) as stranger:
            stranger.sendall(hello)
            answers.add(stranger.recv(200))
    assert len(answers) == 2
