from collections.abc import Iterator
from pathlib import Path

import pytest

from services.worker.kv.wire.nixl_agent import installed
from tests.patience import PatientClock
from tests.services.worker.kv.rig import Rig

NIXL = pytest.param("nixl", marks=pytest.mark.skipif(not installed(), reason="nixl is not installed"))


TIMED = ("importing", "nixl_transport", "puller", "server", "tcp_transport")


@pytest.fixture(params=["kv", NIXL], ids=["tcp", "nixl"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    """Endpoints of each transport, whose deadlines do not pass while the machine pauses them all."""
    clock = PatientClock()
    with clock.kept(), pytest.MonkeyPatch.context() as patch:
        clock.becomes_that_of(patch, *(f"services.worker.kv.wire.{module}" for module in TIMED))
        made = Rig(tmp_path, request.param, clock)
        yield made
        made.close()
