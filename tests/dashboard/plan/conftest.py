"""A planner beside the small cluster."""

from collections.abc import Iterator

import pytest
from streamlit.testing.v1 import AppTest

from tests.dashboard.pages import opened
from tests.dashboard.planner import FakePlanner
from tests.dashboard.serving import application

URL = "POLYPHASE_DASHBOARD_PLANNER_URL"


@pytest.fixture
def planner(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePlanner]:
    """A planner to which the dashboard's settings point."""
    fake = FakePlanner()
    with application(fake.app()) as fake.url:
        environment[URL] = fake.url
        monkeypatch.setenv(URL, fake.url)
        yield fake
        fake.go.set()


@pytest.fixture
def plan_page(page: AppTest) -> AppTest:
    """The page Plan, not yet run."""
    return opened(page, "plan")
