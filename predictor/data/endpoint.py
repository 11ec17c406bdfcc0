"""Asks a running model for answers, over the OpenAI API, and learns how long they get."""

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

import httpx

from predictor.data.examples import hash_of
from shared.errors import InvalidRequest, PolyphaseError, Unavailable

CONNECT_S = 10.0
TRIES = 5  # of one answer, before the endpoint counts as away
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 20.0
_AGAIN = (408, 409, 425, 429)  # and all from 500 on: the same question may be answered later
_SAID = 200  # characters of an error's text


class Api(StrEnum):
    """In which form prompts are sent."""

    CHAT = "chat"
    COMPLETIONS = "completions"


@dataclass(frozen=True, slots=True)
class Asking:
    """How answers are asked for. base_url: with or without /v1. timeout_s: of one answer.

    temperature: None leaves it to the model. Every answer has a seed of its own, see `seed_of`.
    """

    base_url: str
    model: str = ""
    api: Api = Api.CHAT
    max_tokens: int = 1024
    temperature: float | None = None
    timeout_s: float = 120.0
    key: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """Lengths in the model's own tokens, the end token included. cut: it would have gone on beyond `max_tokens`."""

    prompt_tokens: int
    output_tokens: int
    cut: bool


class Refused(PolyphaseError):
    """The endpoint does not take this prompt, now or ever; the message is its own."""

    code = "refused"


def seed_of(prompt: str, sample: int) -> int:
    """Another one for each answer, and the same after a restart.

    Under one seed all prompts draw the same random numbers; at a high temperature the answers of unlike prompts then
    end at the same token.
    """
    return (hash_of(prompt) + sample) % 2**31


class Endpoint:
    """A client of one model. Use as an async context manager."""

    def __init__(self, asking: Asking, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._asking = asking
        url = asking.base_url.rstrip("/").removesuffix("/v1") + "/v1"
        headers = {"Authorization": f"Bearer {asking.key}"} if asking.key else {}
        timeout = httpx.Timeout(asking.timeout_s, connect=CONNECT_S)
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=timeout, limits=limits, transport=transport
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """The model that is asked: the one that was named, or the only one that is served.

        Raises Unavailable where nobody answers, InvalidRequest for a model that is not there.
        """
        response = await self._sent("GET", "/models", None)
        try:
            names = [str(one["id"]) for one in response.json()["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise Unavailable(f"{self._http.base_url}models: not an OpenAI API: {response.text[:_SAID]}") from error
        wanted = self._asking.model
        if wanted and wanted not in names:
            raise InvalidRequest(f"model {wanted!r} is not served there; there are {', '.join(names) or 'none'}")
        if not wanted and len(names) != 1:
            raise InvalidRequest(f"--model: which one of {', '.join(names) or 'none'}?")
        return wanted or names[0]

    async def answer(self, model: str, prompt: str, sample: int) -> Answer:
        """The lengths of one answer. Raises Refused for this prompt, Unavailable when nothing helps."""
        asking = self._asking
        body: dict[str, Any] = {"model": model, "max_tokens": asking.max_tokens, "seed": seed_of(prompt, sample)}
        if asking.temperature is not None:
            body["temperature"] = asking.temperature
        if asking.api is Api.CHAT:
            path, body = "/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]}
        else:
            path, body = "/completions", {**body, "prompt": prompt}
        return self._read(await self._sent("POST", path, body))

    def _read(self, response: httpx.Response) -> Answer:
        try:
            told = response.json()
            usage, reason = told["usage"], told["choices"][0]["finish_reason"]
            return Answer(int(usage["prompt_tokens"]), int(usage["completion_tokens"]), reason == "length")
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise Unavailable(
                f"{response.request.url}: no lengths in the answer ({type(error).__name__}: {error}): "
                f"{response.text[:_SAID]}"
            ) from error

    async def _sent(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """A success. What may pass is tried again, with growing pauses."""
        wrong = hint = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1)))
            try:
                response = await self._http.request(method, path, json=body)
            except httpx.TimeoutException:
                wrong = f"no answer in {self._asking.timeout_s:g} s"
                hint = " (a longer --timeout or a lower --concurrency may help)"
                continue
            except httpx.HTTPError as error:
                wrong = f"{type(error).__name__}: {error}"
                continue
            if response.is_success:
                return response
            wrong = f"HTTP {response.status_code}: {_error_of(response)}"
            if response.status_code in (401, 403):
                raise InvalidRequest(f"{response.request.url}: {wrong}")
            if response.status_code < 500 and response.status_code not in _AGAIN:
                raise Refused(wrong)
        raise Unavailable(f"{self._http.base_url}{path.removeprefix('/')}: {wrong}, {TRIES} times{hint}")


def _error_of(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])[:_SAID]
    except (ValueError, KeyError, TypeError):
        return response.text[:_SAID]
