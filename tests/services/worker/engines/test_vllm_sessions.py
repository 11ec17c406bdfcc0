"""KV that a real engine keeps for sessions: it survives the requests of others within its budget, and none waits for it."""

from pathlib import Path

import pytest

from tests.services.worker.engines.own_engine import found_by

pytestmark = pytest.mark.slow
RUN = "tests.services.worker.engines.sessions_run"


def test_a_session_is_kept_within_its_budget_and_yields(tmp_path: Path) -> None:
    found = found_by(RUN, tmp_path, 0.5)
    print(found)
