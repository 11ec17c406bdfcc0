"""Request hints: what the edge reads of a body before vLLM's request models do.

A body is parsed once, by the parser that vLLM's framework uses, and vLLM gets that value: what the edge has decided
about is what vLLM sees, whatever odd JSON a client sends.

vLLM validates a body in one turn of the event loop and spends up to 50 µs on each item, so the number of items bounds
that turn. They are counted before the body is parsed: a few passes at C speed over the bytes, without an object for
each item.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError

from gateway.admission import Ticket
from gateway.connection import BodyWriter
from shared.errors import InvalidRequest

FIELDS_FREE = 16  # for each object: so many scalar fields on average do not count as items
INPUT_WEIGHT = 5  # an item of a Responses `input` is tried against some thirty types
RESPONSES = "/v1/responses"
PARSED = "polyphase.parsed"  # of a request's ASGI scope: its Parsed
_WHITE = b" \t\r\n"
_LITERALS = b"0123456789+-.eEtrufalsn"  # of numbers, true, false, null


class Parsed:
    """The value of a body, for one reader: a request model may change it."""

    __slots__ = ("taken", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.taken = False

    def take(self) -> Any:
        """The value, which is not kept. Only while it is not `taken`."""
        value, self.value, self.taken = self.value, None, True
        return value


@dataclass(frozen=True, slots=True)
class RequestHints:
    """jobs: answers that the body stands for. tier: its `service_tier`, of any type; None where it has none.

    request_id: the field of that name, if it is text.
    """

    jobs: int = 1
    tier: object = None
    request_id: str = ""


class _Lists(msgspec.Struct):
    """The fields whose items count otherwise than those of other fields."""

    prompt: msgspec.Raw = msgspec.Raw(b"")
    tokens: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


_lists = msgspec.json.Decoder(_Lists)
_whole: TypeAdapter[int] = TypeAdapter(int)  # as vLLM's models read a number: also "7", "7.0" and 7.0
_MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError)  # of which UnicodeDecodeError is a ValueError


def parse(body: bytes) -> Parsed | None:
    """The value of a body; None where it is no JSON to vLLM's parser, which is left to say so.

    Raises InvalidRequest where that depends on how deep the stack is when it is parsed.
    """
    try:
        return Parsed(json.loads(body))
    except ValueError:
        return None
    except RecursionError:
        raise InvalidRequest("lists and objects are nested too deeply to be parsed: send fewer levels") from None


def hints_of(path: str, value: object) -> RequestHints:
    """Of the value of a body, for the route `path`. What vLLM refuses anyway counts as one job."""
    if not isinstance(value, dict):
        return RequestHints()
    name = value.get("request_id")
    jobs = _JOBS.get(path, _completions)(value)
    return RequestHints(jobs, value.get("service_tier"), name if isinstance(name, str) else "")


def _one(_: dict[str, Any]) -> int:
    return 1


def _answers(body: dict[str, Any]) -> int:
    """Its `n`, at least 1."""
    n = body.get("n", 1)
    if type(n) is not int:
        try:
            n = 1 if n is None else _whole.validate_python(n)
        except ValidationError:
            n = 1
    return max(1, n)


def _completions(body: dict[str, Any]) -> int:
    return max(1, _prompts(body.get("prompt")) + _prompts(body.get("prompt_embeds"))) * _answers(body)


def _conversations(body: dict[str, Any]) -> int:
    return _length(body.get("messages")) * _answers(body)


def _items_to_score(body: dict[str, Any]) -> int:
    return _length(body.get("items"))


# How many jobs a body makes; of a route that is not named here, prompts times `n`.
_JOBS: dict[str, Callable[[dict[str, Any]], int]] = {
    "/v1/chat/completions": _answers,
    "/v1/chat/completions/batch": _conversations,
    RESPONSES: _one,
    "/v1/messages": _one,
    "/v1/messages/count_tokens": _one,
    "/tokenize": _one,
    "/detokenize": _one,
    "/generative_scoring": _items_to_score,
}


def _prompts(prompt: object) -> int:
    """A list of strings or of lists is as many prompts; one of numbers is the tokens of one."""
    if not isinstance(prompt, list):
        return int(prompt is not None)
    if prompt and (isinstance(prompt[0], list) or all(isinstance(each, str) for each in prompt)):
        return len(prompt)
    return 1


def _length(several: object) -> int:
    return max(1, len(several)) if isinstance(several, list) else 1


def require_few_items(path: str, body: bytes, limit: int, max_model_len: int) -> None:
    """Raises InvalidRequest where `body` has more than `limit` items, or a prompt more token ids than the model takes.

    Items are elements of lists, objects within objects, and scalar fields beyond FIELDS_FREE for each object. Token ids
    of `prompt` and `tokens` are bounded by the model's context instead, unless the prompt is to be truncated. Bodies
    that are no JSON are counted alike.
    """
    weight = INPUT_WEIGHT if path == RESPONSES else 1
    body = _utf8(body)
    if b'"truncate_prompt_tokens"' in body:
        max_model_len = len(body)
    separators = _separators(body)
    if separators * weight <= limit and separators <= max_model_len:
        return
    body, lists = _lists_of(body)
    items = 0
    for ids in (bytes(lists.prompt), bytes(lists.tokens)):
        if ids.startswith(b"["):
            items += _prompt_items(ids, limit, max_model_len)
            body = body.replace(ids, b"0", 1)
    items += _items(body, limit)
    if weight > 1:
        items += (weight - 1) * _items(bytes(lists.input), limit)
    if items > limit:
        kinds = "messages, parts, tools, input items, prompts, stop strings, schema nodes and the like"
        times = f"; those of `input` count {weight} times" if weight > 1 else ""
        raise InvalidRequest(
            f"the body has at least {items} items ({kinds}{times}); max_items_per_body allows {limit}: send fewer"
        )


def _utf8(body: bytes) -> bytes:
    """A body in UTF-8, of which vLLM's parser also reads UTF-16, UTF-32 and a byte order mark.

    What is no text is left as it is: the parser refuses it.
    """
    if body[:1] == b"{" and body[1:2] != b"\0":  # as nearly all begin
        return body
    encoding = json.detect_encoding(body)
    if encoding == "utf-8":
        return body
    try:
        return body.decode(encoding, "surrogatepass").encode("utf-8", "replace")
    except UnicodeError:
        return body


def _lists_of(body: bytes) -> tuple[bytes, _Lists]:
    """The fields of a body, and the body in which they are found; its strings may have changed."""
    try:
        return body, _lists.decode(body)
    except _MALFORMED:
        pass
    for odd, usual in _ODD:
        body = body.replace(odd, usual)
    try:
        return body, _lists.decode(body)
    except _MALFORMED:
        return body, _Lists()


# What Python's parser reads and msgspec's does not: constants, and surrogates without their other half.
_ODD = ((b"-Infinity", b"0"), (b"Infinity", b"0"), (b"NaN", b"0"), (b"\\ud", b"\\u0"), (b"\\uD", b"\\u0"))


def _separators(text: bytes) -> int:
    """At least the number of items: every item has a comma, or is the first of a list or an object."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _items(text: bytes, limit: int) -> int:
    """The items of a JSON text; where there are far more than `limit`, a lower bound of them."""
    structure = _structure(text, limit)
    if isinstance(structure, int):
        return structure
    fields = structure.count(b":")
    objects, lists = (structure.count(b"{"), structure.count(b"["))
    filled = objects - structure.count(b"{}") + lists - structure.count(b"[]")
    elements = structure.count(b",") - fields + filled
    return max(0, elements) + structure.count(b":{") + structure.count(b":[") + max(0, fields - FIELDS_FREE * objects)


def _prompt_items(ids: bytes, limit: int, max_model_len: int) -> int:
    """The items of a `prompt` without its token ids. Raises InvalidRequest for one of more than `max_model_len`."""
    structure = _structure(ids, limit)
    if isinstance(structure, int) or b'"' in ids:
        return _items(ids, limit)
    bare = structure.translate(None, _LITERALS)
    if bare.strip(b",") == b"[]" or not bare.strip(b"[,]"):
        longest = max(piece.partition(b"]")[0].count(b",") + 1 for piece in bare.split(b"[", limit + 2))
        if longest > max_model_len:
            raise InvalidRequest(  # clients know a prompt that is too long by vLLM's words
                f"This model's maximum context length is {max_model_len} tokens. However, a prompt has {longest} token "
                "ids. Please reduce the length of the prompt."
            )
        return bare.count(b"[")
    return _items(ids, limit)


def _structure(text: bytes, limit: int) -> bytes | int:
    """The text without strings and white space; or, where it has too many strings, at least how many items it has."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = text.count(b'"') // 2
    most = (2 + FIELDS_FREE) * 2 * limit  # of a legal body: an item is a string or an object of strings
    if strings > most:
        return strings // 2 // FIELDS_FREE
    return b"".join(text.split(b'"')[::2]).translate(None, _WHITE)


# MERGED context.py
# What the HTTP side knows of a request and the pipeline needs: who asks, since when, and under which SLO class.


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is.

    arrived_s: unix seconds at which all of its body was there. tier: OpenAI's `service_tier` that it is served as;
    empty where its body names none, or a header names its class. body: the short way to its connection, if any.
    cache_salt: of its API key; empty where its prefixes may be shared with other keys.
    body_bytes: the size of what was sent. request_id: what the client calls the request, as it was sent; may be empty.
    """

    ticket: Ticket
    slo: str
    arrived_s: float
    tier: str = ""
    body: BodyWriter | None = None
    cache_salt: str = ""
    body_bytes: int = 0
    request_id: str = ""

    def salted(self, cache_salt: str) -> str:
        """The salt of the prefix caches for a request that has named `cache_salt`, which may be empty."""
        if not self.cache_salt:
            return cache_salt
        return hashlib.sha256(f"{self.cache_salt}\0{cache_salt}".encode()).hexdigest()


# vLLM's handlers carry no headers down to the engine; a context variable follows the request's task.
caller: ContextVar[Caller] = ContextVar("caller")

# MERGED turns.py
# Turns of the event loop. What reads a long prompt several times in one turn holds up every stream meanwhile.


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
