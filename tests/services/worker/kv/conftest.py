from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.worker.kv.rig import Rig


@pytest.fixture(params=["kv", "tcp"], ids=["tcp", "zeromq"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    """Endpoints of each transport."""
    made = Rig(tmp_path, request.param)
    yield made
    made.close()
