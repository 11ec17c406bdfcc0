"""JSON over HTTP between the services; failures are raised as the errors of `shared.errors`."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import msgspec

from shared.errors import DeadlineExceeded, InvalidRequest, PolyphaseError, Standby, Unavailable, from_code
from shared.runtime.keys import READING, bearer
from shared.runtime.wire_version import OURS
from shared.wire.addresses import several
from shared.wire.api.worker import InstanceStatus
from shared.wire.messages import StepPage

Answer = TypeVar("Answer")
TIMEOUT_S = 2.0
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)


class JsonClient:
    """A service's HTTP API. Use as an async context manager, or call `close`.

    `token`: the cluster's secret, sent with calls that change something. `base_url`: one or several (see `several`), of
    processes of which one acts at a time: when one is a standby or does not answer, the next one is called. A call that
    may have been carried out is not repeated. `timeout_s`: of calls that name none.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.base_url = base_url
        self._secret = bearer(token)
        self._urls = several(base_url) or ("",)
        self._turn = 0  # the URL that is called first: the one that answered last
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(transport=transport, timeout=timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def call(
        self,
        method: str,
        path: str,
        answer: type[Answer],
        *,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """The answer, decoded from JSON. Raises the peer's error, Unavailable or DeadlineExceeded."""
        response = await self._answer(method, path, body, params, headers, timeout_s)
        try:
            return msgspec.json.decode(response.content, type=answer)
        except msgspec.ValidationError as error:
            raise Unavailable(f"{method} {response.request.url}: unexpected answer: {error}") from error
        except ValueError as error:
            raise Unavailable(f"{method} {response.request.url}: the answer is not JSON: {error}") from error

    async def get(
        self, path: str, answer: type[Answer], *, timeout_s: float | None = None, **params: str | float | None
    ) -> Answer:
        """`call` of a GET; parameters that are None or empty are left out."""
        given = {name: value for name, value in params.items() if value not in (None, "")}
        return await self.call("GET", path, answer, params=given, timeout_s=timeout_s)

    async def text(self, path: str, *, timeout_s: float | None = None) -> str:
        """The text that a GET returns. Raises as `call` does."""
        return (await self._answer("GET", path, None, None, None, timeout_s)).text

    async def _answer(
        self,
        method: str,
        path: str,
        body: Any,
        params: Mapping[str, Any] | None,
        headers: dict[str, str] | None,
        timeout_s: float | None,
    ) -> httpx.Response:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        secrets = {**self._secret, **OURS.http} if method not in READING else {}
        sent = {**(headers or {}), **secrets}
        encoded = {key.encode(): value.encode() for key, value in sent.items()}  # names of people need not be ASCII
        failures: list[PolyphaseError] = []
        first, count = self._turn, len(self._urls)
        for turn in range(first, first + count):
            self._turn = turn % count
            url = f"{self._urls[self._turn].rstrip('/')}{path}"
            try:
                return await self._send(method, url, body, params, encoded, timeout_s)
            except (Unavailable, DeadlineExceeded) as error:
                if not (isinstance(error, Standby) or unreached(error)):
                    raise
                failures.append(error)
                if method not in READING and unanswered(error):
                    self._turn = (turn + 1) % count
                    raise
        raise next((error for error in failures if isinstance(error, Standby)), failures[0])

    async def _send(
        self,
        method: str,
        url: str,
        body: Any,
        params: Mapping[str, Any] | None,
        headers: dict[bytes, bytes],
        timeout_s: float,
    ) -> httpx.Response:
        try:
            content = None if body is None else msgspec.to_builtins(body)
            request = self._http.build_request(
                method, url, json=content, params=params, headers=headers, timeout=timeout_s
            )
        except (ValueError, TypeError, RecursionError) as error:  # an infinite number, half a surrogate pair
            raise InvalidRequest(f"{method} {url}: the body cannot be encoded as JSON: {error}") from error
        try:
            response = await self._http.send(request)
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(f"{method} {url}: no answer in {timeout_s} s") from error
        except (httpx.HTTPError, AttributeError) as error:
            # AttributeError: of anyio on uvloop, when a connection is reset while it is made.
            raise Unavailable(f"{method} {url}: {type(error).__name__}: {error}") from error
        if response.is_success:
            return response
        raise _error_of(response)


def unreached(error: PolyphaseError) -> bool:
    """Whether a call failed without any answer."""
    return isinstance(error.__cause__, httpx.HTTPError | AttributeError)


def unanswered(error: PolyphaseError) -> bool:
    """Whether a failed call may have been carried out: it was sent, and no answer came."""
    return isinstance(error.__cause__, httpx.HTTPError) and not isinstance(error.__cause__, _NEVER_SENT)


def _error_of(response: httpx.Response) -> PolyphaseError:
    try:
        error = response.json()["error"]
        return from_code(str(error["code"]), str(error["message"]))
    except (ValueError, KeyError, TypeError):
        return Unavailable(f"{response.request.url}: HTTP {response.status_code}: {response.text[:200]}")


class WorkerAdmin(JsonClient):
    """The HTTP API of an instance. All calls raise errors of `shared.errors`."""

    async def instance(self) -> InstanceStatus:
        """The instance, its present work, and the settings of its speed."""
        return await self.get("/instance", InstanceStatus)

    async def steps(self, since: int = -1, limit: int = 10_000) -> StepPage:
        """The engine's steps from number `since` on; by default the newest."""
        return await self.get("/steps", StepPage, since=since, limit=limit)
