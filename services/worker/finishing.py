"""The end of an instance in good order: it gives away nothing that it has begun."""

import asyncio
import time

from services.worker.jobs.roles import RoleState
from services.worker.kv.port import KvPort
from shared.runtime.logs import get_log

log = get_log(__name__)
_LOOK_S = 0.05


async def finish(roles: RoleState, kv: KvPort, within_s: float) -> None:
    """Take no new jobs and wait for those under way and until their KV was fetched; `within_s` seconds at most.

    What is left then goes on elsewhere, as after a death. 0: at once.
    """
    if not within_s:
        return
    until = time.monotonic() + within_s
    reply = await roles.drain(within_s)
    await asyncio.sleep(_LOOK_S)  # the last replies leave; one that does not is asked for again elsewhere
    while kv.staged_bytes and time.monotonic() < until:  # noqa: ASYNC110 - exports end by messages of several kinds
        await asyncio.sleep(_LOOK_S)
    log.info("told to end", waited_s=round(reply.duration_s, 3), left=reply.remaining, staged_bytes=kv.staged_bytes)
