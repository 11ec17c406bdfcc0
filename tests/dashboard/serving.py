"""An application on a loopback socket, the dashboard as users start it, and a tab of a browser."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Page, sync_playwright

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
START_S = 120.0
STOP_S = 20.0
SHOWN_MS = 60_000


@contextmanager
def application(app: FastAPI) -> Iterator[str]:
    """Serve it in a thread; the value is its URL."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(STOP_S)


@contextmanager
def dashboard(environment: Mapping[str, str], folder: Path) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A dashboard process that runs in `folder`: its URL, and the process."""
    port = free_port()
    command = [sys.executable, "-P", "-m", "streamlit", "run", str(ROOT / "dashboard" / "app.py")]
    command += ["--server.port", str(port), "--server.address", "127.0.0.1", "--server.headless", "true"]
    env = {**os.environ, "POLYPHASE_DASHBOARD_REFRESH_S": "1", **environment, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, process)
        yield url, process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(START_S)


@contextmanager
def tab() -> Iterator[Page]:
    """A tab of headless Chromium."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_context(viewport={"width": 1200, "height": 700}).new_page()
        page.set_default_timeout(SHOWN_MS)
        yield page
        browser.close()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"streamlit ended with {process.returncode}"
        try:
            if httpx.get(f"{url}/_stcore/health", timeout=10.0, trust_env=False).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError(f"{url} did not come up within {START_S} s")
