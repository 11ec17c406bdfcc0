"""Two live schedulers and emulated instances: a burst that just fits is not placed so that it does not fit."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from shared.domain.job import Phase
from tests.gateway.cluster import make_job, tokens_of
from tests.services.control_plane import until
from tests.services.live_suite import live_suite, pipelines

GIB = 1 << 30  # 8,192 tokens of KV; a stream of 6 + 500 tokens takes 512


@pytest.mark.parametrize("sizes", [(GIB, GIB), (11 * GIB // 8, 11 * GIB // 16)])
@pytest.mark.parametrize("slower", [1.0, 1.5])
async def test_a_burst_through_both_fits_where_it_fits(tmp_path: Path, sizes: tuple[int, int], slower: float) -> None:
    """Where d1 is slower both schedulers fill d0 first, each as if it were alone; what has no room there moves."""
    first, second = sizes
    async with live_suite(tmp_path, emulated_step_s=0.004, kv_cache_bytes=first) as suite:
        await suite.start_instance("d1", "decode", emulated_step_s=0.004 * slower, kv_cache_bytes=second)
        await until(lambda: suite.known(3), "all instances are known", timeout_s=20)
        room = {name: suite.instances[name].info.total_blocks // 16 for name in ("d0", "d1")}
        with pipelines(suite, shared=True) as (gateway,):
            clients = gateway._clients
            await until(lambda: all(clients.to(one).connected for one in suite.addresses), "both are connected")
            jobs = [make_job([number + 1, *range(5)], 500) for number in range(sum(room.values()))]
            reports = asyncio.create_task(gateway._reporter.run())
            await asyncio.gather(*(gateway.run(job) for job, _ in jobs))
            await gateway._reporter.flush()
            reports.cancel()
            await asyncio.gather(reports, return_exceptions=True)
        assert {(job.phase, len(tokens_of(steps))) for job, steps in jobs} == {(Phase.COMPLETED, 500)}
        placed = [len(app.state.scheduler.reports._jobs) for app in suite.schedulers]
        assert min(placed) >= len(jobs) // 3, "both placed"
        assert Counter(job.decode_instance for job, _ in jobs) == room
        assert [suite.instances[name].engine.stats().preemptions for name in room] == [0, 0]
