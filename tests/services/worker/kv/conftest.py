from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.worker.kv.rig import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()
