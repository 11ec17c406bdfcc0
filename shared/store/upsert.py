"""Insert or update, alike on SQLite and PostgreSQL."""

from typing import Any

from sqlalchemy import Table, or_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql import ClauseElement

from shared.store.tables import requests


def upsert(table: Table, dialect: str) -> Any:
    """A statement to execute with a list of full rows; a row that exists by its primary key is replaced.

    A job in a final phase is never overwritten by a report that was overtaken on the way.
    """
    insert: Any = (postgresql.insert if dialect == "postgresql" else sqlite.insert)(table)
    key = [column.name for column in table.primary_key]
    changed = {c.name: insert.excluded[c.name] for c in table.columns if c.name not in key}
    where: ClauseElement | None = None
    if table is requests:
        where = or_(requests.c.final.is_(False), insert.excluded.final.is_(True))
    return insert.on_conflict_do_update(index_elements=key, set_=changed, where=where)
