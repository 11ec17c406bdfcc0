from collections.abc import Iterator
from pathlib import Path

import pytest

from services.worker.kv.wire.nixl_agent import installed
from tests.services.worker.kv.rig import Rig

NIXL = pytest.param("nixl", marks=pytest.mark.skipif(not installed(), reason="nixl is not installed"))


@pytest.fixture(params=["kv", NIXL], ids=["tcp", "nixl"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    """Endpoints of each transport."""
    made = Rig(tmp_path, request.param)
    yield made
    made.close()
