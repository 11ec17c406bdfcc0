"""Lists the files that one request enters: `python -m tests.structure.request_path chat` (or `flip`).

Starts a suite of the demo model, sends requests, and counts the calls of each function in each process. A file is on
the path if one of its functions is called at least once per request (0.75, for work that is shared between requests),
beyond what it is called without requests in the same time; of a chat, also more than once a second, since some periodic
work is done more often while requests run. `chat` is a plain chat stream; `flip` a role flip there and
back, by `polyphase flip`.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import yaml

from services.launcher.ports import free_range
from tests.patient_clusters import patient
from tests.structure.measure import ROOT

TRACE = Path(__file__).parent / "path_trace"
LAPTOP = ROOT / "services/launcher/clusters/laptop.yaml"
REQUESTS = {"chat": 12, "flip": 4}
SHARE = 0.75
PERIODIC_PER_S = {"chat": 1.2, "flip": 0.0}
START_S = 400.0
IDLE, BUSY, WRITE = 1, 2, 9


Functions = dict[str, dict[str, list[str]]]  # functions by file, by process (program and process id)


def files_on_paths(*kinds: str) -> dict[str, Functions]:
    """The functions on the path of each kind of request, all traced on one suite."""
    with tempfile.TemporaryDirectory(prefix="polyphase-path-") as folder:
        return _Suite(Path(folder)).trace(kinds)


class _Suite:
    def __init__(self, folder: Path) -> None:
        self._data, self._out, self._flag = folder / "data", folder / "out", folder / "flag"
        self._log, self._cluster = folder / "log", folder / "cluster.yaml"
        base = free_range()
        self._url = f"http://127.0.0.1:{base + 240}"
        content = patient(yaml.safe_load(LAPTOP.read_text()))  # traced processes are slow
        content |= {"ports": base, "gateway": content["gateway"] | {"port": base + 240}}
        self._cluster.write_text(yaml.safe_dump(content))
        self._out.mkdir()
        self._flag.write_bytes(b"\0")
        self._environment = os.environ | {
            "PYTHONPATH": f"{TRACE}:{ROOT}",
            "PATHTRACE_ROOT": str(ROOT),
            "PATHTRACE_FLAG": str(self._flag),
            "PATHTRACE_OUT": str(self._out),
        }

    def trace(self, kinds: Sequence[str]) -> dict[str, Functions]:
        arguments = ["up", "--no-dashboard", "--cluster", str(self._cluster)]
        with self._log.open("w") as log:
            suite = subprocess.Popen(self._command(*arguments), cwd=ROOT, env=self._environment, stdout=log, stderr=log)
            try:
                self._wait_until_serving(suite)
                return {kind: self._trace(kind) for kind in kinds}
            finally:
                suite.send_signal(signal.SIGINT)
                try:
                    suite.wait(120.0)
                except subprocess.TimeoutExpired:
                    suite.kill()

    def _trace(self, kind: str) -> Functions:
        for file in self._out.glob("*.json"):
            file.unlink()  # of another kind
        send = {"chat": self._chat, "flip": self._flip}[kind]
        send(0)
        time.sleep(3.0)
        number = REQUESTS[kind]
        busy_s = self._window(BUSY, lambda: [send(i) for i in range(1, number + 1)])
        time.sleep(4.0)
        idle_s = self._window(IDLE, lambda: time.sleep(busy_s))
        self._set(WRITE)
        time.sleep(3.0)
        self._set(0)
        found: Functions = {}
        for file in self._out.glob("*.json"):
            written = json.loads(file.read_text())
            calls = {(window, *function): count for window, *function, count in written["rows"]}
            path: dict[str, list[str]] = {}
            for window, name, function, line in calls:
                if window == BUSY and not name.startswith("tests/"):  # the trace itself
                    idle = calls.get((IDLE, name, function, line), 0) * busy_s / idle_s
                    threshold = SHARE * (1 if "flip" in written["argv"] else number)
                    threshold = max(threshold, PERIODIC_PER_S[kind] * busy_s)
                    if calls[window, name, function, line] - idle >= threshold:
                        path.setdefault(name, []).append(function)
            if path:
                found[f"{' '.join(written['argv'][:1])} {file.stem}"] = path
        return found

    def _command(self, *arguments: str) -> list[str]:
        return [str(ROOT / ".venv/bin/polyphase"), *arguments, "--data-dir", str(self._data)]

    def _wait_until_serving(self, suite: "subprocess.Popen[bytes]") -> None:
        ends = time.monotonic() + START_S
        while "Ctrl-C" not in self._log.read_text():
            if suite.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"the suite has not started:\n{self._log.read_text()[-2000:]}")
            time.sleep(1.0)

    def _window(self, window: int, work: Callable[[], object]) -> float:
        began = time.monotonic()
        self._set(window)
        work()
        time.sleep(1.0)  # work after the last byte counts, too
        self._set(0)
        return time.monotonic() - began

    def _set(self, window: int) -> None:
        with self._flag.open("r+b") as file:
            file.write(bytes([window]))

    def _chat(self, number: int) -> None:
        text = f"Tell me a story about number {number} and " + "a lighthouse " * 30
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 24,
            "stream": True,
            "ignore_eos": True,
        }
        with httpx.stream("POST", f"{self._url}/v1/chat/completions", json=body, timeout=300.0) as answer:
            answer.raise_for_status()
            for _ in answer.iter_lines():
                pass

    def _flip(self, number: int) -> None:
        del number
        environment = self._environment | {"PATHTRACE_FROM": "flip_command"}
        for _ in range(2):
            subprocess.run(self._command("flip", "prefill-1"), cwd=ROOT, env=environment, check=True, timeout=300.0)


def main() -> None:
    """Print the files, process by process, and how many there are."""
    kind = sys.argv[1] if len(sys.argv) > 1 else ""
    if kind not in REQUESTS:
        sys.exit(f"usage: python -m tests.structure.request_path {'|'.join(REQUESTS)}")
    found = files_on_paths(kind)[kind]
    for process, files in sorted(found.items()):
        print(f"{process}: {len(files)} files")
        for name in sorted(files):
            print(f"    {name}")
    everywhere = {name for files in found.values() for name in files}
    gateway = {name for name in everywhere if name.startswith("gateway/")}
    print(f"files in all processes: {len(everywhere)}; of gateway/: {len(gateway)}")


if __name__ == "__main__":
    main()
