"""What an instance registers as."""

from pathlib import Path

import msgspec

from services.worker.engines.base import EngineInfo
from services.worker.settings import WorkerSettings
from shared.domain.instance import InstanceInfo


def instance_info(settings: WorkerSettings, engine: EngineInfo, generation: int) -> InstanceInfo:
    """With the rates of its calibration, where there is one. Raises InvalidRequest for a file of rates that is none."""
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
    )
    if not settings.rates_file:
        return info
    from shared.cost.rates_file import Calibration, Kind, merged_rates

    found = Calibration.read(Path(settings.rates_file)).of(Kind.of(info, settings.threads))
    return msgspec.structs.replace(info, rates=merged_rates(info.rates, found.rates))
