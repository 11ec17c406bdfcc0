"""Who asks: people and programs say in a header under which name they act, for the audit."""

from starlette.requests import Request

ACTOR_HEADER = "x-polyphase-actor"
_LONGEST = 128


async def actor(request: Request) -> str:
    """Their name, or where they call from. For FastAPI's `Depends`."""
    said = request.headers.get(ACTOR_HEADER, "")
    # Starlette reads headers as Latin-1; clients of ours, and curl in most terminals, write UTF-8.
    name = said.encode("latin-1").decode("utf-8", "replace").strip()
    return (name or (request.client.host if request.client else "unknown"))[:_LONGEST]


def acting_as(who: str) -> dict[str, str]:
    """The header; none for nobody."""
    return {ACTOR_HEADER: who} if who else {}
