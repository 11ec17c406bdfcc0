"""Insert or update, alike on SQLite and PostgreSQL."""

from typing import Any

from sqlalchemy import Table, and_, not_, or_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql import ClauseElement

from shared.domain.job import LOST
from shared.store.tables import requests


def upsert(table: Table, dialect: str) -> Any:
    """A statement to execute with a list of full rows; a row that exists by its primary key is replaced.

    A job in a final phase is never overwritten by a report that was overtaken on the way. That a job is lost, its
    scheduler supposes: it stands only until somebody knows better, and never against what another scheduler wrote.
    """
    insert: Any = (postgresql.insert if dialect == "postgresql" else sqlite.insert)(table)
    key = [column.name for column in table.primary_key]
    changed = {c.name: insert.excluded[c.name] for c in table.columns if c.name not in key}
    where: ClauseElement | None = None
    if table is requests:
        new = insert.excluded
        supposed = and_(new.final.is_(True), new.outcome == LOST)
        where = or_(
            and_(supposed, requests.c.final.is_(False), requests.c.scheduler_id == new.scheduler_id),
            and_(not_(supposed), or_(requests.c.final.is_(False), requests.c.outcome == LOST, new.final.is_(True))),
        )
    return insert.on_conflict_do_update(index_elements=key, set_=changed, where=where)
