"""What a body asks for, as far as it must be known before vLLM's handlers read it."""

from typing import Any

import msgspec


class _Asked(msgspec.Struct):
    """The fields that multiply a body into jobs. All others are skipped without being kept."""

    n: Any = 1
    prompt: msgspec.Raw = msgspec.Raw(b"")
    prompt_embeds: msgspec.Raw = msgspec.Raw(b"")


_body = msgspec.json.Decoder(_Asked)
_list = msgspec.json.Decoder(list[msgspec.Raw])


def jobs_asked(body: bytes) -> int:
    """Prompts times n. 1 for what is no such body: saying what is wrong with it is left to the handlers."""
    try:
        asked = _body.decode(body)
        prompts = _prompts(asked.prompt) + _prompts(asked.prompt_embeds)
        return max(1, prompts) * max(1, int(asked.n))
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, TypeError, OverflowError, RecursionError):
        return 1


def _prompts(raw: msgspec.Raw) -> int:
    """How many prompts a `prompt` holds: a list of strings or of lists; a list of numbers is one of tokens."""
    text = bytes(raw)
    if not text.startswith(b"["):
        return int(bool(text) and text != b"null")
    if text[1:].lstrip()[:1] in (b'"', b"["):
        return len(_list.decode(text))
    return 1
