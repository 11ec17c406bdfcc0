"""A real PostgreSQL in a temporary folder, for the tests of one module."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ports import free_port


def _user() -> str | None:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    pytest.skip("running as root, and there is no user postgres or nobody")


class PostgresServer:
    """One cluster on its own port; `start` and `stop` may alternate."""

    def __init__(self, folder: Path, port: int, user: str | None) -> None:
        self.url = f"postgresql://polyphase@127.0.0.1:{port}/postgres"
        self._folder = folder
        self._port = port
        self._user = user

    def create(self) -> None:
        self._run(["initdb", "-D", str(self._folder / "db"), "-U", "polyphase", "-A", "trust", "--no-sync"])

    def start(self) -> None:
        options = f"-p {self._port} -c listen_addresses=127.0.0.1 -k {self._folder} -c fsync=off"
        self._run([*self._ctl(), "-o", options, "-l", str(self._folder / "log"), "start"])

    def stop(self) -> None:
        self._run([*self._ctl(), "-m", "immediate", "stop"])

    def _ctl(self) -> list[str]:
        return ["pg_ctl", "-D", str(self._folder / "db"), "-w", "-t", "30"]

    def _run(self, command: list[str]) -> None:
        subprocess.run(
            command,
            check=True,
            user=self._user,
            cwd=self._folder,
            timeout=60,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A running server; skips with the reason where there is none."""
    for program in ("initdb", "pg_ctl", "postgres"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    user = _user()
    folder = Path(tempfile.mkdtemp(prefix="polyphase-pg-"))
    if user is not None:
        shutil.chown(folder, user)
    server = PostgresServer(folder, free_port(), user)
    try:
        server.create()
        server.start()
        try:
            yield server
        finally:
            subprocess.run(
                [*server._ctl(), "-m", "immediate", "stop"],
                user=user,
                cwd=folder,
                check=False,
                timeout=60,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
