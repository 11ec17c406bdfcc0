"""Request hints: what the edge reads from a body before vLLM's request models do.

The edge parses a body once, with the parser that vLLM's framework uses, and vLLM gets the parsed value: limits are
checked on exactly the value that vLLM sees, whatever odd JSON a client sends.

vLLM validates a body in one turn of the event loop and spends up to 50 µs on each item, so the number of items bounds
the length of that turn. Items are counted before the body is parsed: by a few passes at C speed over its bytes, without
an object for each item.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import TypeAdapter, ValidationError

from shared.errors import InvalidRequest

FREE_FIELDS = 16  # for each object: so many scalar fields on average do not count as items
INPUT_WEIGHT = 5  # an item of a Responses `input` is tried against some thirty types
RESPONSES = "/v1/responses"
PARSED = "polyphase.parsed"  # key of the request's ASGI scope for its ParsedBody
_SESSION_FIELDS = ("session_id", "prompt_cache_key", "conversation", "user")
_WHITESPACE = b" \t\r\n"
_LITERAL_CHARS = b"0123456789+-.eEtrufalsn"  # of numbers, true, false, null
# What Python's parser reads and msgspec's does not: constants, and surrogates without their other half.
_PYTHON_ONLY = ((b"-Infinity", b"0"), (b"Infinity", b"0"), (b"NaN", b"0"), (b"\\ud", b"\\u0"), (b"\\uD", b"\\u0"))


class ParsedBody:
    """The value of a body, for one reader, because a request model may change it."""

    __slots__ = ("taken", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.taken = False

    def take(self) -> Any:
        """The value, which is then not kept. May be called once."""
        value, self.value, self.taken = self.value, None, True
        return value


@dataclass(frozen=True, slots=True)
class RequestHints:
    jobs: int = 1  # answers that the body requests
    tier: object = None  # its `service_tier`, of any type
    request_id: str = ""  # its `request_id`, if that is a string
    session: tuple[str, str] = ("", "")  # the field that names its session, and the id


class _Lists(msgspec.Struct):
    """The fields whose items are counted differently from those of other fields."""

    prompt: msgspec.Raw = msgspec.Raw(b"")
    tokens: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


_lists = msgspec.json.Decoder(_Lists)
_whole: TypeAdapter[int] = TypeAdapter(int)  # as vLLM's models read a number: also "7", "7.0" and 7.0
_MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError)  # of which UnicodeDecodeError is a ValueError


def parse(body: bytes) -> ParsedBody | None:
    """The value of a body; None where it is not JSON, which vLLM then reports.

    Raises InvalidRequest for nesting so deep that the result depends on the depth of the call stack.
    """
    try:
        return ParsedBody(json.loads(body))
    except ValueError:
        return None
    except RecursionError:
        raise InvalidRequest("lists and objects are nested too deeply to be parsed: send fewer levels") from None


def hints_of(path: str, value: object) -> RequestHints:
    """The hints of a parsed body for the route `path`. A body that vLLM will refuse counts as one job."""
    if not isinstance(value, dict):
        return RequestHints()
    name = value.get("request_id")
    return RequestHints(
        _JOBS.get(path, _completions)(value),
        value.get("service_tier"),
        name if isinstance(name, str) else "",
        _session(value),
    )


def _session(body: dict[str, Any]) -> tuple[str, str]:
    """The first of the fields by which clients name a session; vLLM checks their types."""
    for field in _SESSION_FIELDS:
        found = body.get(field)
        if isinstance(found, dict):  # a conversation as an object
            found = found.get("id")
        if found and isinstance(found, str):
            return field, found
    metadata = body.get("metadata")
    if isinstance(metadata, dict) and (found := metadata.get("user_id")) and isinstance(found, str):
        return "metadata.user_id", found  # of Anthropic's API
    return "", ""


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


# The number of jobs of a body, by route; for routes that are not listed, prompts times `n`.
_JOBS: dict[str, Callable[[dict[str, Any]], int]] = {
    "/v1/chat/completions": _answers,
    "/v1/chat/completions/batch": lambda body: _length(body.get("messages")) * _answers(body),
    RESPONSES: lambda _: 1,
    "/v1/messages": lambda _: 1,
    "/v1/messages/count_tokens": lambda _: 1,
    "/tokenize": lambda _: 1,
    "/detokenize": lambda _: 1,
    "/generative_scoring": lambda body: _length(body.get("items")),
}


def _prompts(prompt: object) -> int:
    """A list of strings or of lists is several prompts; a list of numbers is the tokens of one prompt."""
    if not isinstance(prompt, list):
        return int(prompt is not None)
    if prompt and (isinstance(prompt[0], list) or all(isinstance(each, str) for each in prompt)):
        return len(prompt)
    return 1


def _length(value: object) -> int:
    return max(1, len(value)) if isinstance(value, list) else 1


def require_few_items(path: str, body: bytes, limit: int, max_model_len: int) -> None:
    """Raises InvalidRequest where `body` has more than `limit` items, or a prompt has more token ids than the model's
    context.

    Items are elements of lists, objects within objects, and scalar fields beyond FREE_FIELDS for each object. Token ids
    of `prompt` and `tokens` are bounded by the model's context instead, unless the prompt is to be truncated. A body
    that is not JSON is counted in the same way.
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
    """The body in UTF-8; vLLM's parser also accepts UTF-16, UTF-32 and a byte order mark. Other bytes are unchanged."""
    if body[:1] == b"{" and body[1:2] != b"\0":  # the usual case
        return body
    encoding = json.detect_encoding(body)
    if encoding == "utf-8":
        return body
    try:
        return body.decode(encoding, "surrogatepass").encode("utf-8", "replace")
    except UnicodeError:
        return body


def _lists_of(body: bytes) -> tuple[bytes, _Lists]:
    """A body and the fields of `_Lists` in it. Strings of the returned body may differ from the given one."""
    try:
        return body, _lists.decode(body)
    except _MALFORMED:
        pass
    for found, replacement in _PYTHON_ONLY:
        body = body.replace(found, replacement)
    try:
        return body, _lists.decode(body)
    except _MALFORMED:
        return body, _Lists()


def _separators(text: bytes) -> int:
    """An upper bound of the number of items: each item has a comma, or is the first of a list or an object."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _items(text: bytes, limit: int) -> int:
    """The number of items of a JSON text; a lower bound where it is far above `limit`."""
    structure = _structure(text, limit)
    if isinstance(structure, int):
        return structure
    fields = structure.count(b":")
    objects, lists = structure.count(b"{"), structure.count(b"[")
    filled = objects - structure.count(b"{}") + lists - structure.count(b"[]")
    elements = structure.count(b",") - fields + filled
    return max(0, elements) + structure.count(b":{") + structure.count(b":[") + max(0, fields - FREE_FIELDS * objects)


def _prompt_items(ids: bytes, limit: int, max_model_len: int) -> int:
    """The items of a `prompt`, token ids not counted. Raises InvalidRequest for more than `max_model_len` token ids."""
    structure = _structure(ids, limit)
    if isinstance(structure, int) or b'"' in ids:
        return _items(ids, limit)
    bare = structure.translate(None, _LITERAL_CHARS)
    if bare.strip(b",") == b"[]" or not bare.strip(b"[,]"):
        longest = max(piece.partition(b"]")[0].count(b",") + 1 for piece in bare.split(b"[", limit + 2))
        if longest > max_model_len:
            raise InvalidRequest(  # in vLLM's words, which clients look for
                f"This model's maximum context length is {max_model_len} tokens. However, a prompt has {longest} token "
                "ids. Please reduce the length of the prompt."
            )
        return bare.count(b"[")
    return _items(ids, limit)


def _structure(text: bytes, limit: int) -> bytes | int:
    """The text without strings and white space; or, where it has too many strings, a lower bound of its items."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = text.count(b'"') // 2
    max_strings = (2 + FREE_FIELDS) * 2 * limit  # of a legal body, where an item is a string or an object of strings
    if strings > max_strings:
        return strings // 2 // FREE_FIELDS
    return b"".join(text.split(b'"')[::2]).translate(None, _WHITESPACE)
