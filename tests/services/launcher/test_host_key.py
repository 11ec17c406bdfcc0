"""The key of a suite on one host, and what a process without it cannot do."""

import asyncio
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.launcher import cluster_keys
from services.launcher.cluster_file import Cluster
from services.launcher.cluster_keys import curve_pair
from services.launcher.plan import make_plan
from shared.domain.cluster import ClusterDelta
from shared.errors import InvalidRequest, NotConnected
from shared.runtime.keys import read_pair
from shared.wire.broadcast import ClusterFeed, ClusterPublisher, Publisher, Subscriber
from shared.wire.messages import DRAIN, DrainReply, DrainRequest
from shared.wire.rpc_client import RpcClient
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Sockets
from tests.ports import free_address


def cluster(**changes: Any) -> Cluster:
    instances = [{"id": "p", "role": "prefill", "engine": "emulated"}, {"id": "d", "role": "decode"}]
    return Cluster.model_validate({"name": "one host", "model": "m", "instances": instances, **changes})


def test_a_key_is_made_once_and_its_owner_alone_can_read_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    cluster_keys.keep_curve_key(cluster(), data)
    file = cluster_keys.curve_key_file(data)
    made = file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    cluster_keys.keep_curve_key(cluster(), data)
    assert file.read_text() == made
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_with_a_pair_in_the_cluster_file_there_is_no_other_key(tmp_path: Path) -> None:
    cluster_keys.keep_curve_key(cluster(**curve_pair()), tmp_path)
    assert not cluster_keys.curve_key_file(tmp_path).exists()
    plan = make_plan(cluster(**curve_pair()), tmp_path)
    assert not any(spec.settings.curve_file for spec in plan.processes if spec.settings)


def test_a_file_that_is_no_key_is_named(tmp_path: Path) -> None:
    cluster_keys.curve_key_file(tmp_path).write_text("short\n")
    with pytest.raises(InvalidRequest, match=r"curve-key cannot be used: .*remove it"):
        cluster_keys.keep_curve_key(cluster(), tmp_path)
    with pytest.raises(InvalidRequest, match="No such file"):
        read_pair(tmp_path / "missing")


def test_every_process_gets_the_key_and_its_environment_the_path_alone(tmp_path: Path) -> None:
    cluster_keys.keep_curve_key(cluster(), tmp_path)
    secret = cluster_keys.curve_key_file(tmp_path).read_text().strip()
    for spec in make_plan(cluster(), tmp_path).processes:
        if spec.settings is not None:
            assert spec.settings.curve_pair() == read_pair(cluster_keys.curve_key_file(tmp_path))
        assert not any(secret in value for value in spec.env.values())


@asynccontextmanager
async def suite_and_stranger(folder: Path) -> AsyncIterator[tuple[Sockets, Sockets]]:
    cluster_keys.keep_curve_key(cluster(), folder)
    worker = next(spec.settings for spec in make_plan(cluster(), folder).processes if spec.name == "d")
    assert worker is not None
    ours, theirs = Sockets.of(worker), Sockets()
    try:
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()


async def test_a_process_without_the_key_cannot_drain(tmp_path: Path) -> None:
    drained: list[DrainRequest] = []

    async def drain(request: DrainRequest, _: ServerCall) -> DrainReply:
        drained.append(request)
        return DrainReply(True, 0.0, 0)

    async with suite_and_stranger(tmp_path) as (ours, theirs):
        address = free_address()
        async with RpcServer(ours, address, {DRAIN: drain}):
            stranger, friend = RpcClient(theirs, address), RpcClient(ours, address)
            try:
                with pytest.raises(NotConnected):
                    await stranger.call(DRAIN, DrainRequest(1.0), timeout_s=20)
                assert not drained
                await friend.call(DRAIN, DrainRequest(1.0), timeout_s=20)
                assert len(drained) == 1
            finally:
                stranger.close()
                friend.close()


async def test_a_process_without_the_key_is_not_heard_and_hears_nothing(tmp_path: Path) -> None:
    """Heartbeats to a monitor, and broadcasts of one: instances obey neither, nor does a stranger get them."""
    async with suite_and_stranger(tmp_path) as (ours, theirs):
        heartbeats, broadcasts = free_address(), free_address()
        beats: list[int] = []
        heard: list[float] = []
        overheard: list[float] = []
        subscriber = Subscriber(ours, heartbeats, int, beats.append)
        publishers = Publisher(ours, heartbeats), Publisher(theirs, heartbeats)
        monitor = ClusterPublisher(ours, broadcasts)
        feeds = [
            ClusterFeed(sockets, broadcasts, lambda delta, into=into: not into.append(delta.time_s))  # type: ignore[misc]
            for sockets, into in ((ours, heard), (theirs, overheard))
        ]
        try:
            async with asyncio.timeout(20):
                while len(beats) < 50 or len(heard) < 50:
                    for number, publisher in enumerate(publishers):
                        publisher.publish(number)
                    monitor.whole(ClusterDelta(1, 1.0, whole=True))
                    monitor.change(ClusterDelta(2 + len(heard), 1.0))
                    await asyncio.sleep(0.01)
            assert set(beats) == {0}
            assert not overheard
        finally:
            subscriber.close()
            monitor.close()
            for publisher in publishers:
                publisher.close()
            for feed in feeds:
                feed.close()


async def test_a_false_monitor_is_not_obeyed(tmp_path: Path) -> None:
    """Where a stranger listens in the place of the monitor, the suite's processes do not connect to it."""
    async with suite_and_stranger(tmp_path) as (ours, theirs):
        address, listening = free_address(), free_address()
        obeyed: list[float] = []
        false = ClusterPublisher(theirs, address)
        true = ClusterPublisher(ours, listening)
        heard: list[float] = []
        feeds = [
            ClusterFeed(ours, where, lambda delta, into=into: not into.append(delta.time_s))  # type: ignore[misc]
            for where, into in ((address, obeyed), (listening, heard))
        ]
        try:
            async with asyncio.timeout(20):
                while len(heard) < 50:
                    for each in (false, true):
                        each.whole(ClusterDelta(1, 1.0, whole=True))
                        each.change(ClusterDelta(2 + len(heard), 1.0))
                    await asyncio.sleep(0.01)
            assert not obeyed
        finally:
            false.close()
            true.close()
            for feed in feeds:
                feed.close()
