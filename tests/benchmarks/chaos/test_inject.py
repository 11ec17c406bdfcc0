"""What the injected file does inside a process, seen from outside."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.chaos.under_test import INJECT, LoopTimes, Switches

ROOT = Path(__file__).parents[3]


def run(code: str, env: dict[str, str]) -> str:
    path = os.pathsep.join((str(INJECT), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, **env, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def test_without_a_word_nothing_changes(tmp_path: Path) -> None:
    code = "import time; print(time.time(), time.time_ns())"
    for environment in ({}, {"CHAOS_SWITCHES": str(Switches(tmp_path, ["it"]).files["it"])}):
        seconds, nanoseconds = map(float, run(code, environment).split())
        assert abs(seconds - time.time()) < 60
        assert abs(nanoseconds * 1e-9 - time.time()) < 60


def test_a_clock_jumps_while_the_process_runs(tmp_path: Path) -> None:
    switches = Switches(tmp_path, ["it"])
    code = "import sys, time; print(time.time(), flush=True); input(); print(time.time(), time.time_ns())"
    env = {**os.environ, "PYTHONPATH": str(INJECT), "CHAOS_SWITCHES": str(switches.files["it"])}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert abs(float(process.stdout.readline()) - time.time()) < 60
        switches.clock(-3600.0, "it")
        seconds, nanoseconds = map(float, process.communicate("\n", timeout=60)[0].split())
    assert abs(seconds + 3600.0 - time.time()) < 60
    assert abs(nanoseconds * 1e-9 + 3600.0 - time.time()) < 60


def test_a_database_refuses_writes_with_its_own_error(tmp_path: Path) -> None:
    switches = Switches(tmp_path / "switches", ["it"])
    code = f"""
import sqlite3
connection = sqlite3.connect({str(tmp_path / "data.db")!r})
cursor = connection.cursor()
try:
    cursor.execute("CREATE TABLE rows (x)")
    cursor.executemany("INSERT INTO rows VALUES (?)", [(1,), (2,)])
    connection.commit()
    print(cursor.execute("SELECT count(*) FROM rows").fetchone()[0])
except sqlite3.OperationalError as error:
    print(error)
"""
    env = {"CHAOS_SWITCHES": str(switches.files["it"])}
    switches.read_only("it")
    assert run(code, env) == "attempt to write a readonly database"
    switches.writable("it")
    assert run(code, env) == "2"


def test_a_lease_is_changed_and_the_answer_is_lost(tmp_path: Path) -> None:
    switches = Switches(tmp_path / "switches", ["it"])
    code = f"""
import sqlite3
connection = sqlite3.connect({str(tmp_path / "data.db")!r}, isolation_level=None)
cursor = connection.cursor()
cursor.execute("CREATE TABLE leases (renewals)")
cursor.execute("INSERT INTO leases VALUES (1)")
try:
    cursor.execute("UPDATE leases SET renewals=2")
except sqlite3.OperationalError as error:
    print(error)
print(cursor.execute("SELECT renewals FROM leases").fetchone()[0])
"""
    switches.lose_answers("it")
    assert run(code, {"CHAOS_SWITCHES": str(switches.files["it"])}).splitlines() == ["disk I/O error", "2"]


def test_the_longest_time_that_a_loop_is_held(tmp_path: Path) -> None:
    times = LoopTimes(tmp_path / "times")
    code = """
import asyncio, time, uvloop
def work(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
async def main():
    for seconds in (0.02, 0.3, 0.02):
        await asyncio.sleep(0.01)
        work(seconds)
    time.sleep(0.5)  # takes no CPU
    await asyncio.sleep(0.01)
with asyncio.Runner(loop_factory=lambda: uvloop.new_event_loop()) as runner:
    runner.run(main())
"""
    run(code, {"CHAOS_LOOP_TIMES": str(times.file)})
    assert 0.3 <= times.longest_s < 0.35
    times.reset()
    assert times.longest_s == 0.0
    run(code, {})
    assert times.longest_s == 0.0


def test_addresses_are_swapped_when_a_socket_connects() -> None:
    code = """
import zmq
with zmq.Context() as context, context.socket(zmq.REP) as real, context.socket(zmq.REQ) as asking:
    real.bind("inproc://real")
    asking.connect("inproc://named")
    asking.send(b"hello")
    print(real.recv().decode())
"""
    assert run(code, {"CHAOS_LINKS": json.dumps({"inproc://named": "inproc://real"})}) == "hello"


def test_kv_addresses_are_swapped_when_a_socket_connects() -> None:
    code = """
import socket
with socket.create_server(("127.0.0.1", 0)) as real, socket.socket() as asking, socket.socket() as other:
    import json, os
    port = real.getsockname()[1]
    os.environ["CHAOS_LINKS"] = json.dumps({"kv://10.9.8.7:1": f"kv://127.0.0.1:{port}"})
    print(asking.connect_ex(("10.9.8.7", 1)), other.connect_ex(("127.0.0.1", port)))
"""
    assert run(code, {}) == "0 0"


def test_another_wire_version() -> None:
    code = "from shared.runtime.wire_version import OURS; print(OURS.version, OURS.minimum)"
    assert run(code, {"CHAOS_WIRE_VERSION": "200"}) == "200 200"
    assert run(code, {"CHAOS_WIRE_VERSION": "200", "CHAOS_MIN_WIRE_VERSION": "12"}) == "200 12"
    assert not run(code, {}).startswith("200")
