"""An adapter's folder: its rank, its digest, and what is missing."""

import json
import shutil
from pathlib import Path

import pytest

from shared.errors import InvalidRequest
from shared.model.adapters import LoraSection, digest_of


def adapter(folder: Path, rank: object = 8, weights: bytes = b"w") -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


def test_the_engine_makes_room_for_the_largest_rank(tmp_path: Path) -> None:
    folders = {f"a{rank}": adapter(tmp_path / f"a{rank}", rank) for rank in (4, 24)}
    assert LoraSection(adapters={"a": folders["a4"]}).rank() == 8
    assert LoraSection(adapters=folders).rank() == 32
    assert LoraSection(adapters=folders, max_rank=64).rank() == 64


def test_a_digest_is_of_the_content_wherever_it_lies(tmp_path: Path) -> None:
    one, other = Path(adapter(tmp_path / "one")), Path(adapter(tmp_path / "other", weights=b"v"))
    shutil.copytree(one, tmp_path / "copy")
    assert digest_of("a", one) == digest_of("a", tmp_path / "copy") != digest_of("a", other)


def test_a_folder_that_is_no_adapter_is_named(tmp_path: Path) -> None:
    lora = LoraSection(adapters={"a": adapter(tmp_path / "a", rank="8")})
    with pytest.raises(InvalidRequest, match=r"adapter a: .*`r` must be a rank of 1 or more, got '8'"):
        lora.rank()
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidRequest, match=r"has no adapter_model\.safetensors or adapter_model\.bin"):
        lora.digests()
    with pytest.raises(InvalidRequest, match=r"adapter b: .* has no adapter_config.json"):
        LoraSection(adapters={"b": str(tmp_path / "none")}).rank()
