"""A writer as a process of its own: `python write_process.py URL NAME` puts a row every 20 ms until stdin closes."""

import asyncio
import sys

from prometheus_client import CollectorRegistry

from shared.store.database import open_engine
from shared.store.tables import requests
from shared.store.write_behind import WriteBehind
from tests.shared.store.rows import request_row


async def main(url: str, name: str) -> None:
    store = WriteBehind(open_engine(url), CollectorRegistry(), soon_s=0.01)
    task = asyncio.ensure_future(store.run())
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    number = 0
    while not ended.done():
        store.put(requests, request_row(f"{name}-{number}"))
        number += 1
        await asyncio.sleep(0.02)
    while store.queued:
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    print(number)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
