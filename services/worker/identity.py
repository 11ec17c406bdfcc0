"""The identity of an instance.

It is the record with which the instance registers at the cluster monitor, the fingerprint of its model, by which
instances recognise that they serve the same model, and the precision of its weights.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from services.worker.engines.base import EngineInfo
from services.worker.settings import WorkerSettings
from shared.domain.instance import InstanceInfo
from shared.domain.precision import quantised_to
from shared.files.text import read_json
from shared.model.support import config_of
from shared.model.weights import kv_scales_of

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
        precision=engine.precision,
        loads_adapters=settings.lora.allow_runtime_updating,
        media=engine.media,
        rank_of=settings.rank_of,
    )
    if not settings.rates_file:
        return info
    from shared.cost.rates_file import Calibration, Kind

    found = Calibration.read(Path(settings.rates_file)).for_kind(Kind.from_info(info, settings.threads))
    return msgspec.structs.replace(info, rates=found.applied_to(info.rates))


def precision_of(settings: WorkerSettings) -> str:
    """What its weights are quantised to, as `InstanceInfo.precision`; empty where that is the model's own precision.

    A checkpoint of its own has the digest of its weights behind it: two of the same precision differ.
    """
    if settings.engine == "emulated":
        return settings.emulated_precision
    if settings.weights:
        return f"{quantised_to(_config(settings.weights)) or 'unquantised'}-{fingerprint(settings.weights)[:8]}"
    method = settings.engine_args.get("quantization")  # vLLM quantises the weights while it loads them
    return str(method) if method and not quantised_to(_config(settings.model)) else ""


def _config(model: str) -> Mapping[str, Any]:
    folder = folder_of(model)
    return config_of(folder) if folder is not None else {}


def folder_of(model: str) -> Path | None:
    """The folder of a model's files on this host: itself, or that of its name in the hub's cache."""
    folder = Path(model)
    return folder if folder.is_dir() else _cached_snapshot(model)


def fingerprint(model: str) -> str:
    """Digest of the configuration and of strided samples of every weight file; of the name when not a folder.

    Samples keep it fast for a model of a hundred gigabytes, and still tell two fine-tunes of one base apart. Scales of
    K and V are digested whole: samples miss the few bytes by which two checkpoints with KV in fp8 may differ.
    The precision is left out: instances may differ in it.
    """
    folder, digest = folder_of(model), hashlib.sha256()
    if folder is None:
        digest.update(model.encode())
        return digest.hexdigest()[:32]
    config = read_json(folder / "config.json")
    kept = {key: value for key, value in config.items() if key not in _IGNORED_KEYS}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    for file in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")):
        _sample(file, digest)
        for name, scale in kv_scales_of(file):
            digest.update(name.encode() + scale)
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
