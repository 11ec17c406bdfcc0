"""The pages over a small cluster of one process."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import streamlit as st
from streamlit import config
from streamlit.testing.v1 import AppTest

from shared.domain.instance import Role
from shared.errors import Conflict
from tests.dashboard.cluster import FakeCluster
from tests.dashboard.rows import WAIT_S, instance
from tests.dashboard.serving import application

APP = Path(__file__).parents[2] / "dashboard" / "app.py"


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """Two prefill and two decode instances, one of them emulated."""
    fake = FakeCluster(
        [
            instance("d0", Role.DECODE),
            instance("d1", Role.DECODE, engine="emulated", accelerator="H100"),
            instance("p0"),
            instance("p1", inflight=0),
        ]
    )
    with application(fake.app()) as fake.url:
        yield fake
        fake.go.set()
        fake.answers.go.set()


@pytest.fixture
def nobody() -> Iterator[str]:
    """A URL where connections are refused."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def environment(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Settings that point at the fake cluster."""
    names = ("MONITOR", "SCHEDULER", "GATEWAY", "PREDICTOR")
    values = {f"POLYPHASE_DASHBOARD_{name}_URL": cluster.url for name in names}
    values["POLYPHASE_DASHBOARD_READ_TIMEOUT_S"] = "15"  # a busy machine is not what is tested
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


@pytest.fixture
def loopback() -> Iterator[None]:
    """As if Streamlit listened on loopback."""
    before = config.get_option("server.address")
    config.set_option("server.address", "127.0.0.1")
    yield
    config.set_option("server.address", before)


@pytest.fixture
def page(environment: dict[str, str], loopback: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[AppTest]:
    """The first page, not yet run, in a process that remembers nothing of a cluster which had the same port before.

    Each run reads anew.
    """
    st.cache_resource.clear()
    monkeypatch.setattr("dashboard.data.FRESH", 0.0)
    yield AppTest.from_file(str(APP), default_timeout=WAIT_S)
    st.cache_resource.clear()


@pytest.fixture
def refusal() -> Conflict:
    """What the monitor answers for the last instance of a role."""
    return Conflict("p0 is the last ready prefill instance; without it no request could be served (force allows it)")
