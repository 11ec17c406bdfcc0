"""Starts an instance's engine and its side of KV transfers."""

import asyncio
import secrets
import tempfile
from contextlib import AsyncExitStack
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from services.worker.engines.base import CacheSink, CurrentRates, Engine, EngineInfo
from services.worker.kv.port import ConnectorPort, ExportLedger, KvPort
from services.worker.kv.rank_control import DirectControl, KvControl, SocketControl
from services.worker.kv.rank_events import KvEvents
from services.worker.kv.rank_messages import Stats
from services.worker.settings import WorkerSettings
from shared.domain.instance import ELEMENT_BYTES, KvKind
from shared.domain.kv import KvHandle
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
    adapters = settings.lora.digests()
    config = _connector_config(settings, generation, events_address, control_key)
    config |= {"controls": controls, "adapters": adapters}
    engine = VllmEngine(settings, config, rates, on_cache)
    stack.push_async_callback(engine.close)
    info = await engine.start()
    control: KvControl
    if (rank := engine.rank) is not None:
        control = DirectControl(rank.carry_out)
    else:
        control = await stack.enter_async_context(SocketControl(controls, control_key, settings.curve_pair()))
    ranks = await control.call(Stats())
    ledger = ExportLedger(min(each.staging_limit_bytes for each in ranks), settings.ranks)
    template = _handle_template(settings, info, generation)
    size_of = partial(staged_bytes, settings, info)
    return engine, info, ConnectorPort(control, events, template, ledger, size_of, adapters=adapters)


def _connector_config(settings: WorkerSettings, generation: int, events: str, control_key: str) -> dict[str, Any]:
    """The `KvSettings` of the ranks."""
    from services.worker.identity import fingerprint, precision_of

    curve_public, curve_secret = settings.curve_pair() or ("", "")
    return {
        "endpoints": list(settings.kv_endpoints),
        "events": events,
        "control_key": control_key,
        "instance_id": settings.instance_id,
        "generation": generation,
        "fingerprint": fingerprint(settings.model),
        "precision": precision_of(settings),
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


def staged_bytes(settings: WorkerSettings, engine: EngineInfo, tokens: int) -> int:
    """What a transfer of so many tokens takes of the staging memory of the rank that holds the most; with more ranks
    than KV heads, neighbours hold the same head.
    """
    kv = engine.compatibility.geometry
    ends = list(accumulate(engine.stages or (max(kv.layers, *(part.layers[-1] + 1 for part in kv.parts)),)))
    most = 0
    for start, end in pairwise([0, *ends]):
        size = 0
        for part in kv.parts:
            layers = sum(start <= layer < end for layer in part.layers)
            heads = max(1, part.heads // settings.tensor_parallel)
            rows = 1 if part.kind is KvKind.STATE else min(tokens, part.window + 1) if part.window else tokens
            bytes_each = ELEMENT_BYTES.get(part.dtype or engine.kv_dtype or settings.dtype, 2)
            size += layers * part.sides * heads * part.head_dim * rows * bytes_each
        most = max(most, size)
    return most


def _handle_template(settings: WorkerSettings, info: EngineInfo, generation: int) -> KvHandle:
    return KvHandle(
        transfer_id="",
        instance_id=settings.instance_id,
        generation=generation,
        fingerprint=info.compatibility.fingerprint,
        endpoints=settings.kv_endpoints,
        tokens=0,
        dtype=info.kv_dtype or settings.dtype,
        stages=info.stages,
        lease_s=settings.lease_s,
        precision=info.precision,
    )
