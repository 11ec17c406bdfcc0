"""The real engine's prefix cache as it is told: what is known of a prompt is what a request with it hits."""

from pathlib import Path
from typing import Any

import pytest

from services.launcher.model_source import PROJECT
from shared.domain.adapters import version_key
from tests.services.worker.engines.own_engine import found_by
from tests.tiny_models import make_adapter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
MISSING = f"{version_key('new', '3' * 32)} failed: No adapter found for /no/such/folder"
RUN = "tests.services.worker.engines.prefix_run"


def made_adapters(folder: Path) -> dict[str, Path]:
    model = PROJECT / "models" / "demo"
    return {name: make_adapter(folder / name, model, seed=seed) for seed, name in enumerate(("one", "two"))}


@pytest.mark.parametrize(("block_size", "overlapping"), [(32, False), (128, True)])
def test_what_is_known_is_what_is_hit(tmp_path: Path, block_size: int, overlapping: bool) -> None:
    adapters = {} if overlapping else {name: str(made) for name, made in made_adapters(tmp_path).items()}
    answer = found_by(RUN, tmp_path, block_size, True, overlapping, adapters)
    by_name: dict[str, dict[str, Any]] = {}
    hits = 0
    for one in answer["found"]:
        saved = min(one["known"], one["prompt"] - 1) // block_size * block_size
        # Of blocks half as large as ours one more than is known may be there.
        assert one["hit"] - saved in ((0, 32) if block_size == 32 else (0,)), one
        assert one["reused"] == one["hit"] + one["imported"], one
        by_name[one["what"]] = one
        hits += one["what"] == "conversation" and one["hit"] > 0
    assert hits > 8
    assert [by_name[name]["hit"] > 200 for name in ("again", "salted again", "imported before")] == [True] * 3
    assert [by_name[name]["hit"] for name in ("first", "salted", "approximate", "imported", "cleared")] == [0] * 5
    assert by_name["imported before"]["known"] == 256
    assert {name: one["imported"] for name, one in by_name.items() if one["imported"]} == {"imported": 300}
    for name in adapters:  # it finds its own blocks alone
        assert [by_name[f"by {name}{at}"]["hit"] for at in ("", ", salted")] == [0, 0]
        assert [by_name[f"by {name}{at} again"]["known"] for at in ("", ", salted")] == [256, 256]
    if adapters:
        for digit in "12":  # versions of one name find their own blocks alone, too
            key = version_key("new", digit * 32)
            assert (by_name[key]["hit"], by_name[f"{key} again"]["known"]) == (0, 256)
        late = ["refused", f"this instance does not serve the adapter {version_key('new', '1' * 32)!r}"]
        found = answer["versions"]
        assert (found.pop("late"), found.pop("failed")) == (late, "Loading lora " + MISSING)
        assert found == {"under way": "length", "same": True, "removed": [3]}
    misses = [one for one in answer["found"] if one["what"] == "conversation" and not one["hit"]]
    assert len(misses) > 3  # the first of their kind, and those that were evicted
    assert answer["nodes"] <= answer["blocks"]
    assert answer["told"] <= answer["blocks"] * block_size


@pytest.mark.parametrize(("host_mb", "disk_mb", "overlapping"), [(2, 0, False), (64, 0, True), (4, 64, True)])
def test_what_the_host_tier_holds_is_known_and_hit_too(
    tmp_path: Path, host_mb: int, disk_mb: int, overlapping: bool
) -> None:
    """With a store that is soon full, with one that keeps everything, and with a disk that keeps everything."""
    disk = {"disk_kv_bytes": disk_mb << 20, "disk_kv_folder": str(tmp_path)} if disk_mb else {}
    answer = found_by(RUN, tmp_path, 32, True, overlapping, {}, host_mb << 20, disk)
    host, conversations = answer["host"], [one for one in answer["found"] if one["what"] == "conversation"]
    for one in answer["found"]:
        saved = min(one["known"], one["prompt"] - 1) // 32 * 32
        assert one["hit"] - saved in (0, 32), one
        assert one["reused"] == one["hit"] + one["imported"], one
        assert abs(one["loaded"] - one["hosted"]) <= 64, one  # a block of the report may lie in both tiers
    assert any(one["hosted"] for one in answer["found"])
    assert {one["what"] for one in answer["found"] if one["imported"]} == {"imported"}
    assert host["held_bytes"] <= host["limit_bytes"] <= host_mb << 20
    assert min(host["stored_blocks"], host["served_tokens"]) > 0
    known, exported = answer["exported"]
    assert exported - known in (0, 32)
    if disk_mb:
        assert host["disk"]["read_blocks"] > 0
        assert known > 0
    if host_mb < 64:
        assert host["evicted_blocks"] > 0
    else:
        assert host["evicted_blocks"] == 0
        assert sum(not one["hit"] for one in conversations) <= 6  # each first part, under each of two salts
    assert [one["hit"] for one in answer["found"] if one["what"] in ("cleared", "approximate")] == [0, 0]


def test_without_a_prefix_cache_nothing_is_told(tmp_path: Path) -> None:
    answer = found_by(RUN, tmp_path, 32, False)
    assert answer["told"] == answer["nodes"] == 0
    assert not any(one["hit"] for one in answer["found"])
