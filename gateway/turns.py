"""Turns of the event loop. What reads a long prompt several times in one turn holds up every stream meanwhile."""

import asyncio

_LONG_BYTES = 64 << 10  # of a body
_LONG_TOKENS = 16 << 10


async def after_body(body: bytes) -> None:
    """Let others have a turn if reading that took long."""
    if len(body) > _LONG_BYTES:
        await asyncio.sleep(0)


async def after_prompt(token_ids: list[int] | None) -> None:
    """Let others have a turn if a pass over these takes long."""
    if token_ids is not None and len(token_ids) > _LONG_TOKENS:
        await asyncio.sleep(0)
