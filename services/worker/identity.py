"""The identity of an instance.

It is the record with which the instance registers at the cluster monitor, and the fingerprint of its model, by which
instances recognise that they serve the same model.
"""

import hashlib
import json
from pathlib import Path

import msgspec

from services.worker.engines.base import EngineInfo
from services.worker.settings import WorkerSettings
from shared.domain.instance import InstanceInfo
from shared.files.text import read_json

_SAMPLE_BYTES = 64 << 10
_SAMPLES = 16
_IGNORED_KEYS = {"torch_dtype", "dtype", "_name_or_path", "transformers_version", "use_cache"}


def instance_info(settings: WorkerSettings, engine: EngineInfo, generation: int) -> InstanceInfo:
    """With the rates of its calibration, if there is one. Raises InvalidRequest for a file that is not a
    calibration.
    """
    info = InstanceInfo(
        instance_id=settings.instance_id,
        generation=generation,
        model=settings.model,
        compatibility=engine.compatibility,
        accelerator=settings.accelerator,
        dtype=settings.dtype,
        tensor_parallel=settings.tensor_parallel,
        block_size=engine.block_size,
        total_blocks=engine.total_blocks,
        max_model_len=engine.max_model_len,
        chunk_size=settings.step_tokens,
        rpc=settings.address(settings.rpc_port),
        http=f"http://{settings.advertise_host or settings.host}:{settings.http_port}",
        kv_endpoints=settings.kv_endpoints,
        max_seqs=settings.max_seqs,
        rates=msgspec.structs.replace(engine.rates, weight=settings.weight),
        pipeline_parallel=settings.pipeline_parallel,
        kv_dtype=engine.kv_dtype,
        adapters=engine.adapters,
        media=engine.media,
    )
    if not settings.rates_file:
        return info
    from shared.cost.rates_file import Calibration, Kind

    found = Calibration.read(Path(settings.rates_file)).for_kind(Kind.from_info(info, settings.threads))
    return msgspec.structs.replace(info, rates=found.applied_to(info.rates))


def fingerprint(model: str) -> str:
    """Digest of the configuration and of strided samples of every weight file; of the name when not a folder.

    Samples keep it fast for a model of a hundred gigabytes, and still tell two fine-tunes of one base apart.
    The precision is left out: instances may differ in it.
    """
    folder = Path(model)
    digest = hashlib.sha256()
    if not folder.is_dir():
        folder = _cached_snapshot(model) or folder
    if not folder.is_dir():
        digest.update(model.encode())
        return digest.hexdigest()[:32]
    config = read_json(folder / "config.json")
    kept = {key: value for key, value in config.items() if key not in _IGNORED_KEYS}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    for file in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")):
        _sample(file, digest)
    return digest.hexdigest()[:32]


def _sample(file: Path, digest: "hashlib._Hash") -> None:
    size = file.stat().st_size
    digest.update(f"{file.name}:{size}".encode())
    with file.open("rb") as data:
        for index in range(_SAMPLES):
            data.seek(max(0, (size - _SAMPLE_BYTES) * index // (_SAMPLES - 1)))
            digest.update(data.read(_SAMPLE_BYTES))


def _cached_snapshot(model: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    return Path(found).parent if isinstance(found, str) else None
