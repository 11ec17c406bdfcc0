"""What a body asks for that is settled before vLLM's request models read it: jobs, service tier, and items.

vLLM validates a body in one turn of the event loop and spends up to 50 µs on each item, so the number of items bounds
that turn. Counting takes a few passes at C speed over the bytes and builds no object for each item.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from shared.errors import InvalidRequest

FIELDS_FREE = 16  # for each object: so many scalar fields on average do not count as items
INPUT_WEIGHT = 5  # an item of a Responses `input` is tried against some thirty types
RESPONSES = "/v1/responses"
_WHITE = b" \t\r\n"
_LITERALS = b"0123456789+-.eEtrufalsn"  # of numbers, true, false, null


@dataclass(frozen=True, slots=True)
class Asked:
    """jobs: prompts times n. tier: its `service_tier`, of whatever type; None where it has none."""

    jobs: int = 1
    tier: object = None


class _Body(msgspec.Struct):
    """The fields that count. All others are skipped without being kept."""

    n: Any = 1
    prompt: msgspec.Raw = msgspec.Raw(b"")
    prompt_embeds: msgspec.Raw = msgspec.Raw(b"")
    service_tier: Any = None


class _Lists(msgspec.Struct):
    """The fields whose items count otherwise than those of other fields."""

    prompt: msgspec.Raw = msgspec.Raw(b"")
    tokens: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


_body = msgspec.json.Decoder(_Body)
_lists = msgspec.json.Decoder(_Lists)
_list = msgspec.json.Decoder(list[msgspec.Raw])
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, ValueError, TypeError, OverflowError, RecursionError)


def asked_of(body: bytes) -> Asked:
    """One job where the body does not say how many: telling what is wrong with it is left to the handlers."""
    try:
        read = _body.decode(body)
    except _MALFORMED:
        return Asked()
    try:
        prompts = _prompts(read.prompt) + _prompts(read.prompt_embeds)
        return Asked(max(1, prompts) * max(1, int(read.n)), read.service_tier)
    except _MALFORMED:
        return Asked(tier=read.service_tier)


def require_few_items(path: str, body: bytes, limit: int, max_model_len: int) -> None:
    """Raises InvalidRequest where `body` has more than `limit` items, or a prompt more token ids than the model takes.

    Items are elements of lists, objects within objects, and scalar fields beyond FIELDS_FREE for each object. Token ids
    of `prompt` and `tokens` are bounded by the model's context instead, unless the prompt is to be truncated. Bodies
    that are no JSON are counted alike.
    """
    weight = INPUT_WEIGHT if path == RESPONSES else 1
    if b'"truncate_prompt_tokens"' in body:
        max_model_len = len(body)
    separators = _separators(body)
    if separators * weight <= limit and separators <= max_model_len:
        return
    try:
        lists = _lists.decode(body)
    except _MALFORMED:
        lists = _Lists()
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


def _prompts(raw: msgspec.Raw) -> int:
    """How many prompts a `prompt` holds: a list of strings or of lists; a list of numbers is one of tokens."""
    text = bytes(raw)
    if not text.startswith(b"["):
        return int(bool(text) and text != b"null")
    if text[1:].lstrip()[:1] in (b'"', b"["):
        return len(_list.decode(text))
    return 1


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
