import httpx
import pytest

from shared.errors import Conflict, DeadlineExceeded, PolyphaseError, Unavailable
from shared.runtime.http import error_body
from shared.wire.clients.http import JsonClient


def client(handler: object) -> JsonClient:
    return JsonClient("http://peer", transport=httpx.MockTransport(handler))  # type: ignore[arg-type]


async def test_an_answer_comes_as_json() -> None:
    async with client(lambda request: httpx.Response(200, json={"path": request.url.path})) as peer:
        assert await peer.call("GET", "/x") == {"path": "/x"}


async def test_an_error_of_ours_comes_back_as_itself() -> None:
    async with client(lambda _: httpx.Response(409, json=error_body(Conflict("taken")))) as peer:
        with pytest.raises(Conflict, match="taken"):
            await peer.call("POST", "/x", body={})


@pytest.mark.parametrize("content", [b"<html>", b"[]", b'{"error": 1}', b'{"error": {"code": "x"}}'])
async def test_another_error_is_unavailable(content: bytes) -> None:
    async with client(lambda _: httpx.Response(502, content=content)) as peer:
        with pytest.raises(Unavailable, match="HTTP 502"):
            await peer.call("GET", "/x")


@pytest.mark.parametrize(
    ("raised", "becomes"),
    [
        (httpx.ReadTimeout("slow"), DeadlineExceeded),
        (httpx.ConnectError("refused"), Unavailable),
        # What anyio raises on uvloop when a proxy before a dead process resets a connection in the moment it is made.
        (AttributeError("'NoneType' object has no attribute 'getpeername'"), Unavailable),
    ],
)
async def test_failures_of_the_network(raised: Exception, becomes: type[PolyphaseError]) -> None:
    def fail(_: httpx.Request) -> httpx.Response:
        raise raised

    async with client(fail) as peer:
        with pytest.raises(becomes, match="http://peer/x"):
            await peer.call("GET", "/x", timeout_s=0.1)
