"""Suites as a monitor tells of them, made up: what is drawn of them is tested, not how they came to it."""

from typing import Any

from services.launcher.state_file import RunningProcess, SuiteState
from services.launcher.status import Snapshot
from shared.domain.instance import Compatibility, InstanceInfo, InstanceState, KvGeometry, Role
from shared.domain.slo import SloReport
from shared.domain.verdict import Count, Level, Link, Problem, Stage, Verdict
from shared.wire.api.monitor import InstanceRow, LoadByName


def entry(name: str, state: str = "ready", role: str = "decode", operation: str = "", **load: int) -> InstanceRow:
    same = Compatibility("f00d", "emulated", "1", 1, KvGeometry(6, 4, 64))
    sizes, urls = ("bfloat16", 1, 16, 1000, 2048, 512), ("tcp://a:1", "http://a:2", ())
    info = InstanceInfo(name, 1, "m", same, "A100-SXM-80", *sizes, *urls)
    reported = LoadByName(**{"free_blocks": 1000, **load})
    return InstanceRow(
        instance_id=name,
        role=Role(role),
        state=InstanceState(state),
        state_since_s=0.0,
        registered_s=0.0,
        operation=operation,
        death="",
        connected=True,
        info=info,
        load=reported,
    )


def verdict(level: Level = Level.GOOD, *problems: Problem, share: float | None = 0.2) -> Verdict:
    chain = tuple(Link(stage, 100, 0.0123, 1.234, share, 12_345) for stage in Stage)
    counts = {Role.PREFILL: Count(ready=2, expected=2), Role.DECODE: Count(ready=14, expected=16, dead=2)}
    text = "; ".join(problem.text for problem in problems) or "100 requests ended in the last 60 s"
    return Verdict(0.0, level, f"{level.value.capitalize()}: {text}", problems, chain, counts, 60.0, 100)


def state(*processes: RunningProcess) -> SuiteState:
    instances = ("prefill-0", "decode-0")
    urls = ("http://s",)
    return SuiteState(
        launcher_pid=1,
        launcher_started_s=1.0,
        model="m",
        api_url="http://api",
        monitor_url="http://m",
        scheduler_urls=urls,
        predictor_url="",
        dashboard_url="http://dash",
        instance_ids=instances,
        processes=processes,
    )


def window() -> SloReport:
    times, gaps = {"p50": 0.1234, "p99": 12.34}, {"p50": 0.1, "p90": 0.42, "p99": 1.5, "max": 12.34}
    shares = {"ttft_attainment": 1.0, "tpot_attainment": None, "attainment": 0.26, "itl_attainment": 0.26}
    name = "a-class-with-a-long-name"
    return SloReport(name, 60.0, 12_345, ttft_s=times, tpot_s=times, longest_gap_s=gaps, **shares)


def many(count: int, long: bool = False) -> list[InstanceRow]:
    tail = "-with-a-name-that-goes-on-and-on" if long else ""
    return [entry(f"decode{tail}-{number}", running=number % 7, free_blocks=1000 - number) for number in range(count)]


def seen(**changes: Any) -> Snapshot:
    plain = {"state": state(), "verdict": verdict(), "instances": many(4), "slo": [window()]}
    return Snapshot(**{"time_s": 0.0, **plain, **changes})
