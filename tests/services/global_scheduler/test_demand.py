"""What a scheduler tells the monitor of what its clients ask for."""

from shared.domain.instance import Role
from shared.domain.job import JobView, LengthPrediction, Phase, Slo
from tests.ports import free_port
from tests.services.control_plane import until
from tests.services.global_scheduler.conftest import Scheduler, Start, report
from tests.services.global_scheduler.test_reports import json_sink


async def test_first_placements_are_told_by_the_second(start: Start) -> None:
    port = free_port()
    scheduler: Scheduler = await start(monitor_url=f"http://127.0.0.1:{port}")
    await scheduler.hear(p0=Role.PREFILL, p1=Role.PREFILL, d0=Role.DECODE)
    async with json_sink(port) as taken:
        await until(lambda: taken.get("demand"), "a second told", timeout_s=30)
        assert {row["requests"] for row in taken["demand"]} == {0}
        said = LengthPrediction(1, 100, 200, 0.9, "classifier")
        slo = Slo("chat", 0.5, 0.1)
        for number in range(3):
            await scheduler.client.place(JobView(f"j{number}", 100, 500, slo, said), timeout_s=5)
        await scheduler.client.place(
            JobView("j0", 100, 500, slo, said), exclude=("p0",), timeout_s=5
        )  # it failed there
        await scheduler.client.report([report("j1", Phase.DECODE)], timeout_s=5)
        await scheduler.client.place(JobView("j1", 130, 470, slo, said), timeout_s=5)  # it goes on elsewhere

        def told() -> bool:
            rows = taken["demand"]
            return bool(sum(row["requests"] for row in rows) >= 3 and rows[-1]["requests"] == 0)

        await until(told, "all told, and a second after them", timeout_s=30)
    rows = taken["demand"]
    assert sum(row["requests"] for row in rows) == 3
    assert sum(row["prompt_tokens"] for row in rows) == 300.0
    assert 3 * 100 < sum(row["output_tokens"] for row in rows) < 3 * 200
    assert sum(row["per_ttft"] for row in rows) == 6.0
    assert sum(row["split_least"] for row in rows) == 3.0  # split: full
    assert {row["source"] for row in rows} == {"scheduler-0"}
    seconds = [row["second"] for row in rows]
    assert seconds == list(range(seconds[0], seconds[0] + len(seconds)))


async def test_a_quiet_scheduler_tells_of_several_seconds_at_once(start: Start) -> None:
    port = free_port()
    await start(monitor_url=f"http://127.0.0.1:{port}")
    async with json_sink(port) as taken:
        await until(lambda: len(taken.get("demand", ())) >= 7, "seven seconds told", timeout_s=60)
    assert len(taken["revision"]) <= len(taken["demand"]) / 2 + 1  # each message tells of its policies
