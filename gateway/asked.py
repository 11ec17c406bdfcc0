"""What a body asks for that is settled before vLLM's handlers read it: how many jobs, and which service tier."""

from dataclasses import dataclass
from typing import Any

import msgspec


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


_body = msgspec.json.Decoder(_Body)
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


def _prompts(raw: msgspec.Raw) -> int:
    """How many prompts a `prompt` holds: a list of strings or of lists; a list of numbers is one of tokens."""
    text = bytes(raw)
    if not text.startswith(b"["):
        return int(bool(text) and text != b"null")
    if text[1:].lstrip()[:1] in (b'"', b"["):
        return len(_list.decode(text))
    return 1
