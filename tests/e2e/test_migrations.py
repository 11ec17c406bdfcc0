"""Streams of all kinds of sampling on real engines of unlike block sizes migrate again and again, with a target killed:
no token is lost, sent twice or another one.
"""

from pathlib import Path

import pytest

from benchmarks import migrations
from benchmarks.migrations import KINDS, moved_streams
from tests.patient_clusters import patient

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]


async def test_streams_that_migrate_are_those_that_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "CLUSTER", patient(migrations.CLUSTER))
    found = await moved_streams(tmp_path / "suite", moves=3, tokens=400, kills=1)
    assert not found.wrong, found.wrong
    assert found.lost_tokens == 0
    assert found.moves["migration"] >= len(KINDS) // 2
    assert len(found.gaps_ms) >= len(KINDS) // 4  # they went on at another instance, without another attempt
