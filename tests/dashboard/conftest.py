"""The pages over the services of a small cluster."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import streamlit as st
from streamlit import config
from streamlit.testing.v1 import AppTest

from shared.domain.instance import Role
from tests.dashboard.fake_services import FakeServices
from tests.dashboard.sample_data import WAIT_S, instance
from tests.dashboard.serving import application

SCRIPT = Path(__file__).parents[2] / "dashboard" / "pages.py"


@pytest.fixture
def cluster() -> Iterator[FakeServices]:
    """Two prefill and two decode instances, one of them emulated."""
    emulated = instance("d1", Role.DECODE, engine="emulated", accelerator="H100")
    fake = FakeServices([instance("d0", Role.DECODE), emulated, instance("p0"), instance("p1", inflight=0)])
    with application(fake.app()) as fake.url:
        yield fake
        fake.go.set()
        fake.chat_go.set()


@pytest.fixture
def refusing_url() -> Iterator[str]:
    """A URL where connections are refused."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def settings_of(cluster: FakeServices) -> dict[str, str]:
    """Settings that point at the fake services, except for a planner."""
    names = ("MONITOR", "SCHEDULER", "GATEWAY", "PREDICTOR")
    urls = {f"POLYPHASE_DASHBOARD_{name}_URL": cluster.url for name in names}
    return {**urls, "POLYPHASE_DASHBOARD_READ_TIMEOUT_S": "15"}  # a busy machine is not what is tested


@pytest.fixture
def environment(cluster: FakeServices, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    values = settings_of(cluster)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


@pytest.fixture
def planner(cluster: FakeServices, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> FakeServices:
    """The cluster with a planner in the settings."""
    environment["POLYPHASE_DASHBOARD_PLANNER_URL"] = cluster.url
    monkeypatch.setenv("POLYPHASE_DASHBOARD_PLANNER_URL", cluster.url)
    return cluster


@pytest.fixture
def loopback() -> Iterator[None]:
    """Streamlit's address as if it listened on loopback."""
    before = config.get_option("server.address")
    config.set_option("server.address", "127.0.0.1")
    yield
    config.set_option("server.address", before)


@pytest.fixture
def page(environment: dict[str, str], loopback: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[AppTest]:
    """The first page, not yet run. Reads are not reused, neither by a later run nor across tests, and waited for."""
    st.cache_resource.clear()
    monkeypatch.setattr("dashboard.api.FRESH_SHARE", 0.0)
    monkeypatch.setattr("dashboard.api.LATE_S", WAIT_S)
    yield AppTest.from_file(str(SCRIPT), default_timeout=WAIT_S)
    st.cache_resource.clear()
