"""`polyphase migrate`."""

import sqlite3
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.launcher import cli
from services.launcher.cli import migrate_url
from shared.errors import InvalidRequest, Unavailable
from tests.ports import free_port


def tables(file: Path) -> set[str]:
    with sqlite3.connect(file) as connection:
        return {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}


def test_the_command_makes_the_newest_schema(tmp_path: Path) -> None:
    file = tmp_path / "new.db"
    for _ in range(2):
        done = CliRunner().invoke(cli.app, ["migrate"], env={"POLYPHASE_DATABASE_URL": f"sqlite:///{file}"})
        assert done.exit_code == 0, done.output
    assert {"requests", "alembic_version"} <= tables(file)


async def test_a_database_that_does_not_come_up_is_named() -> None:
    began = time.monotonic()
    with pytest.raises(Unavailable, match="the database does not answer"):
        await migrate_url(f"postgresql://nobody@127.0.0.1:{free_port()}/none", 0.6)
    assert time.monotonic() - began >= 0.6


async def test_what_is_no_database_is_not_waited_for() -> None:
    with pytest.raises(InvalidRequest, match="database URL"):
        await migrate_url("mysql://x/y", 60.0)
