"""A walk of the heap of a process under test, without a line of the product.

Python imports this file at the start of every process that has this folder on its PYTHONPATH. With HEAP_WALKS set, a
thread waits for files `go-NUMBER` in that folder and answers each with `heap-PID-NUMBER.json`. The walk runs in a
forked child: what it needs itself is not in the figures, and the process stands still for the fork alone.
"""

import ctypes
import gc
import json
import os
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

POLL_S = 0.2
# What a scheduler and a monitor keep: class, attribute, and how it is called.
KEPT = (
    ("services.global_scheduler.reports.Reports", "_jobs", "newest jobs"),
    ("shared.policy.prefix_index.PrefixIndex", "_holders", "prefix blocks"),
    ("services.global_scheduler.reports.OpenJobs", "_jobs", "open jobs"),
    ("shared.policy.ledger.WorkloadLedger", "_work", "ledger"),
    ("shared.policy.output_lengths.OutputLengths", "_open", "predictions of open jobs"),
    ("shared.policy.demand.ClassDemand", "_open", "classes of open jobs"),
    ("services.global_scheduler.forward.Waiting", "_items", "outcomes that wait"),
    ("services.global_scheduler.placer.Placer", "_refused", "jobs without a place"),
    ("services.cluster_monitor.slo.SloService", "_seen", "ids that were counted"),
    ("services.cluster_monitor.slo_windows.SloWindows", "_slots", "SLO windows"),
    ("services.cluster_monitor.request_stats.ServedBook", "_slots", "steps of what was served"),
    ("services.cluster_monitor.events.Events", "_rings", "events"),
    ("services.cluster_monitor.operations.OperationLog", "_operations", "operations"),
    ("services.cluster_monitor.slo.DemandService", "_seconds", "demand by second"),
    ("shared.store.write_behind.WriteBehind", "_rows", "rows that wait"),
)
_LEFT_OUT = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.FrameType)
_LARGEST = 1 << 28  # some objects of libraries give a size that they do not have


class _Mallinfo(ctypes.Structure):
    _fields_ = [(f"field_{at}", ctypes.c_size_t) for at in range(10)]


_MMAPPED, _USED, _FREE = 4, 7, 8  # hblkhd, uordblks, fordblks


def allocators() -> dict[str, int]:
    """Bytes: the process's PSS; what glibc has given out and holds free; what SQLite uses."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = _Mallinfo
    info = libc.mallinfo2()
    used, free = (getattr(info, f"field_{at}") for at in (_USED, _FREE))
    used += getattr(info, f"field_{_MMAPPED}")
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    pss = next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    found = {"pss": pss << 10, "c_used": used, "c_free": free, "sqlite": 0}
    try:
        sqlite = ctypes.CDLL("libsqlite3.so.0")
        sqlite.sqlite3_memory_used.restype = ctypes.c_int64
        found["sqlite"] = sqlite.sqlite3_memory_used()
    except OSError:
        pass  # Python brings its own, which cannot be asked
    return found


def walked(root: object, seen: set[int]) -> int:
    """Bytes of all objects that `root` leads to and that are not in `seen`."""
    total, todo = 0, [root]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, _LEFT_OUT):
            continue
        seen.add(id(one))
        size = sys.getsizeof(one)
        total += size if size < _LARGEST else 0
        todo += gc.get_referents(one)
        if isinstance(one, dict):
            todo += list(one)  # keys that are all strings are left out by `get_referents`
    return total


def _kept() -> Iterator[tuple[str, Any]]:
    everything = gc.get_objects()
    for path, attribute, name in KEPT:
        module, _, cls = path.rpartition(".")
        kind = getattr(sys.modules.get(module), cls, None)
        if kind is not None:
            for one in [one for one in everything if type(one) is kind]:
                yield name, getattr(one, attribute)


def _entries(name: str, found: Any) -> int:
    if name == "prefix blocks":  # each once for each instance that holds it
        return sum(len(some) if isinstance(some, tuple | dict) else 1 for some in found.values())
    if name in ("SLO windows", "events"):
        return sum(len(part) for part in found.values())
    return len(found)


def _walk() -> dict[str, Any]:
    gc.unfreeze()  # what there was at the start is not found else
    garbage = gc.collect()
    gc.disable()
    seen: set[int] = set()
    kept: dict[str, list[int]] = {}
    for name, found in _kept():
        one = kept.setdefault(name, [0, 0])
        one[0] += walked(found, seen)
        one[1] += _entries(name, found)
    everything = gc.get_objects()
    seen.add(id(seen))
    return {
        "garbage": garbage,
        "kept": kept,
        "python": sum(kept[name][0] for name in kept) + walked(everything, seen) - sys.getsizeof(everything),
    }


def _answer(folder: Path, number: str) -> None:
    found: dict[str, Any] = {"argv": sys.argv, **allocators()}
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    file = folder / f"heap-{os.getppid()}-{number}"
    try:
        file.with_suffix(".part").write_text(json.dumps(found | _walk()))
        file.with_suffix(".part").rename(file.with_suffix(".json"))
    except BaseException:
        file.with_suffix(".error").write_text(traceback.format_exc())
    finally:
        os._exit(0)


def _serve(folder: Path) -> None:
    answered = set()
    while True:
        time.sleep(POLL_S)
        for file in folder.glob("go-*"):
            if file.name not in answered:
                answered.add(file.name)
                _answer(folder, file.name.removeprefix("go-"))


if __name__ == "sitecustomize" and "HEAP_WALKS" in os.environ:
    threading.Thread(target=_serve, args=(Path(os.environ["HEAP_WALKS"]),), daemon=True, name="heap-walks").start()
