"""A plain stream: one answer's tokens become text and events here, in one pass for all jobs of an engine's step.

vLLM's own detokeniser and stop strings; none of its outputs, collectors and generators a token.
"""

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.outputs import STREAM_FINISHED, CompletionOutput, RequestOutput
from vllm.v1.engine import FinishReason
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from gateway.connection import BodyWriter
from shared.runtime.logs import get_log

# MERGED chunks.py
# The events of a plain stream, cut from pieces that are made once a request: vLLM's JSON without its pydantic models.
#
# Field by field what vLLM's generators send (vllm.entrypoints.openai.{chat_completion,completion}.serving); the test of
# plain streams compares the two on the same tokens.


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


KEPT_PIECES = 256
Stopped = Callable[[str], None]  # ends the job of a request whose answer has hit a stop string
Failed = Callable[[str, Exception], None]  # ends a request whose output raised that error
Delivered = Callable[[int], None]  # counts the gap that ends as so many tokens leave in one event


class PlainStream:
    """One answer between the engine's steps and its HTTP response.

    The response's own task sends the first and the last events, and all of them where there is no `body` to write to.
    What a slow reader does not take waits here as text, and goes out as one event.
    """

    def __init__(self, make: Callable[[], Chunks], role: str, body: BodyWriter | None) -> None:
        self._make = make
        self._chunks: Chunks  # from here on only of a request that was accepted
        self._role = role
        self._body = body
        self._direct = False  # the response has begun, and events go straight to its connection
        self._greeted = False
        self._state: Any  # vLLM's RequestState
        self._detokenizer: Any  # of it
        self._usual = True  # it is read in vLLM's way alone
        self._outputs: Any  # its OutputProcessor
        self._stopped: Stopped
        self._failed: Failed
        self._delivered: Delivered
        self._tokens: list[int] = []
        self._finish: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._ends_with_stop_token = False  # which is in no text
        self._end: tuple[str, int | str | None] | None = None  # why the answer ends, once it has
        self._told_tokens = 0
        self._kept: list[str] = []  # text that waits for its reader, and is not in the detokeniser any more
        self.queued = self.held = False  # in the next pass, or a later one; see StreamPass
        self.served_s = 0.0  # when it last was, by the event loop's clock
        self.most_s = 0.0  # that tokens may wait for others

    def bind(
        self, request_id: str, outputs: Any, stopped: Stopped, failed: Failed, delivered: Delivered, most_s: float
    ) -> None:
        """Take the place of vLLM's output processor for this request. It is registered there."""
        self.most_s = most_s
        self._delivered = delivered
        self._state = outputs.request_states[request_id]
        self._detokenizer = self._state.detokenizer
        # All text may go at once, and vLLM's fast detokeniser counts the answer's tokens alone.
        self._usual = not isinstance(self._detokenizer, FastIncrementalDetokenizer) or bool(self._detokenizer.stop)
        self._chunks = self._make()
        self._outputs = outputs
        self._stopped, self._failed = stopped, failed

    def take(self, tokens: list[int], finish: FinishReason | None, stop_reason: int | str | None) -> None:
        """A step of its engine."""
        self._tokens += tokens
        self._finish, self._stop_reason = finish, stop_reason
        self._ends_with_stop_token = bool(tokens) and finish is FinishReason.STOP

    def leaves(self) -> None:
        """What it has taken is sent in this turn of the event loop, or the next."""
        self.queued, self.held = True, False
        if self._tokens:
            self._delivered(len(self._tokens))

    def advance(self) -> None:
        """Turn the tokens taken into text, look for stop strings, and send what is new."""
        state, outputs = self._state, self._outputs
        if self._end is not None or outputs.request_states.get(state.request_id) is not state:
            return  # its client is gone, or has it all
        tokens, self._tokens = self._tokens, []
        state.is_prefilling = False
        found = self._detokenizer.update(tokens, self._ends_with_stop_token)
        if found is None and self._finish is None:
            if self._direct and self._greeted and not self._usual:
                self._send_text()
            else:
                self.send()
            return
        self._end = (str(FinishReason.STOP), found) if found else (str(self._finish), self._stop_reason)
        outputs._finish_request(state)
        if found:
            self._stopped(state.request_id)
        state.queue.put(STREAM_FINISHED)

    def send(self) -> None:
        """Send what is new, unless the reader has to catch up first."""
        if not self._direct:
            self._state.queue.put(_news())
        elif self._body is not None and not self._body.full and (news := self.news()):
            self._body.write(news)

    def _send_text(self) -> None:
        """What `send` does of one whose connection takes it, and who has no stop strings: most tokens come here.

        Text is taken from the detokeniser, sent or kept: it would copy all that it has with each token.
        """
        body, detokenizer = self._body, self._detokenizer
        text, detokenizer.output_text = detokenizer.output_text, ""
        if body is None or body.full:
            self._keep(text)
            return
        tokens = len(detokenizer.token_ids)
        if tokens > self._told_tokens:
            self._told_tokens = tokens
            body.write(self._chunks.text(self._with_kept(text), self._state.prompt_len, tokens))

    def _keep(self, text: str) -> None:
        self._kept.append(text)
        if len(self._kept) == KEPT_PIECES:
            self._kept = ["".join(self._kept)]

    def _with_kept(self, text: str) -> str:
        """All that its reader has not got, of which this is the end."""
        if not self._kept:
            return text
        kept, self._kept = self._kept, []
        return "".join((*kept, text))

    def news(self) -> bytes:
        """Events of all that is new. Empty where nothing is."""
        text = self._detokenizer.get_next_output_text(False, True)
        if not self._usual:
            self._detokenizer.output_text, self._detokenizer._last_output_text_offset = "", 0
        return self._events(self._with_kept(text))

    def begun(self) -> None:
        """The response is under way: from here on events may go straight to its connection."""
        if self._body is not None and self._body.open:
            self._direct = True
            self._body.on_room(self._catch_up)
            self._catch_up()

    @property
    def pressing(self) -> bool:
        """Whether what it has taken is not to wait for more: the first tokens, or the last."""
        return not self._told_tokens or self._finish is not None

    @property
    def direct(self) -> bool:
        """Whether events go straight to the connection."""
        return self._direct

    @property
    def ended(self) -> bool:
        """Whether the rest of the answer is known."""
        return self._end is not None

    def last(self, cut: CompletionOutput | None = None) -> bytes:
        """The rest of the answer and its end. `cut`: the end that vLLM gave it, if it did."""
        detokenizer = self._detokenizer
        if cut is not None:
            text, reason, stop_reason = cut.text, str(cut.finish_reason), cut.stop_reason
        elif self._end is not None:
            text, (reason, stop_reason) = detokenizer.get_next_output_text(True, True), self._end
        else:
            return b""
        return self._events(self._with_kept(text), (reason, stop_reason))

    def totals(self) -> bytes:
        """The event that closes a stream whose client asked for its usage."""
        return self._chunks.totals(*self.counted)

    @property
    def counted(self) -> tuple[int, int]:
        """Tokens of the prompt and of the answer."""
        return self._state.prompt_len, self._detokenizer.num_output_tokens()

    def fail(self, error: Exception) -> None:
        """What it took could not be made into events: have the response end with an error, and the job."""
        self._failed(self._state.request_id, error)

    def _catch_up(self) -> None:
        if self._end is not None:
            return
        try:
            if self.counted[1] > self._told_tokens:
                self.send()
        except Exception as error:  # its connection calls; an error must not reach other connections
            self.fail(error)

    def _events(self, text: str, end: tuple[str, int | str | None] | None = None) -> bytes:
        prompt_tokens, tokens = self.counted
        greeting = b""
        if not self._greeted:
            self._greeted = True
            greeting = self._chunks.greeting(self._role, prompt_tokens)
        if not text and not tokens:
            return greeting  # vLLM tells no end of an answer that never began
        self._told_tokens, fresh = tokens, tokens - self._told_tokens
        if end is not None:
            return greeting + self._chunks.last(text, prompt_tokens, tokens, *end)
        if not fresh:
            return greeting
        return greeting + self._chunks.text(text, prompt_tokens, tokens)


# The stream of the request that is being submitted: vLLM passes nothing of ours down to its engine core.
submitted: ContextVar[PlainStream | None] = ContextVar("submitted", default=None)


def _news() -> RequestOutput:
    """Wakes the response's task. A new one each time: a collector merges outputs into the one that waits."""
    return RequestOutput("", None, None, None, [], finished=False)


# MERGED pace.py
# How long tokens of a stream wait for the next ones, so that they share an event: the busier the process, the longer.
#
# An event costs more than a token: its JSON, a write to a socket, and the client's reading of it. A process that has
# time to spare sends each token as it comes.


PERIOD_S = 0.1  # between two looks at how busy the process is
LEAST_S = 0.005
_RELAXED, _BUSY = 0.55, 0.75  # shares of its time
_WORTH = 0.25  # one that computes less than this share has nothing to save, whoever keeps it waiting
_FACTOR = 1.5  # by which the interval grows or shrinks with each look
_MOST_S = 1.0


class Pace:
    """`interval_s`: seconds between two events of a stream, 0 while there is no need.

    Call `look` every PERIOD_S while there are tokens, and `begin` when that begins anew; `end` when there are none.

    Busy is a thread that computes most of the time, or one that is not called when it wants to be: then others compute.
    """

    def __init__(
        self, now_s: Callable[[], float] = time.monotonic, used_s: Callable[[], float] = time.thread_time
    ) -> None:
        self.interval_s = 0.0
        self._now_s = now_s
        self._used_s = used_s
        self._looked_s, self._used_before_s = now_s(), used_s()

    def begin(self) -> None:
        """Look from now on."""
        self._looked_s, self._used_before_s = self._now_s(), self._used_s()

    def end(self) -> None:
        """There are no tokens, and no need."""
        self.interval_s = 0.0

    def look(self) -> None:
        """Go by the time since the last look."""
        now, used = self._now_s(), self._used_s()
        passed, computed = max(now - self._looked_s, 1e-6), used - self._used_before_s
        self._looked_s, self._used_before_s = now, used
        late = max(0.0, passed - PERIOD_S)
        busy = (computed + late) / max(passed, PERIOD_S)
        if computed < passed * _WORTH:
            busy = 0.0
        if busy > _BUSY:
            self.interval_s = min(_MOST_S, max(LEAST_S, self.interval_s * _FACTOR))
        elif busy < _RELAXED:
            shorter = self.interval_s / _FACTOR
            self.interval_s = shorter if shorter >= LEAST_S else 0.0


# MERGED stream_pass.py
# Serves plain streams that have new tokens in one go: each turn of the event loop, or at the pace of a busy one.


log = get_log(__name__)
AT_ONCE = 128  # streams that a pass serves before other work has its turn
SLOT_S = 0.005  # streams that are due within one wait for one timer


class StreamPass:
    """The streams of a front end."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._waiting: list[PlainStream] = []
        self._held: dict[int, list[PlainStream]] = {}  # by the slot of their time
        self._looks = False  # the pace, every now and then
        self._served = False  # any, since the last look

    def add(self, stream: PlainStream) -> None:
        """It has taken a step. Several of a turn, or of its interval, go out as one event."""
        if stream.queued:
            return
        if not self._pace.interval_s or stream.pressing:
            self._queue(stream)
            return
        if stream.held:
            return
        due_s = stream.served_s + min(self._pace.interval_s, stream.most_s)
        if due_s > asyncio.get_running_loop().time():
            self._hold(stream, int(due_s / SLOT_S) + 1)
        else:
            self._queue(stream)

    def _queue(self, stream: PlainStream) -> None:
        stream.leaves()
        self._waiting.append(stream)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._run)

    def _hold(self, stream: PlainStream, slot: int) -> None:
        stream.held = True
        held = self._held.get(slot)
        if held is None:
            held = self._held[slot] = []
            asyncio.get_running_loop().call_at(slot * SLOT_S, self._release, slot)
        held.append(stream)

    def _release(self, slot: int) -> None:
        for stream in self._held.pop(slot):
            if stream.held:  # its end has not come meanwhile
                self._queue(stream)

    def _run(self) -> None:
        serve, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
        loop = asyncio.get_running_loop()
        if self._waiting:
            loop.call_soon(self._run)
        self._served = True
        if not self._looks:
            self._looks = True
            self._pace.begin()
            loop.call_later(PERIOD_S, self._look)
        now_s = loop.time()
        for stream in serve:
            stream.queued, stream.served_s = False, now_s
            try:
                stream.advance()
            except Exception as error:  # the boundary: what is wrong with one answer must not hold up the others
                log.error("a stream crashed", exc_info=error)
                stream.fail(error)

    def _look(self) -> None:
        """At how busy the process is, until there is nothing to be served."""
        self._looks = self._served or bool(self._held)
        self._served = False
        if not self._looks:
            self._pace.end()
        else:
            self._pace.look()
            asyncio.get_running_loop().call_later(PERIOD_S, self._look)
