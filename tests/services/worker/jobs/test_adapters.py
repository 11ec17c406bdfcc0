"""What an instance does with an adapter that it is to load or to forget."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.worker.jobs.adapters import Adapters
from shared.domain.adapters import version_key
from shared.errors import Busy, Conflict, EngineFailed, InvalidRequest, NotFound
from shared.model.adapters import LoraSection, digest_of
from shared.wire.messages import LoadAdapterRequest, UnloadAdapterRequest

LORA = LoraSection(allow_runtime_updating=True, max_adapters=3)


class Engine:
    """Notes what it has. `meanwhile` is called while it loads."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}
        self.meanwhile: Any = lambda: None

    async def add_adapter(self, key: str, folder: str) -> None:
        self.meanwhile()
        self.held[key] = folder

    async def remove_adapter(self, key: str) -> None:
        del self.held[key]


def folder(path: Path, weights: bytes = b"w") -> str:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (path / "adapter_model.safetensors").write_bytes(weights)
    return str(path)


def adapters(section: LoraSection = LORA) -> tuple[Adapters, Engine]:
    engine = Engine()
    return Adapters(section, engine, {"poems": "d"}), engine  # type: ignore[arg-type]


async def test_versions_of_one_name_are_adapters_of_their_own(tmp_path: Path) -> None:
    served, engine = adapters()
    path = folder(tmp_path / "a")
    first = (await served.load(LoadAdapterRequest("a", path))).digest
    assert first == digest_of("a", Path(path))
    assert (await served.load(LoadAdapterRequest("a", path, first))).digest == first  # it is there
    folder(tmp_path / "a", b"v")
    with pytest.raises(Conflict, match=f"adapter a: the files in {path} are others than those that were loaded"):
        await served.load(LoadAdapterRequest("a", path, first))
    second = (await served.load(LoadAdapterRequest("a", path))).digest
    keys = [version_key("a", digest) for digest in (first, second)]
    assert served.served == {"poems": "d", keys[0]: first, keys[1]: second}
    assert engine.held == dict.fromkeys(keys, path)
    with pytest.raises(Busy, match=r"adapter b: 3 adapters are loaded, .* `lora.max_adapters` allows 3"):
        await served.load(LoadAdapterRequest("b", path))
    for _ in range(2):  # the second has nothing to do
        await served.unload(UnloadAdapterRequest(keys[0]))
    assert (set(served.served), set(engine.held)) == ({"poems", keys[1]}, {keys[1]})
    with pytest.raises(InvalidRequest, match="adapter poems is in the cluster file"):
        await served.unload(UnloadAdapterRequest("poems"))


async def test_a_folder_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    served, engine = adapters()
    missing = str(tmp_path / "none")
    with pytest.raises(NotFound, match=f"^Loading lora a failed: No adapter found for {missing}: "):
        await served.load(LoadAdapterRequest("a", missing))

    def refuse() -> None:
        raise EngineFailed("LoRA rank 64 is greater than max_lora_rank 16.")

    engine.meanwhile, path = refuse, folder(tmp_path / "a")
    with pytest.raises(EngineFailed, match=r"^adapter a: LoRA rank 64 is greater than max_lora_rank 16"):
        await served.load(LoadAdapterRequest("a", path))
    engine.meanwhile = lambda: folder(tmp_path / "a", b"v")
    with pytest.raises(Conflict, match="changed while they were read"):
        await served.load(LoadAdapterRequest("a", path))
    assert (served.served, engine.held) == ({"poems": "d"}, {})
    fixed, _ = adapters(LoraSection(adapters={"poems": path}))
    with pytest.raises(InvalidRequest, match="adapter a: this instance loads no adapters while it serves"):
        await fixed.load(LoadAdapterRequest("a", path))
