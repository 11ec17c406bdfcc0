"""SIGTERM in the first moments of a process, which may be the first one of a container."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

SERVICES = ("cluster_monitor", "global_scheduler", "planner", "worker")
ENTRIES = ("gateway", "predictor", *(f"services.{name}" for name in SERVICES))
# The entry with its first import of ours that is not the handler's replaced by a sign and a wait.
ENTRY = """
import builtins, sys, time, runpy
real = builtins.__import__
def late(name, *args, **kwargs):
    ours = name.partition(".")[0] in ("gateway", "predictor", "services", "shared")
    if ours and name not in ("shared.runtime.signals", sys.argv[1]):
        print("importing", flush=True)
        time.sleep(600)
    return real(name, *args, **kwargs)
builtins.__import__ = late
runpy.run_module(sys.argv[1] + ".__main__", run_name="__main__", alter_sys=True)
"""
NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


def _namespaces() -> bool:
    return bool(shutil.which("unshare")) and subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0


@pytest.mark.parametrize("entry", ENTRIES)
def test_it_ends_a_process_that_imports(entry: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", ENTRY, entry], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"importing\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == -signal.SIGTERM


@pytest.mark.skipif(not _namespaces(), reason="this machine gives no PID namespaces")
def test_it_ends_the_first_process_of_a_namespace() -> None:
    command = [
        *NAMESPACE,
        sys.executable,
        "-c",
        ENTRY.replace('"importing"', '"importing", __import__("os").getpid()'),
        "gateway",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"importing 1\n"
    (child,) = _children(process.pid)
    os.kill(child, signal.SIGTERM)
    assert process.wait(120) == 128 + signal.SIGTERM


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(each) for each in file.read().split()]
