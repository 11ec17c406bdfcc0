"""A planner beside the small cluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from tests.dashboard.planner import WAIT_S, FakePlanner
from tests.dashboard.serving import ROOT, application

URL = "POLYPHASE_DASHBOARD_PLANNER_URL"
PAGE = Path("plan_page.py")


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
def plan_page(environment: dict[str, str]) -> AppTest:
    """The page Plan, not yet run, in an application that was opened on its first page."""
    app = AppTest.from_file(str(ROOT / "dashboard" / "app.py"), default_timeout=WAIT_S).run()
    return app.switch_page(str(PAGE))
