"""Scenarios of processes and of the database.

One or all processes of a service are killed or frozen, and wall clocks jump. The database is locked, removed,
read-only, too large, or on a full disk: serving must not wait for it, and rows must be written when the fault is over.
"""

import asyncio
import sqlite3
import time
from contextlib import closing
from functools import partial

from benchmarks.chaos.faults import (
    FAULT_S,
    HOUR_S,
    NOTICED_S,
    clock_jump,
    decode,
    freeze,
    kill,
    kill_in_turn,
    prefill,
    services,
)
from benchmarks.chaos.scenario import scenario
from benchmarks.chaos.testbeds import BACKLOG, KEPT_ROWS
from benchmarks.chaos.under_test import SuiteUnderTest
from services.launcher.suite import until
from shared.domain.job import Phase
from shared.store.tables import requests

process = partial(scenario, "processes")
control_plane = partial(scenario, "control plane")
clock = partial(scenario, "clocks")
database = partial(scenario, "database")


process("kill-decode", "kill -9 of one decode instance", kill(decode(1)))
process("kill-prefill", "kill -9 of one prefill instance", kill(prefill(1)))
process("kill-all-decode", "kill -9 of every decode instance at once", kill(decode(), outage=True))
process("kill-all-prefill", "kill -9 of every prefill instance at once", kill(prefill(), outage=True))


@process("kill-in-turn", "kill -9 of a decode instance each second, six times", bound_s=90.0)
async def _kill_in_turn(suite: SuiteUnderTest) -> None:
    """The next victim waits until the other decode instances are ready, so one instance of the role always runs."""
    for name in (*suite.decode, *suite.decode):
        await suite.until_ready(*(other for other in suite.decode if other != name))
        suite.processes.kill(name)
        await asyncio.sleep(1.0)
    await suite.until_ready(*suite.decode)


process("kill-schedulers", "kill -9 of both schedulers at once", kill(services("scheduler"), outage=True))
process("kill-monitor", "kill -9 of the monitor", kill(services("monitor")))
process("kill-predictor", "kill -9 of the length predictor", kill(services("predictor")))
process(
    "kill-control-plane",
    "kill -9 of schedulers, monitor, predictor",
    kill(services("scheduler", "monitor", "predictor"), outage=True),
)
process("freeze-decode", "one decode instance stands still for 4 s", freeze(decode(1)), outage_s=NOTICED_S)
process("freeze-prefill", "one prefill instance stands still for 4 s", freeze(prefill(1)), outage_s=NOTICED_S)
process("freeze-monitor", "the monitor stands still for 4 s", freeze(services("monitor")))
process("freeze-schedulers", "both schedulers stand still for 4 s", freeze(services("scheduler"), outage=True))
process("freeze-predictor", "the predictor stands still for 4 s", freeze(services("predictor")))
process("freeze-gateway", "one of two gateways stands still for 4 s", freeze(services("gateway", count=1), outage=True))


@process("hang-decode", "a decode instance stands still for good", outage_s=NOTICED_S)
async def _hang_decode(suite: SuiteUnderTest) -> None:
    """A frozen instance that nothing thaws: the launcher has to restart it."""
    name = suite.decode[0]
    pid = suite.processes.statuses[name].pid
    suite.processes.freeze(name)
    await suite.processes.back({name: pid}, timeout_s=20.0)


control_plane("either-scheduler", "kill -9 of one scheduler, then of the other", kill_in_turn(services("scheduler")))
control_plane(
    "either-gateway",
    "kill -9 of one gateway, then of the other",
    kill_in_turn(services("gateway")),
    breaks=True,
    bound_s=60.0,
)


@control_plane("monitor-and-decode", "kill -9 of the monitor and of a decode instance together")
async def _monitor_and_decode(suite: SuiteUnderTest) -> None:
    """While no monitor can report the loss, jobs are still placed on the instance, and wait for a connection."""
    await suite.kill_until_back(*suite.named("monitor"), suite.decode[0])
    await suite.until_ready()


clock("clock-monitor", "the monitor's clock jumps an hour ahead, and behind", clock_jump(services("monitor")))
clock(
    "clock-front",
    "clocks of schedulers and a gateway jump an hour ahead, and behind",
    clock_jump(lambda s: (*s.named("scheduler"), s.named("gateway")[0])),
)
clock(
    "clock-instances",
    "clocks of two instances jump an hour ahead, and behind",
    clock_jump(lambda s: (s.decode[0], s.prefill[0])),
)


@clock("clock-restart", "a decode instance is restarted with its clock an hour behind")
async def _restart_with_clock_behind(suite: SuiteUnderTest) -> None:
    """The restarted instance looks older than its predecessor."""
    name = suite.decode[0]
    suite.switches.clock(-HOUR_S, name)
    await suite.kill_until_back(name)
    await suite.until_ready(name, timeout_s=10.0)


_WRITTEN_S = 10.0
BACKLOG_ROWS = 20 * KEPT_ROWS
_OLD_S = 3_600.0  # the age of the rows of a backlog
_PRUNED_S = 30.0


async def _break_database(kind: str, suite: SuiteUnderTest) -> None:
    async with suite.database.broken(kind):
        await asyncio.sleep(FAULT_S)
    await _written_again(suite)


for _kind, _text in {
    "locked": "another connection holds the write lock for 4 s",
    "gone": "the file is removed while it is in use",
    "read-only": "every write is refused for 4 s",
    "disk-full": "no file can grow for 4 s",
}.items():
    database(f"database-{_kind}", _text, partial(_break_database, _kind))


@database("database-backlog", f"{BACKLOG_ROWS:,} rows where {KEPT_ROWS:,} are kept, pruned under load", bed=BACKLOG)
async def _backlog(suite: SuiteUnderTest) -> None:
    """A scheduler starts with twenty times the rows that are kept, and the oldest are deleted under load."""
    scheduler, _ = suite.named("scheduler")
    await asyncio.to_thread(_fill, suite)
    before = await asyncio.to_thread(_pages, suite)
    since_s, since_mono = time.time(), time.monotonic()
    await suite.processes.back(suite.processes.stop(scheduler))

    async def pruned() -> bool:
        rows, pages = await asyncio.to_thread(_rows, suite, 0.0), await asyncio.to_thread(_pages, suite)
        return rows <= KEPT_ROWS + _answered(suite, since_mono) and pages < before // 2

    await until(pruned, _PRUNED_S, f"the database to come down from {BACKLOG_ROWS:,} rows and {before:,} pages")
    took_s, pages = time.monotonic() - since_mono, await asyncio.to_thread(_pages, suite)
    suite.notes.append(f"{BACKLOG_ROWS:,} rows pruned in {took_s:.1f} s, {before:,} pages down to {pages:,}")
    answered = _answered(suite, since_mono)
    what = f"the rows of all {answered} requests that ran meanwhile"
    await until(lambda: _rows(suite, since_s) >= answered, _WRITTEN_S, what)


@database("database-gone-restart", "the file is removed and its writers are killed")
async def _gone_and_restarted(suite: SuiteUnderTest) -> None:
    suite.database.remove()
    with suite.outage():
        await suite.kill_until_back(*suite.database.writers)
    await _written_again(suite)


def _answered(suite: SuiteUnderTest, since_s: float) -> int:
    """Answers to requests that were sent after that moment of the monotonic clock."""
    assert suite.load is not None
    return sum(each.began_s >= since_s for each in suite.load.answered)


def _fill(suite: SuiteUnderTest) -> None:
    """Add rows of requests that ended long ago."""
    old_s = time.time() - _OLD_S
    row = {
        **dict.fromkeys(("scheduler_id", "gateway_id"), "past"),
        **dict.fromkeys(("caller", "outcome"), ""),
        "phase": Phase.COMPLETED.value,
        "prefill_instance": "prefill-0",
        "decode_instance": "decode-0",
        "split": 100,
        "slo": "default",
        "final": 1,
        "prompt_tokens": 100,
        "output_tokens": 24,
        "timeline": None,
        "ttft_s": 0.1,
        "tpot_s": 0.04,
        "longest_gap_s": 0.08,
        "gaps": 23,
        "gaps_over": 0,
        "slo_met": 1,
    }
    names = ("job_id", "arrived_s", "updated_s", *row)
    assert set(names) == set(requests.c.keys())
    rows = [
        (f"past-{number}", old_s + number * 1e-3, old_s + number * 1e-3 + 1.0, *row.values())
        for number in range(BACKLOG_ROWS)
    ]
    insert = f"INSERT INTO requests ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    with closing(sqlite3.connect(suite.database.file, timeout=_WRITTEN_S)) as connection, connection:
        connection.executemany(insert, rows)


def _rows(suite: SuiteUnderTest, since_s: float) -> int:
    return _number(suite, "SELECT count(*) FROM requests WHERE arrived_s >= ?", since_s)


def _pages(suite: SuiteUnderTest) -> int:
    return _number(suite, "PRAGMA page_count")


def _number(suite: SuiteUnderTest, query: str, *values: float, timeout_s: float = _WRITTEN_S) -> int:
    with closing(sqlite3.connect(f"file:{suite.database.file}?mode=ro", uri=True, timeout=timeout_s)) as connection:
        return int(connection.execute(query, values).fetchone()[0])


async def _written_again(suite: SuiteUnderTest) -> None:
    """Wait until a job that ended after this moment is in the database."""
    since_s = time.time()

    def written() -> bool:
        if not suite.database.file.exists():
            return False
        try:
            return _number(suite, "SELECT count(*) FROM requests WHERE updated_s > ?", since_s, timeout_s=1.0) > 0
        except sqlite3.Error:
            return False

    await until(written, _WRITTEN_S, "jobs in the database again")
