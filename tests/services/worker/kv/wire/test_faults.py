"""Peers that are killed, frozen, silent, slow or unreachable, messages that are lost, connections that are cut: KV is
exact, or the import fails soon, and others go on.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path

import pytest
import torch

from services.worker.kv.wire import puller
from services.worker.kv.wire.importing import PullLimits
from services.worker.kv.wire.nixl_agent import NIXL_SCHEME
from services.worker.kv.wire.protocol import Confirm, Credit, Frame, Message, Pull
from tests.services.worker.kv.rig import LAYERS, Rig, model_kv, stage, wait_until
from tests.services.worker.kv.wire.peers import Cut, Parts, Proxy, meaning

ROOT = Path(__file__).parents[5]
SCRIPT = Path(__file__).with_name("peer_process.py")
NOTICED_S = 15.0  # heartbeats: every 0.5 s, given up after 3; the rest is for a busy machine


@contextmanager
def peer(rig: Rig, address: str = "", tokens: int = 64) -> Iterator["subprocess.Popen[str]"]:
    """A process that exports, or imports from that address."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(rig.folder), rig.scheme, str(tokens), address],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the peer has ended"
    return line.strip()


@pytest.mark.parametrize(("how", "connections"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 1), (signal.SIGTERM, 3)])
def test_an_exporter_that_is_gone_in_mid_pull_fails_it_soon_and_others_go_on(
    rig: Rig, how: signal.Signals, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puller, "LANE_BYTES", 1000)
    importer, other = rig.endpoint(limits=PullLimits(stall_s=60.0, connections=connections)), rig.endpoint()
    with peer(rig) as exporter:
        address = json.loads(line_of(exporter))
        got = rig.load(importer, rig.handle([], 64, "half", endpoints=(address,)), timeout_s=600.0)
        wait_until(lambda: got.writes)
        began = time.monotonic()
        exporter.send_signal(how)
        result = rig.result()
        assert time.monotonic() - began < NOTICED_S
        assert result.error.startswith("peer_lost")
        assert got.finished  # and nothing of it is written after this
        rig.transfer(other, importer, "fine")
        if how is signal.SIGSTOP:
            exporter.send_signal(signal.SIGCONT)
            handle = rig.handle([], 64, "other", endpoints=(address,), generation=1)
            assert rig.refused(importer, handle).startswith("stale_generation")  # an answer


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_importer_that_is_gone_in_mid_pull_holds_nothing_for_long(rig: Rig, how: signal.Signals) -> None:
    exporter = rig.endpoint(lease_s=0.5)
    with peer(rig, exporter.address) as importer:
        line_of(importer)  # it is up
        wait_until(lambda: exporter.stats().serving == 1)  # a lease ends soon where no importer pulls
        stage(exporter, model_kv(64), end=32)
        while line_of(importer) != "writing":
            pass
        importer.send_signal(how)
        wait_until(lambda: exporter.stats().serving == 0)  # it is silent for longer than it said
        wait_until(lambda: exporter.staged_bytes == 0)


def test_many_dead_exporters_fail_their_own_imports_only(rig: Rig) -> None:
    importer, exporter = rig.endpoint(limits=PullLimits(connect_timeout_s=0.5)), rig.endpoint()
    with socket.socket() as deaf:  # bound, so that no process answers there
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        for number in range(400):
            address = f"{rig.scheme}://127.0.{number // 250 + 1}.{number % 250 + 1}:{port}"
            rig.load(importer, rig.handle([], 40, f"dead-{number}", endpoints=(address,)))
        results = [rig.result() for _ in range(400)]
    assert {result.error.split(":")[0] for result in results} == {"unreachable"}
    rig.transfer(exporter, importer, "after")


def test_unused_links_are_closed_and_made_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puller, "LOST_S", 0.0)
    monkeypatch.setattr(puller, "_SWEEP_S", 0.2)
    importer, stays = rig.endpoint(), rig.endpoint()
    links = importer.puller.imports.peers.links
    rig.transfer(stays, importer, "first")
    for number in range(10):
        exporter = rig.endpoint()
        rig.transfer(exporter, importer, f"t{number}")
        rig.stop(exporter)
    wait_until(lambda: len(links) == 1)
    monkeypatch.setattr(puller, "IDLE_S", 0.0)
    wait_until(lambda: not links)
    rig.transfer(stays, importer, "second")


TOKENS = 600
CHUNK = 60  # tokens of a frame
NAME = "transfer"
STALL_S = 20.0
SOON_S = 15.0  # of a machine that has little time


def unreadable(message: bytes) -> bytes:
    return b"\xff\xff"


def of_another(message: bytes) -> bytes:
    """One flipped bit in the transfer's name: it reads as well as before."""
    assert message.count(NAME.encode()) == 1
    return message.replace(NAME.encode(), NAME.replace("e", "d").encode())


def last_frame(message: object) -> bool:
    return isinstance(message, Frame) and message.token_end == TOKENS and message.layer_end == message.layers


@pytest.mark.parametrize(
    ("lose", "garble", "ok"),
    [
        pytest.param(lambda m: isinstance(m, Credit), None, True, id="a grant"),
        pytest.param(lambda m: isinstance(m, Credit), unreadable, True, id="a garbled grant"),
        pytest.param(lambda m: isinstance(m, Pull), None, False, id="a pull"),
        pytest.param(lambda m: isinstance(m, Pull), unreadable, False, id="a garbled pull"),
        pytest.param(lambda m: isinstance(m, Pull), of_another, False, id="a pull that names another transfer"),
        pytest.param(lambda m: isinstance(m, Frame), None, False, id="a frame"),
        pytest.param(last_frame, None, False, id="the last frame"),
        pytest.param(last_frame, unreadable, False, id="a garbled last frame"),
    ],
)
def test_a_lost_message_holds_nothing_up(
    rig: Rig, lose: Callable[[object], bool], garble: Callable[[bytes], bytes] | None, ok: bool
) -> None:
    exporter, kv = rig.endpoint(), model_kv(TOKENS)
    importer = rig.endpoint(limits=PullLimits(stall_s=STALL_S, window_bytes=20_000))
    stage(exporter, kv, NAME, each=CHUNK)
    lost = threading.Event()

    def edit(importers: bool, parts: Parts) -> Parts | None:
        if lost.is_set() or not lose(meaning(importers, parts[0])):
            return parts
        lost.set()
        return [garble(parts[0]), *parts[1:]] if garble else None

    with Proxy(exporter.address, edit) as proxy:
        began = time.monotonic()
        got = rig.load(importer, rig.handle([exporter], TOKENS, NAME, endpoints=(proxy.address,)), timeout_s=60.0)
        result = rig.result()
        assert time.monotonic() - began < SOON_S < STALL_S
    assert lost.is_set(), "nothing was lost: the test shows nothing"
    assert result.ok == ok
    if ok:
        assert torch.equal(got.kv, kv)


class Script:
    """Cuts when the message of this number passes, at that share of its bytes."""

    def __init__(self, cut_at: int, share: float = 0.0) -> None:
        self.share = share
        self.seen: list[type[Message]] = []
        self.was_cut = threading.Event()
        self._cut_at = cut_at
        self._lock = threading.Lock()

    def __call__(self, importers: bool, parts: Parts) -> Parts | None:
        message = meaning(importers, parts[0])
        assert message is not None
        with self._lock:
            self.seen.append(type(message))  # type: ignore[arg-type]
            cut = len(self.seen) == self._cut_at
        if cut:
            self.was_cut.set()
            raise Cut(self.share)
        return parts


@pytest.mark.parametrize(
    ("connections", "step", "share"),
    [
        pytest.param(1, 1, 0.0, id="between any two messages"),
        pytest.param(1, 3, 0.6, id="in the middle of one"),
        pytest.param(3, 5, 0.0, id="of several connections"),
    ],
)
def test_a_connection_cut_at_any_message_ends_the_import_soon_or_does_no_harm(
    rig: Rig, connections: int, step: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puller, "LANE_BYTES", 1000)
    limits = PullLimits(window_bytes=40_000, stall_s=5.0, connections=connections)
    at_once = 8  # imports that are cut: mostly they wait
    if rig.scheme == NIXL_SCHEME:  # its endpoints take longer to make, and more of the processor
        step, at_once = 4 * connections, 2
    numbers, seen = count(1, step), dict[int, Script]()
    with ThreadPoolExecutor(at_once) as pool:
        while all(script.was_cut.is_set() for script in seen.values()):
            seen |= pool.map(lambda number: (number, cut_import(rig, number, share, limits)), islice(numbers, at_once))
    whole = min(number for number, script in seen.items() if not script.was_cut.is_set())
    kinds = {kind for number, script in seen.items() for kind in script.seen[number - 1 :]}
    assert whole > 10
    assert {Pull, Frame} <= kinds or rig.scheme == NIXL_SCHEME
    assert step > 1 or {Credit, Confirm} <= kinds


def cut_import(rig: Rig, number: int, share: float, limits: PullLimits) -> Script:
    """Import through a proxy that cuts at message `number`, between endpoints of its own; what passed."""
    folder = rig.folder / str(number)
    folder.mkdir()
    own, script, kv = Rig(folder, rig.scheme, rig.clock), Script(number, share), model_kv(TOKENS)
    try:
        exporter, importer = own.endpoint(lease_s=4.0), own.endpoint(limits=limits)
        stage(exporter, kv, each=CHUNK)
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
            stats = importer.stats()
            assert (stats.pulling, stats.inbox_bytes) == (0, 0)
            # Who gave up confirms, and where that is lost the lease ends.
            wait_until(lambda: not exporter.staged_bytes, SOON_S)
        own.transfer(exporter, importer, "again", TOKENS)  # over a new connection
    finally:
        own.close()
    return script


@pytest.mark.parametrize("connections", [1, 2])
def test_a_slow_link_is_slow_and_no_more(rig: Rig, connections: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 Mb/s and 100 ms: no deadline of progress is in its way."""
    monkeypatch.setattr(puller, "LANE_BYTES", 1000)
    tokens = 2000
    exporter, kv = rig.endpoint(), model_kv(tokens)
    stall_s = 2.0 if rig.scheme == "kv" else 6.0  # with the time of the trial
    importer = rig.endpoint(limits=PullLimits(stall_s=stall_s, connections=connections))
    stage(exporter, kv, each=200)
    with Proxy(exporter.address, delay_s=lambda _: 0.1, bytes_per_s=50e6 / 8 / connections) as proxy:
        began = time.monotonic()
        got = rig.load(importer, rig.handle([exporter], tokens, endpoints=(proxy.address,)))
        result = rig.result()
        took_s = time.monotonic() - began
    assert result.ok, result.error
    assert torch.equal(got.kv, kv)
    assert took_s > 0.2 + kv.numel() * 4 / (50e6 / 8) / 2  # it was slow: the proxy had a part in it


def test_large_pulls_use_several_connections_whose_parts_come_in_any_order(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, kv = rig.endpoint(), model_kv(TOKENS)
    monkeypatch.setattr(puller, "LANE_BYTES", kv.numel() * 4 // LAYERS)
    stage(exporter, kv, "large", each=CHUNK)
    stage(exporter, kv[:, :, : TOKENS // 3], "small")
    importer, delays = rig.endpoint(limits=PullLimits(connections=LAYERS)), [0.4, 0.0, 0.2]
    with Proxy(exporter.address, delay_s=lambda number: delays[number]) as proxy:
        for name, tokens, connections in (("small", TOKENS // 3, 1), ("large", TOKENS, LAYERS)):
            got = rig.load(importer, rig.handle([exporter], tokens, name, endpoints=(proxy.address,)))
            assert rig.result().ok
            assert proxy.connections == connections
            assert torch.equal(got.kv, kv[:, :, :tokens])
    layers = [layer for layer, _ in got.writes]
    assert layers != sorted(layers) or layers[0] != 0


def test_an_exporter_that_lives_but_sends_nothing_fails_the_pull_at_the_progress_deadline(rig: Rig) -> None:
    exporter, importer = rig.endpoint(), rig.endpoint(limits=PullLimits(stall_s=0.3))
    stage(exporter, model_kv(64), end=32)
    began = time.monotonic()
    rig.load(importer, rig.handle([exporter], 64), timeout_s=600.0)
    assert rig.result().error == "timeout"
    assert time.monotonic() - began < SOON_S


def test_an_exporter_that_restarts_fails_the_pull_and_its_successor_is_reached(rig: Rig) -> None:
    exporter, importer = rig.endpoint(), rig.endpoint(limits=PullLimits(connect_timeout_s=1.5))
    got = rig.load(importer, rig.handle([exporter], 64))
    stage(exporter, model_kv(64), end=32)
    wait_until(lambda: got.writes)
    rig.stop(exporter)
    assert rig.result().error.startswith("peer_lost")
    began = time.monotonic()
    assert rig.refused(importer, rig.handle([exporter], 64, "down")).startswith("unreachable")
    assert time.monotonic() - began < SOON_S
    successor = rig.endpoint(address=exporter.address, generation=8)
    assert rig.refused(importer, rig.handle([successor], 64, "old")).startswith("stale_generation")
    rig.generation = 8
    rig.transfer(successor, importer, "new")
