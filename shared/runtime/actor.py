"""Actors: people and programs name themselves in a header, for the audit."""

from starlette.requests import Request

ACTOR_HEADER = "x-polyphase-actor"
_LONGEST = 128


async def actor(request: Request) -> str:
    """The actor's name, or the address of the call. For FastAPI's `Depends`."""
    header = request.headers.get(ACTOR_HEADER, "")
    # Starlette reads headers as Latin-1; our clients, and curl in most terminals, write UTF-8.
    name = header.encode("latin-1").decode("utf-8", "replace").strip()
    return (name or (request.client.host if request.client else "unknown"))[:_LONGEST]


def acting_as(who: str) -> dict[str, str]:
    """The header of an actor; empty without a name."""
    return {ACTOR_HEADER: who} if who else {}
