"""The events of a plain stream, cut from pieces that are made once a request: vLLM's JSON without its pydantic models.

Field by field what vLLM's generators send (vllm.entrypoints.openai.{chat_completion,completion}.serving); the test of
plain streams compares the two on the same tokens.
"""

from dataclasses import dataclass

import msgspec

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Usage:
    """What a client asked to be told of its tokens: at the end of the stream, and with every event of it."""

    at_end: bool = False
    always: bool = False


@dataclass(frozen=True, slots=True)
class _Form:
    """What differs between the two APIs. Around a text: the pieces of its choice before and after it."""

    kind: bytes
    greeting: bytes
    before: bytes
    running: bytes  # after the text, while more may come
    ended: bytes  # after the last text; has places for the two reasons
    usage: bytes  # has places for tokens of the prompt, of both, of the answer


_TOTALS = b'"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d'
_CHAT = _Form(
    kind=b"chat.completion.chunk",
    greeting=b'{"index":0,"delta":{"role":%b,"content":""},"logprobs":null,"finish_reason":null}]',
    before=b'{"index":0,"delta":{"content":',
    running=b'},"logprobs":null,"finish_reason":null,"token_ids":null}]',
    ended=b'},"logprobs":null,"finish_reason":%b,"stop_reason":%b,"token_ids":null}]',
    usage=b"," + _TOTALS + b',"completion_tokens_details":null}',
)
_COMPLETION = _Form(
    kind=b"text_completion",
    greeting=b"",
    before=b'{"index":0,"text":',
    running=b',"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]',
    ended=b',"logprobs":null,"finish_reason":%b,"stop_reason":%b,"prompt_token_ids":null,"token_ids":null}]',
    usage=b"," + _TOTALS + b"}",
)
_END = b"}\n\n"


class Chunks:
    """Of one request. `created`: unix seconds. `fingerprint`: of the system, as the last event names it."""

    def __init__(
        self, form: _Form, request_id: str, created: int, model: str, usage: Usage, fingerprint: str | None
    ) -> None:
        self._head = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[' % (
            _encode(request_id),
            form.kind,
            created,
            _encode(model),
        )
        self._form = form
        self._usage = usage
        self._before = self._head + form.before
        self._running = form.running + (b"" if usage.always else _END)
        self._fingerprint = b"" if fingerprint is None else b',"system_fingerprint":' + _encode(fingerprint)

    @classmethod
    def chat(cls, request_id: str, created: int, model: str, usage: Usage, fingerprint: str | None) -> "Chunks":
        """Of a chat."""
        return cls(_CHAT, request_id, created, model, usage, fingerprint)

    @classmethod
    def completion(cls, request_id: str, created: int, model: str, usage: Usage, fingerprint: str | None) -> "Chunks":
        """Of a completion."""
        return cls(_COMPLETION, request_id, created, model, usage, fingerprint)

    def greeting(self, role: str, prompt_tokens: int) -> bytes:
        """The event before all others; only chats have one."""
        if not self._form.greeting:
            return b""
        usage = self._form.usage % (prompt_tokens, prompt_tokens, 0) if self._usage.always else b""
        told = b',"prompt_token_ids":null,"prompt_text":null'
        return self._head + self._form.greeting % _encode(role) + usage + told + _END

    def text(self, text: str, prompt_tokens: int, tokens: int) -> bytes:
        """What is new of the answer, which has so many tokens now."""
        if self._usage.always:
            totals = self._form.usage % (prompt_tokens, prompt_tokens + tokens, tokens)
            return b"%b%b%b%b%b" % (self._before, _encode(text), self._running, totals, _END)
        return b"%b%b%b" % (self._before, _encode(text), self._running)

    def last(
        self, text: str, prompt_tokens: int, tokens: int, finish_reason: str, stop_reason: int | str | None
    ) -> bytes:
        """The last of the answer, and why it ends."""
        ended = self._form.ended % (_encode(finish_reason), _encode(stop_reason))
        totals = self._form.usage % (prompt_tokens, prompt_tokens + tokens, tokens) if self._usage.always else b""
        fingerprint = b"" if self._usage.at_end else self._fingerprint
        return self._before + _encode(text) + ended + totals + fingerprint + _END

    def totals(self, prompt_tokens: int, tokens: int) -> bytes:
        """The event after all of the answer, where it was asked for."""
        if not self._usage.at_end:
            return b""
        totals = _TOTALS % (prompt_tokens, prompt_tokens + tokens, tokens)
        return self._head + b"]," + totals + b"}" + self._fingerprint + _END
