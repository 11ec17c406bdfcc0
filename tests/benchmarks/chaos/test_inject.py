"""What the injected file does inside a process, seen from outside."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.chaos.handles import LoopTimes, Switches
from benchmarks.chaos.inject.sitecustomize import LOST, READ_ONLY
from benchmarks.chaos.under_test import INJECT

ROOT = Path(__file__).parents[3]


def run(code: str, env: dict[str, str]) -> list[str]:
    """The lines that the code prints in a process with the injected file."""
    env = {**os.environ, **env, "PYTHONPATH": os.pathsep.join((str(INJECT), str(ROOT)))}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split("\n")


@pytest.fixture
def switches(tmp_path: Path) -> Switches:
    return Switches(tmp_path / "switches", ["it"])


def test_a_clock_jumps_while_the_process_runs(switches: Switches) -> None:
    file = switches.files["it"]
    data = file.read_bytes()
    switches.clock(-3600.0, "it")
    code = f"""
import time
print(time.time(), time.time_ns() / 1e9)
open({str(file)!r}, "r+b").write({file.read_bytes()!r})
print(time.time(), time.time_ns() / 1e9)
"""
    for env, offset_s in ({}, 0.0), ({"CHAOS_SWITCHES": str(file)}, -3600.0):
        file.write_bytes(data)
        before, after = (tuple(map(float, line.split())) for line in run(code, env)[:2])
        assert all(abs(at - time.time()) < 60 for at in before)
        assert all(abs(at - offset_s - time.time()) < 60 for at in after)


DATABASE = """
import sqlite3
connection = sqlite3.connect({file!r}, isolation_level=None)
cursor = connection.cursor()
try:
    cursor.execute("CREATE TABLE leases (renewals)")
    cursor.executemany("INSERT INTO leases VALUES (?)", [(1,)])
    cursor.execute("UPDATE leases SET renewals=2")
except sqlite3.OperationalError as error:
    print(error)
    if "readonly" in str(error):
        raise SystemExit
print(cursor.execute("SELECT renewals FROM leases").fetchone()[0])
"""


@pytest.mark.parametrize(
    ("mode", "lines"),
    [(0, ["2"]), (READ_ONLY, ["attempt to write a readonly database"]), (LOST, ["disk I/O error", "2"])],
)
def test_a_database_refuses_writes_or_loses_answers(
    mode: int, lines: list[str], switches: Switches, tmp_path: Path
) -> None:
    switches.database(mode, "it")
    code = DATABASE.format(file=str(tmp_path / "data.db"))
    assert run(code, {"CHAOS_SWITCHES": str(switches.files["it"])})[:-1] == lines


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
    run(code, {})
    assert times.longest_s == 0.0


def test_addresses_are_replaced_when_a_socket_connects() -> None:
    code = """
import json, os, socket, zmq
with socket.create_server(("127.0.0.1", 0)) as real, socket.socket() as kv, socket.socket() as other:
    port = real.getsockname()[1]
    links = {"kv://10.9.8.7:1": f"kv://127.0.0.1:{port}", "inproc://named": "inproc://real"}
    os.environ["CHAOS_LINKS"] = json.dumps(links)
    print(kv.connect_ex(("10.9.8.7", 1)), other.connect_ex(("127.0.0.1", port)))
with zmq.Context() as context, context.socket(zmq.REP) as server, context.socket(zmq.REQ) as client:
    server.bind("inproc://real")
    client.connect("inproc://named")
    client.send(b"hello")
    print(server.recv().decode())
"""
    assert run(code, {})[:2] == ["0 0", "hello"]


def test_another_wire_version() -> None:
    code = "from shared.runtime.wire_version import OURS; print(OURS.version, OURS.minimum)"
    assert run(code, {"CHAOS_WIRE_VERSION": "200"})[0] == "200 200"
    assert run(code, {"CHAOS_WIRE_VERSION": "200", "CHAOS_MIN_WIRE_VERSION": "12"})[0] == "200 12"
    assert not run(code, {})[0].startswith("200")
