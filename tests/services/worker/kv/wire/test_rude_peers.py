"""Peers that say nothing before they are gone: killed or frozen in the middle of a transfer."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from services.worker.kv.wire.importing import PullLimits
from tests.services.worker.kv.rig import Rig, model_kv, stage

SCRIPT = Path(__file__).with_name("peer_process.py")
ROOT = Path(__file__).parents[5]
NOTICED_S = 5.0  # heartbeats: every 0.5 s, given up after 3; the rest is for a busy machine


@contextmanager
def peer(rig: Rig, address: str = "") -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(rig.folder), rig.scheme, address],
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


def wait_until(condition: Callable[[], bool], within_s: float = 10.0) -> float:
    began, pause = time.monotonic(), threading.Event()
    while not condition():
        assert time.monotonic() - began < within_s, f"did not come about in {within_s} s"
        pause.wait(0.01)
    return time.monotonic() - began


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_exporter_that_is_gone_in_mid_pull_fails_it_soon_and_others_go_on(rig: Rig, how: signal.Signals) -> None:
    importer, other, kv = rig.endpoint(limits=PullLimits(stall_s=60.0)), rig.endpoint(), model_kv(64)
    stage(other, kv, "fine")
    with peer(rig) as exporter:
        address = json.loads(line_of(exporter))
        got = rig.load(importer, rig.handle([], 64, endpoints=(address,)), timeout_s=600.0)
        wait_until(lambda: bool(got.writes))
        began = time.monotonic()
        exporter.send_signal(how)
        result = rig.result()
        assert time.monotonic() - began < NOTICED_S
        assert result.error.startswith("peer_lost")
        assert got.finished  # and nothing of it is written after this
        whole = rig.load(importer, rig.handle([other], 64, "fine"))
        assert rig.result().ok
        assert torch.equal(whole.kv, kv)


def test_an_exporter_that_thaws_goes_on_with_new_pulls(rig: Rig) -> None:
    importer = rig.endpoint(limits=PullLimits(stall_s=60.0))
    with peer(rig) as exporter:
        address = json.loads(line_of(exporter))
        got = rig.load(importer, rig.handle([], 64, endpoints=(address,)))
        wait_until(lambda: bool(got.writes))
        exporter.send_signal(signal.SIGSTOP)
        assert not rig.result().ok
        exporter.send_signal(signal.SIGCONT)
        rig.load(importer, rig.handle([], 64, "other", endpoints=(address,), generation=1))
        assert rig.result().error.startswith("stale_generation")  # an answer


def test_an_exporter_whose_process_lives_but_sends_nothing_fails_the_pull_at_the_progress_deadline(rig: Rig) -> None:
    exporter, importer = rig.endpoint(), rig.endpoint(limits=PullLimits(stall_s=0.3))
    stage(exporter, model_kv(64), end=32)
    began = time.monotonic()
    rig.load(importer, rig.handle([exporter], 64), timeout_s=600.0)
    assert rig.result().error == "timeout"
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_importer_that_is_gone_in_mid_pull_holds_nothing_for_long(rig: Rig, how: signal.Signals) -> None:
    exporter = rig.endpoint(lease_s=0.5)
    with peer(rig, exporter.address) as importer:
        line_of(importer)  # it is up
        stage(exporter, model_kv(64), end=32)
        while line_of(importer) != "writing":
            pass
        importer.send_signal(how)
        wait_until(lambda: exporter.stats().serving == 0)  # it is silent for longer than the second that it named
        wait_until(lambda: exporter.staged_bytes == 0)
