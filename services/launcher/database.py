"""`polyphase migrate`: the newest schema, before anything writes."""

import asyncio
import time

from sqlalchemy.exc import SQLAlchemyError

from shared.errors import Unavailable
from shared.store.database import open_engine
from shared.store.migrate import migrate

_AGAIN_S = 0.5


async def migrate_url(url: str, wait_s: float) -> None:
    """Try for `wait_s` seconds. Raises InvalidRequest for a URL that is none, Unavailable with the last reason."""
    until = time.monotonic() + wait_s
    while True:
        engine = open_engine(url)
        try:
            return await migrate(engine)
        except (OSError, SQLAlchemyError, TimeoutError) as error:
            if time.monotonic() > until:
                raise Unavailable(f"the database does not answer: {type(error).__name__}: {error}") from error
        finally:
            await engine.dispose()
        await asyncio.sleep(_AGAIN_S)
