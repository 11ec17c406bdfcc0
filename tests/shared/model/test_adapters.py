"""An adapter's folder: its rank, its digest, and what is missing."""

import json
import shutil
from pathlib import Path
from typing import Any

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


def test_loading_at_run_time_makes_room_for_more_than_the_file_names(tmp_path: Path) -> None:
    named = {"a": adapter(tmp_path / "a")}
    fixed, loads = LoraSection(adapters=named), LoraSection(adapters=named, allow_runtime_updating=True)
    assert (fixed.enabled, fixed.room, fixed.together, fixed.rank()) == (True, 1, 1, 8)
    assert (loads.enabled, loads.room, loads.together, loads.rank()) == (True, 64, 4, 16)
    few = LoraSection(allow_runtime_updating=True, max_adapters=2, max_rank=8)
    assert (few.enabled, few.room, few.together, few.rank()) == (True, 2, 2, 8)
    assert not LoraSection().enabled


@pytest.mark.parametrize(
    ("section", "key", "says"),
    [
        ({"max_loras": 2}, "adapters", "set allow_runtime_updating"),
        ({"adapters": {"a": "/a"}, "max_adapters": 4}, "max_adapters", "only with allow_runtime_updating"),
        ({"allow_runtime_updating": True, "max_loras": 4, "max_adapters": 3}, "max_adapters", "at least 4"),
        ({"adapters": {"a@" + 32 * "0": "/a"}}, "adapters.a@" + 32 * "0", "must not end in @"),
    ],
)
def test_a_bad_section_is_an_error_at_its_key(section: dict[str, Any], key: str, says: str) -> None:
    ((found, text),) = LoraSection(**section).faults("demo")
    assert (found, says in text) == (key, True), text
