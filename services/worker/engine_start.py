"""Starts an instance's engine and its side of KV transfers."""

import asyncio
import secrets
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from services.worker.engines.base import CacheSink, CurrentRates, Engine, EngineInfo
from services.worker.kv.port import ConnectorPort, ExportLedger, KvPort
from services.worker.kv.rank_control import DirectControl, KvControl, SocketControl
from services.worker.kv.rank_events import KvEvents
from services.worker.settings import WorkerSettings
from shared.domain.kv import KvHandle, default_staging
from shared.runtime.signals import ending_at_sigterm


async def start_engine(
    settings: WorkerSettings, generation: int, rates: CurrentRates, on_cache: CacheSink, stack: AsyncExitStack
) -> tuple[Engine, EngineInfo, KvPort]:
    """The engine that the settings name, running until the stack is closed, its description, and its KV side.

    rates: those of its steps, as far as known. on_cache: receives the events of its prefix cache.
    """
    # Each engine has heavy imports that the other does not need: vLLM and torch, or the cost model.
    if settings.engine == "emulated":
        from services.worker.engines.emulated import EmulatedEngine, EmulatedPort

        emulated = EmulatedEngine(settings, rates, on_cache)
        stack.push_async_callback(emulated.close)
        info = await emulated.start()
        return emulated, info, EmulatedPort(_handle_template(settings, info, generation), emulated.link)
    from services.worker.engines.vllm import VllmEngine
    from services.worker.engines.vllm_start import obtain_model

    with ending_at_sigterm():  # a download may take hours
        await asyncio.to_thread(obtain_model, settings)  # before the fingerprint, which samples the weights
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="polyphase-"))
    events_address, control_key = f"ipc://{Path(folder) / 'events'}", secrets.token_hex(16)
    events = await stack.enter_async_context(KvEvents(events_address))
    controls = [
        f"ipc://{Path(folder) / f'control-{rank}'}" for rank in range(settings.ranks if settings.ranks > 1 else 0)
    ]
    config = _connector_config(settings, generation, events_address, control_key) | {"controls": controls}
    engine = VllmEngine(settings, config, rates, on_cache)
    stack.push_async_callback(engine.close)
    info = await engine.start()
    control: KvControl
    if (rank := engine.rank) is not None:
        control = DirectControl(rank.carry_out)
    else:
        control = await stack.enter_async_context(SocketControl(controls, control_key, settings.curve_pair()))
    token_bytes = _token_bytes(settings, info)
    ledger = ExportLedger(settings.staging_bytes or _staging_bytes(info, token_bytes), settings.ranks)
    template = _handle_template(settings, info, generation)
    return engine, info, ConnectorPort(control, events, template, ledger, token_bytes)


def _connector_config(settings: WorkerSettings, generation: int, events: str, control_key: str) -> dict[str, Any]:
    """The `KvSettings` of the ranks."""
    from services.worker.identity import fingerprint

    curve_public, curve_secret = settings.curve_pair() or ("", "")
    return {
        "endpoints": list(settings.kv_endpoints),
        "events": events,
        "control_key": control_key,
        "instance_id": settings.instance_id,
        "generation": generation,
        "fingerprint": fingerprint(settings.model),
        "staging_bytes": settings.staging_bytes,
        "inbox_bytes": settings.inbox_bytes,
        "lease_s": settings.lease_s,
        "lease_renewals": settings.lease_renewals,
        "connections": settings.kv_connections,
        "nixl_trusted": settings.kv_nixl_trusted,
        "pull_timeout_s": settings.pull_timeout_s,
        "lossy": settings.lossy_kv,
        "curve_public": curve_public,
        "curve_secret": curve_secret,
        "encrypted": bool(settings.curve_public),
        "fault": settings.kv_fault,
    }


def _token_bytes(settings: WorkerSettings, engine: EngineInfo) -> int:
    """KV of one token on the rank with the most layers; with more ranks than KV heads, neighbours hold the same
    head.
    """
    kv = engine.compatibility.geometry
    heads = max(1, kv.kv_heads // settings.tensor_parallel)
    layers = max(engine.stages or (kv.layers,))
    return int(2 * layers * heads * kv.head_dim * (4 if settings.dtype == "float32" else 2))


def _staging_bytes(engine: EngineInfo, token_bytes: int) -> int:
    """Of the rank that holds the most: no more than each rank makes of its caches."""
    cached = engine.total_blocks * engine.block_size * token_bytes
    return default_staging(cached, engine.max_model_len * token_bytes)


def _handle_template(settings: WorkerSettings, info: EngineInfo, generation: int) -> KvHandle:
    return KvHandle(
        transfer_id="",
        instance_id=settings.instance_id,
        generation=generation,
        fingerprint=info.compatibility.fingerprint,
        endpoints=settings.kv_endpoints,
        tokens=0,
        dtype=settings.dtype,
        stages=info.stages,
        lease_s=settings.lease_s,
    )
