from pathlib import Path

import msgspec
import pytest

from predictor.checkpoint import META_FILE, BrokenCheckpoint, CheckpointMeta, read_meta, replacing, write_meta


def test_metadata_round_trip(tmp_path: Path, meta: CheckpointMeta) -> None:
    write_meta(tmp_path, meta)
    assert read_meta(tmp_path) == meta


@pytest.mark.parametrize(
    "change", [{"format": 99}, {"bucket_count": 1}, {"bucket_tokens": 0}, {"input_tokens": 0}, {"temperature": 0.0}]
)
def test_invalid_metadata(tmp_path: Path, meta: CheckpointMeta, change: dict[str, float]) -> None:
    write_meta(tmp_path, msgspec.structs.replace(meta, **change))
    with pytest.raises(BrokenCheckpoint, match=META_FILE):
        read_meta(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"bucket_tokens": "many"}'])
def test_metadata_of_another_form(tmp_path: Path, text: str) -> None:
    (tmp_path / META_FILE).write_text(text)
    with pytest.raises(BrokenCheckpoint, match=META_FILE):
        read_meta(tmp_path)


def test_no_metadata(tmp_path: Path) -> None:
    with pytest.raises(BrokenCheckpoint, match=META_FILE):
        read_meta(tmp_path)


def test_a_checkpoint_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "checkpoint"
    for content in ("old", "new"):
        with replacing(target) as folder:
            (folder / "weights").write_text(content)
    with pytest.raises(IsADirectoryError), replacing(target) as folder:
        folder.write_text("fails half-way")
    assert (target / "weights").read_text() == "new"
    assert [entry.name for entry in target.parent.iterdir()] == ["checkpoint"]
