from typing import Any

import httpx
import pytest

from shared.errors import Conflict, DeadlineExceeded, PolyphaseError, Standby, Unavailable
from shared.runtime.http import error_body
from shared.wire.clients.http import JsonClient, unanswered


def client(handler: object) -> JsonClient:
    return JsonClient("http://peer", transport=httpx.MockTransport(handler))  # type: ignore[arg-type]


async def test_an_answer_comes_as_json() -> None:
    async with client(lambda request: httpx.Response(200, json={"path": request.url.path})) as peer:
        assert await peer.call("GET", "/x", Any) == {"path": "/x"}


async def test_an_error_of_ours_comes_back_as_itself() -> None:
    async with client(lambda _: httpx.Response(409, json=error_body(Conflict("taken")))) as peer:
        with pytest.raises(Conflict, match="taken"):
            await peer.call("POST", "/x", Any, body={})


@pytest.mark.parametrize("content", [b"<html>", b"[]", b'{"error": 1}', b'{"error": {"code": "x"}}'])
async def test_another_error_is_unavailable(content: bytes) -> None:
    async with client(lambda _: httpx.Response(502, content=content)) as peer:
        with pytest.raises(Unavailable, match="HTTP 502"):
            await peer.call("GET", "/x", Any)


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
            await peer.call("GET", "/x", Any, timeout_s=0.1)


async def test_the_secret_is_shown_where_something_changes_and_nowhere_else() -> None:
    seen: dict[str, str] = {}

    def handler(request: httpx.Request) -> httpx.Response:
        seen[request.method] = request.headers.get("authorization", "")
        return httpx.Response(503, text="no")

    secret = "a-secret-of-the-cluster"
    async with JsonClient("http://peer", token=secret, transport=httpx.MockTransport(handler)) as peer:
        for method in ("GET", "POST", "PUT", "DELETE"):
            with pytest.raises(PolyphaseError) as failed:
                await peer.call(method, "/x", Any, headers={"x-polyphase-actor": "äö"})
            assert secret not in failed.value.message
    said = f"Bearer {secret}"
    assert seen == {"GET": "", "POST": said, "PUT": said, "DELETE": said}


@pytest.mark.parametrize("token", ["", "open"])
async def test_without_a_secret_nothing_is_shown(token: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert "authorization" not in request.headers
        return httpx.Response(200, json=1)

    async with JsonClient("http://peer", token=token, transport=httpx.MockTransport(handler)) as peer:
        assert await peer.call("POST", "/x", Any) == 1


class Two:
    """Two processes of which one acts; what each is asked is kept."""

    def __init__(self, **says: httpx.Response | Exception) -> None:
        self.says = says
        self.asked: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(f"{request.method} {request.url.host}{request.url.path}")
        said = self.says[request.url.host]
        if isinstance(said, Exception):
            raise said
        return said

    def client(self) -> JsonClient:
        return JsonClient("http://a, http://b/", transport=httpx.MockTransport(self))


STANDS_BY = httpx.Response(503, json=error_body(Standby("a stands by")))
GONE = httpx.ConnectError("refused")
CUT = httpx.ReadError("reset")


@pytest.mark.parametrize("first", [STANDS_BY, GONE])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_the_next_one_is_asked_and_then_asked_first(method: str, first: httpx.Response | Exception) -> None:
    two = Two(a=first, b=httpx.Response(200, json="b"))
    async with two.client() as peer:
        assert await peer.call(method, "/x", Any) == "b"
        assert await peer.call(method, "/y", Any) == "b"
    assert two.asked == [f"{method} a/x", f"{method} b/x", f"{method} b/y"]


@pytest.mark.parametrize("how", [CUT, httpx.ReadTimeout("late")])
async def test_what_may_have_been_done_is_not_asked_for_again(how: Exception) -> None:
    two = Two(a=how, b=httpx.Response(200, json="b"))
    async with two.client() as peer:
        with pytest.raises(PolyphaseError) as lost:
            await peer.call("POST", "/x", Any)
        assert unanswered(lost.value)
        assert await peer.call("POST", "/y", Any) == "b"  # the other one is asked first from now on
    assert two.asked == ["POST a/x", "POST b/y"]


async def test_reading_is_asked_for_again_whatever_happened() -> None:
    two = Two(a=CUT, b=httpx.Response(200, json="b"))
    async with two.client() as peer:
        assert await peer.call("GET", "/x", Any) == "b"


async def test_an_answer_is_an_answer() -> None:
    two = Two(a=httpx.Response(409, json=error_body(Conflict("taken"))), b=httpx.Response(200, json="b"))
    async with two.client() as peer:
        with pytest.raises(Conflict):
            await peer.call("POST", "/x", Any)
    assert two.asked == ["POST a/x"]
    broken = Two(a=httpx.Response(503, json=error_body(Unavailable("no database"))), b=httpx.Response(200, json="b"))
    async with broken.client() as peer:
        with pytest.raises(Unavailable, match="no database"):
            await peer.call("GET", "/x", Any)


async def test_where_nobody_acts_the_one_that_stands_by_says_so() -> None:
    async with Two(a=GONE, b=STANDS_BY).client() as peer:
        with pytest.raises(Standby, match="a stands by"):
            await peer.call("GET", "/x", Any)
    async with Two(a=GONE, b=GONE).client() as peer:
        with pytest.raises(Unavailable, match="http://a/x"):
            await peer.call("GET", "/x", Any)
