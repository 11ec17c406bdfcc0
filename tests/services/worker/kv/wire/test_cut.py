"""Connections cut at each message in turn, slow ones, some slower than others: KV is exact, or the import fails."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice

import pytest
import torch

from services.worker.kv.wire import puller
from services.worker.kv.wire.endpoint import KvEndpoint
from services.worker.kv.wire.importing import PullLimits
from services.worker.kv.wire.nixl_agent import NIXL_SCHEME
from services.worker.kv.wire.protocol import Confirm, Credit, Frame, Message, Pull
from tests.services.worker.kv.rig import LAYERS, Rig, model_kv, stage
from tests.services.worker.kv.wire.proxy import Cut, Parts, Proxy, meant
from tests.services.worker.kv.wire.test_rude_peers import line_of, peer, wait_until

TOKENS = 600
AT_ONCE = 8  # imports that are cut: mostly they wait
LEASE_S = 4.0  # with the time in which endpoints meet
SOON_S = 8.0  # of a machine that has little time
LIMITS = PullLimits(window_bytes=40_000, stall_s=5.0)


@pytest.fixture(autouse=True)
def _lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are shared out for small imports, too."""
    monkeypatch.setattr(puller, "LANE_BYTES", 1000)


class Script:
    """Cuts when the message of this number passes, at that share of its bytes."""

    def __init__(self, cut_at: int, share: float = 0.0) -> None:
        self.share = share
        self.seen: list[type[Message]] = []
        self.was_cut = threading.Event()
        self._cut_at = cut_at
        self._lock = threading.Lock()

    def __call__(self, importers: bool, parts: Parts) -> Parts | None:
        message = meant(importers, parts[0])
        assert message is not None
        with self._lock:
            self.seen.append(type(message))
            cut = len(self.seen) == self._cut_at
        if cut:
            self.was_cut.set()
            raise Cut(self.share)
        return parts


def staged(rig: Rig) -> tuple[KvEndpoint, torch.Tensor]:
    exporter, kv = rig.endpoint(lease_s=LEASE_S), model_kv(TOKENS)
    for first in range(0, TOKENS, 60):  # a frame each
        stage(exporter, kv, start=first, end=first + 60)
    return exporter, kv


@pytest.mark.parametrize(
    ("connections", "step", "share"),
    [
        pytest.param(1, 1, 0.0, id="between any two messages"),
        pytest.param(1, 3, 0.6, id="in the middle of one"),
        pytest.param(3, 5, 0.0, id="of several connections"),
    ],
)
def test_a_connection_cut_at_any_message_ends_the_import_soon_or_does_no_harm(
    rig: Rig, connections: int, step: int, share: float
) -> None:
    limits = PullLimits(window_bytes=40_000, stall_s=5.0, connections=connections)
    at_once = AT_ONCE
    if rig.scheme == NIXL_SCHEME:  # its endpoints take longer to make, and more of the processor
        step, at_once = 4 * connections, 2
    numbers, seen = count(1, step), dict[int, Script]()
    with ThreadPoolExecutor(at_once) as pool:
        while all(script.was_cut.is_set() for script in seen.values()):
            seen |= pool.map(lambda number: (number, imported(rig, number, share, limits)), islice(numbers, at_once))
    whole = min(number for number, script in seen.items() if not script.was_cut.is_set())
    kinds = {kind for number, script in seen.items() for kind in script.seen[number - 1 :]}
    assert whole > 10
    assert {Pull, Frame} <= kinds or rig.scheme == NIXL_SCHEME
    assert step > 1 or {Credit, Confirm} <= kinds


def imported(rig: Rig, number: int, share: float, limits: PullLimits) -> Script:
    """Import through a proxy that cuts at message `number`, between endpoints of its own; what passed."""
    folder = rig.folder / str(number)
    folder.mkdir()
    own, script = Rig(folder, rig.scheme), Script(number, share)
    try:
        exporter, kv = staged(own)
        importer = own.endpoint(limits=limits)
        with Proxy(exporter.address, script) as proxy:
            began = time.monotonic()
            got = own.load(importer, own.handle([exporter], TOKENS, endpoints=(proxy.address,)), timeout_s=30.0)
            result = own.result()
            assert time.monotonic() - began < SOON_S
            if result.ok:
                assert torch.equal(got.kv, kv)
                script.was_cut.wait(0.3)  # the last message confirms, after the end
            else:
                assert result.error.startswith("peer_lost"), (number, script.seen)
                assert script.was_cut.is_set()
            stats = importer.stats()  # nothing that had come is left
            assert (stats.pulling, stats.inbox_bytes) == (0, 0)
            # Nor what was staged: who gave up says so, and where that is lost the lease ends.
            wait_until(lambda: not exporter.staged_bytes, SOON_S)
        # The same endpoints do it over a new connection.
        stage(exporter, kv, "again")
        again = own.load(importer, own.handle([exporter], TOKENS, "again"))
        assert own.result().ok
        assert torch.equal(again.kv, kv)
    finally:
        own.close()
    return script


@pytest.mark.parametrize("connections", [1, 2])
def test_a_slow_link_is_slow_and_no_more(rig: Rig, connections: int) -> None:
    """50 Mb/s and 100 ms: no deadline of progress is in its way."""
    tokens = 2000
    exporter, kv = rig.endpoint(), model_kv(tokens)
    stall_s = 2.0 if rig.scheme == "kv" else 6.0  # with the time in which they meet
    importer = rig.endpoint(limits=PullLimits(stall_s=stall_s, connections=connections))
    for first in range(0, tokens, 200):
        stage(exporter, kv, start=first, end=first + 200)
    size = kv.numel() * 4
    with Proxy(exporter.address, delay_s=lambda _: 0.1, bytes_per_s=50e6 / 8 / connections) as proxy:
        began = time.monotonic()
        got = rig.load(importer, rig.handle([exporter], tokens, endpoints=(proxy.address,)))
        result = rig.result()
        took_s = time.monotonic() - began
    assert result.ok, result.error
    assert torch.equal(got.kv, kv)
    assert took_s > 0.2 + size / (50e6 / 8) / 2  # it was slow: the proxy had a part in it


def test_parts_may_come_in_any_order_over_unlike_connections(rig: Rig) -> None:
    exporter, kv = staged(rig)
    importer = rig.endpoint(limits=PullLimits(connections=LAYERS))
    delays = [0.4, 0.0, 0.2]
    with Proxy(exporter.address, delay_s=lambda number: delays[number]) as proxy:
        got = rig.load(importer, rig.handle([exporter], TOKENS, endpoints=(proxy.address,)))
        assert rig.result().ok
        assert proxy.connections == LAYERS
    assert torch.equal(got.kv, kv)
    assert [layer for layer, _ in got.writes] != sorted(layer for layer, _ in got.writes) or got.writes[0][0] != 0


def test_several_connections_carry_what_is_large_and_one_what_is_small(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, kv = staged(rig)
    monkeypatch.setattr(puller, "LANE_BYTES", kv.numel() * 4 // 2)
    importer = rig.endpoint(limits=PullLimits(connections=4))
    with Proxy(exporter.address) as proxy:
        got = rig.load(importer, rig.handle([exporter], TOKENS, endpoints=(proxy.address,)), end=TOKENS // 2)
        assert rig.result().ok
        assert proxy.connections == 1
        assert torch.equal(got.kv, kv[:, :, : TOKENS // 2])
        stage(exporter, kv, "large")
        got = rig.load(importer, rig.handle([exporter], TOKENS, "large", endpoints=(proxy.address,)))
        assert rig.result().ok
        assert proxy.connections == 2
        assert torch.equal(got.kv, kv)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_exporter_that_dies_in_mid_transfer_over_several_connections(rig: Rig, how: signal.Signals) -> None:
    importer = rig.endpoint(limits=PullLimits(stall_s=60.0, connections=3))
    with peer(rig) as exporter:
        address = line_of(exporter).strip('"')
        got = rig.load(importer, rig.handle([], 64, endpoints=(address,)), timeout_s=600.0)
        end = time.monotonic() + 10
        while not got.writes:
            assert time.monotonic() < end
            threading.Event().wait(0.01)
        began = time.monotonic()
        os.kill(exporter.pid, how)
        assert rig.result().error.startswith("peer_lost")
        assert time.monotonic() - began < 3.0
