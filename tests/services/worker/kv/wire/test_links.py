"""An importer's links: those to exporters that are gone, or that nobody asks any more, do not pile up."""

import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch

from services.worker.kv.wire import puller
from services.worker.kv.wire.endpoint import KvEndpoint
from services.worker.kv.wire.importing import PullLimits
from tests.services.worker.kv.rig import Rig, model_kv, stage

TOKENS = 40


def links(importer: KvEndpoint) -> int:
    return len(importer._puller._imports._peers._links)


def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    end, pause = time.monotonic() + within_s, threading.Event()
    while not condition():
        assert time.monotonic() < end
        pause.wait(0.02)


def assert_pulls(rig: Rig, importer: KvEndpoint, exporter: KvEndpoint, name: str) -> None:
    kv = model_kv(TOKENS)
    stage(exporter, kv, name)
    got = rig.load(importer, rig.handle([exporter], TOKENS, name))
    assert rig.result().ok
    assert torch.equal(got.kv, kv)


def test_many_dead_exporters_fail_their_own_imports_only(rig: Rig) -> None:
    importer, exporter = rig.endpoint(limits=PullLimits(connect_timeout_s=0.5)), rig.endpoint()
    with socket.socket() as nobody:  # bound, so nobody else's, and deaf
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        for number in range(400):
            address = f"{rig.scheme}://127.0.{number // 250 + 1}.{number % 250 + 1}:{port}"
            rig.load(importer, rig.handle([], TOKENS, f"dead-{number}", endpoints=(address,)))
        results = [rig.result() for _ in range(400)]
    assert not any(result.ok for result in results)
    assert {result.error.split(":")[0] for result in results} == {"unreachable"}
    assert_pulls(rig, importer, exporter, "after")


def test_an_address_of_an_exporter_that_uses_zeromq_is_refused(rig: Rig) -> None:
    rig.load(rig.endpoint(), rig.handle([], TOKENS, endpoints=("tcp://127.0.0.1:7000",)))
    assert "KV over ZeroMQ was removed" in rig.result().error


def test_links_to_replaced_exporters_are_closed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puller, "LOST_S", 0.0)
    monkeypatch.setattr(puller, "_SWEEP_S", 0.2)
    importer = rig.endpoint()
    for number in range(20):
        exporter = rig.endpoint()
        assert_pulls(rig, importer, exporter, f"t{number}")
        exporter.stop()
        rig.endpoints.remove(exporter)
    until(lambda: links(importer) == 0)


def test_connections_that_nobody_uses_are_closed_and_made_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puller, "_SWEEP_S", 0.2)
    importer, exporter = rig.endpoint(), rig.endpoint()
    assert_pulls(rig, importer, exporter, "first")
    assert links(importer) == 1
    monkeypatch.setattr(puller, "IDLE_S", 0.0)
    until(lambda: links(importer) == 0)
    assert_pulls(rig, importer, exporter, "second")
