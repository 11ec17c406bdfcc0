"""A plain stream turns the tokens of one answer into server-sent events; see `gateway.fast_path` for what is plain.

vLLM's detokeniser and stop strings do their work; its output objects, collectors and generators are not needed for a
token. The events are cut from JSON fragments that are built once per request and match vLLM's output field by field
(vllm.entrypoints.openai.{chat_completion,completion}.serving); a test compares the two on the same tokens. One pass of
the event loop serves all streams with new tokens (`StreamPass`), and a busy process combines the tokens of several
steps into one event (`Pace`).
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.outputs import STREAM_FINISHED, CompletionOutput, RequestOutput
from vllm.v1.engine import FinishReason
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from gateway.connection import BodyWriter
from shared.runtime.logs import get_log

log = get_log(__name__)
DONE = b"data: [DONE]\n\n"
MAX_PIECES = 256  # texts of a slow reader that are kept before they are joined
_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class Usage:
    """Whether a client wants token counts at the end of the stream, and with each event."""

    at_end: bool = False
    always: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """The JSON of one of the two APIs, around the text of an event."""

    kind: bytes
    role: bytes  # the choice of the event before all others; empty where the API has none
    before: bytes
    running: bytes  # after the text, while more may follow
    ended: bytes  # after the last text; with places for the two reasons
    usage: bytes  # with places for the prompt's tokens, all tokens, and the answer's tokens


_TOTALS = b'"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d'
CHAT = Form(
    kind=b"chat.completion.chunk",
    role=b'{"index":0,"delta":{"role":%b,"content":""},"logprobs":null,"finish_reason":null}]',
    before=b'{"index":0,"delta":{"content":',
    running=b'},"logprobs":null,"finish_reason":null,"token_ids":null}]',
    ended=b'},"logprobs":null,"finish_reason":%b,"stop_reason":%b,"token_ids":null}]',
    usage=b"," + _TOTALS + b',"completion_tokens_details":null}',
)
COMPLETION = Form(
    kind=b"text_completion",
    role=b"",
    before=b'{"index":0,"text":',
    running=b',"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]',
    ended=b',"logprobs":null,"finish_reason":%b,"stop_reason":%b,"prompt_token_ids":null,"token_ids":null}]',
    usage=b"," + _TOTALS + b"}",
)
_END = b"}\n\n"


class Chunks:
    """The events of one request. created: Unix seconds; fingerprint: of the system, for the last event."""

    def __init__(
        self, form: Form, request_id: str, created: int, model: str, usage: Usage, fingerprint: str | None
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

    def role(self, role: str, prompt_tokens: int) -> bytes:
        """The event before all others; empty for completions."""
        if not self._form.role:
            return b""
        usage = self._form.usage % (prompt_tokens, prompt_tokens, 0) if self._usage.always else b""
        return (
            self._head + self._form.role % _encode(role) + usage + b',"prompt_token_ids":null,"prompt_text":null' + _END
        )

    def text(self, text: str, prompt_tokens: int, tokens: int) -> bytes:
        """New text of the answer, which has `tokens` tokens now."""
        if self._usage.always:
            totals = self._form.usage % (prompt_tokens, prompt_tokens + tokens, tokens)
            return b"%b%b%b%b%b" % (self._before, _encode(text), self._running, totals, _END)
        return b"%b%b%b" % (self._before, _encode(text), self._running)

    def last(
        self, text: str, prompt_tokens: int, tokens: int, finish_reason: str, stop_reason: int | str | None
    ) -> bytes:
        ended = self._form.ended % (_encode(finish_reason), _encode(stop_reason))
        totals = self._form.usage % (prompt_tokens, prompt_tokens + tokens, tokens) if self._usage.always else b""
        fingerprint = b"" if self._usage.at_end else self._fingerprint
        return self._before + _encode(text) + ended + totals + fingerprint + _END

    def totals(self, prompt_tokens: int, tokens: int) -> bytes:
        """The event after the answer, for clients that want token counts at the end."""
        if not self._usage.at_end:
            return b""
        totals = _TOTALS % (prompt_tokens, prompt_tokens + tokens, tokens)
        return self._head + b"]," + totals + b"}" + self._fingerprint + _END


Stopped = Callable[[str], None]  # ends the job of a request whose answer has reached a stop string
Failed = Callable[[str, Exception], None]  # ends a request whose output raised the exception
Delivered = Callable[[int], None]  # counts the gap that ends when so many tokens are sent in one event


class PlainStream:
    """One answer between the engine's steps and its HTTP response.

    The response's own task sends the first and the last events, and all events where there is no `body` to write to.
    Text that a slow reader does not accept waits here, and is sent as one event.
    """

    def __init__(self, make_chunks: Callable[[], Chunks], role: str, body: BodyWriter | None) -> None:
        self._make_chunks = make_chunks
        self._role = role
        self._body = body
        self._direct = False  # the response has begun, and events go directly to its connection
        self._role_sent = False
        # `bind` sets the next seven.
        self._chunks: Chunks
        self._state: Any  # vLLM's RequestState
        self._detokenizer: Any  # of it
        self._needs_vllm = True  # text is read only by vLLM's own method
        self._outputs: Any  # its OutputProcessor
        self._stopped: Stopped
        self._failed: Failed
        self._delivered: Delivered
        self._tokens: list[int] = []
        self._finish: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._ends_with_stop_token = False  # which has no text
        self._end: tuple[str, int | str | None] | None = None  # finish reason and stop reason, once the answer ends
        self._sent_tokens = 0
        self._unsent: list[str] = []  # text that waits for the reader, and that the detokeniser no longer has
        self.queued = self.held = False  # for the next pass, or for a later one; see StreamPass
        self.served_mono = 0.0  # time of the last pass, by the event loop's clock
        self.max_delay_s = 0.0  # that tokens may wait for others

    def bind(
        self, request_id: str, outputs: Any, stopped: Stopped, failed: Failed, delivered: Delivered, max_delay_s: float
    ) -> None:
        """Replace vLLM's output processor `outputs` for this request, which is registered there."""
        self.max_delay_s = max_delay_s
        self._state = outputs.request_states[request_id]
        self._detokenizer = self._state.detokenizer
        # Without stop strings all text may be sent at once; vLLM's fast detokeniser counts only the answer's tokens.
        self._needs_vllm = not isinstance(self._detokenizer, FastIncrementalDetokenizer) or bool(self._detokenizer.stop)
        self._chunks = self._make_chunks()
        self._outputs = outputs
        self._stopped, self._failed, self._delivered = stopped, failed, delivered

    def accept(self, tokens: list[int], finish: FinishReason | None, stop_reason: int | str | None) -> None:
        self._tokens += tokens
        self._finish, self._stop_reason = finish, stop_reason
        self._ends_with_stop_token = bool(tokens) and finish is FinishReason.STOP

    @property
    def urgent(self) -> bool:
        """Whether the accepted tokens must not wait for others: the first ones, or the last."""
        return not self._sent_tokens or self._finish is not None

    @property
    def direct(self) -> bool:
        """Whether events go directly to the connection."""
        return self._direct

    @property
    def ended(self) -> bool:
        """Whether the end of the answer is known."""
        return self._end is not None

    @property
    def counted(self) -> tuple[int, int]:
        """Tokens of the prompt and of the answer."""
        return self._state.prompt_len, self._detokenizer.num_output_tokens()

    def queue(self) -> None:
        """The accepted tokens are sent in this turn of the event loop, or the next."""
        self.queued, self.held = True, False
        if self._tokens:
            self._delivered(len(self._tokens))

    def advance(self) -> None:
        """Turn the accepted tokens into text, look for stop strings, and send what is new."""
        state, outputs = self._state, self._outputs
        if self._end is not None or outputs.request_states.get(state.request_id) is not state:
            return  # the answer is complete, or its client has left
        tokens, self._tokens = self._tokens, []
        state.is_prefilling = False
        stop_string = self._detokenizer.update(tokens, self._ends_with_stop_token)
        if stop_string is None and self._finish is None:
            if self._direct and self._role_sent and not self._needs_vllm:
                self._send_text()
            else:
                self._send()
            return
        self._end = (str(FinishReason.STOP), stop_string) if stop_string else (str(self._finish), self._stop_reason)
        outputs._finish_request(state)
        if stop_string:
            self._stopped(state.request_id)
        state.queue.put(STREAM_FINISHED)

    def begin(self) -> None:
        """The response has begun: from now on events may go directly to its connection."""
        if self._body is not None and self._body.open:
            self._direct = True
            self._body.on_room(self._catch_up)
            self._catch_up()

    def new_events(self) -> bytes:
        """Events of all text that was not sent yet; empty where there is none."""
        text = self._detokenizer.get_next_output_text(False, True)
        if not self._needs_vllm:
            self._detokenizer.output_text, self._detokenizer._last_output_text_offset = "", 0
        return self._events(self._with_unsent(text))

    def last(self, cut: CompletionOutput | None = None) -> bytes:
        """The remaining events of the answer. cut: the end that vLLM gave it, if it did."""
        if cut is not None:
            text, reason, stop_reason = cut.text, str(cut.finish_reason), cut.stop_reason
        elif self._end is not None:
            text, (reason, stop_reason) = self._detokenizer.get_next_output_text(True, True), self._end
        else:
            return b""
        return self._events(self._with_unsent(text), (reason, stop_reason))

    def totals(self) -> bytes:
        return self._chunks.totals(*self.counted)

    def fail(self, error: Exception) -> None:
        """The accepted tokens could not be made into events: end the response with an error, and the job."""
        self._failed(self._state.request_id, error)

    def _send(self) -> None:
        """Send what is new, unless the reader has to catch up first."""
        if not self._direct:
            # Wakes the response's task. A new object each time: a collector merges outputs into the waiting one.
            self._state.queue.put(RequestOutput("", None, None, None, [], finished=False))
        elif self._body is not None and not self._body.full and (events := self.new_events()):
            self._body.write(events)

    def _send_text(self) -> None:
        """`_send` for the usual case, a reader that keeps up and no stop strings: most tokens are sent here.

        The text is moved out of the detokeniser, which would copy all its text with each token.
        """
        body, detokenizer = self._body, self._detokenizer
        text, detokenizer.output_text = detokenizer.output_text, ""
        if body is None or body.full:
            self._unsent.append(text)
            if len(self._unsent) == MAX_PIECES:
                self._unsent = ["".join(self._unsent)]
            return
        tokens = len(detokenizer.token_ids)
        if tokens > self._sent_tokens:
            self._sent_tokens = tokens
            body.write(self._chunks.text(self._with_unsent(text), self._state.prompt_len, tokens))

    def _with_unsent(self, text: str) -> str:
        """All text that was not sent yet, of which `text` is the end."""
        if not self._unsent:
            return text
        unsent, self._unsent = self._unsent, []
        return "".join((*unsent, text))

    def _catch_up(self) -> None:
        if self._end is not None:
            return
        try:
            if self.counted[1] > self._sent_tokens:
                self._send()
        except Exception as error:  # called by the connection, whose other requests must not fail
            self.fail(error)

    def _events(self, text: str, end: tuple[str, int | str | None] | None = None) -> bytes:
        prompt_tokens, tokens = self.counted
        role = b""
        if not self._role_sent:
            self._role_sent = True
            role = self._chunks.role(self._role, prompt_tokens)
        if not text and not tokens:
            return role  # vLLM sends no end of an answer that never began
        new_tokens, self._sent_tokens = tokens - self._sent_tokens, tokens
        if end is not None:
            return role + self._chunks.last(text, prompt_tokens, tokens, *end)
        return role + self._chunks.text(text, prompt_tokens, tokens) if new_tokens else role


PERIOD_S = 0.1  # between two measurements of the process's load
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.005, 1.0
_RELAXED, _BUSY = 0.55, 0.75  # shares of the process's time
_MIN_SHARE = 0.25  # a process that computes less than this share of the time would gain nothing by combining events
_FACTOR = 1.5  # by which the interval grows or shrinks with each measurement


class Pace:
    """How long the tokens of a stream wait for the next ones to share an event: `interval_s`, 0 without load.

    An event costs more than a token: its JSON, a write to a socket, and the client's work. A process counts as busy
    when its thread computes most of the time, or is not scheduled when it wants to run because others compute.
    Ask `computes` when there are tokens: while the process computes little, it is not measured. Else call `begin`, then
    `measure` each PERIOD_S for as long as it returns true and there are tokens, and `end` when there are none.
    """

    def __init__(
        self, now_s: Callable[[], float] = time.monotonic, used_s: Callable[[], float] = time.thread_time
    ) -> None:
        self.interval_s = 0.0
        self._now_s = now_s
        self._used_s = used_s
        self.begin()

    def begin(self) -> None:
        self._measured_s, self._used_before_s = self._now_s(), self._used_s()

    def computes(self) -> bool:
        """Whether the process has computed enough, in a time of at least PERIOD_S, that its load is to be measured."""
        passed = self._now_s() - self._measured_s
        if passed < PERIOD_S:
            return False
        before = self._used_before_s
        self.begin()
        return self._used_before_s - before >= passed * _MIN_SHARE

    def end(self) -> None:
        self.interval_s = 0.0

    def measure(self) -> bool:
        """Adapt the interval to the load since the last measurement. Returns whether to measure again."""
        now, used = self._now_s(), self._used_s()
        passed, computed = max(now - self._measured_s, 1e-6), used - self._used_before_s
        self._measured_s, self._used_before_s = now, used
        late = max(0.0, passed - PERIOD_S)
        busy = (computed + late) / max(passed, PERIOD_S)
        if computed < passed * _MIN_SHARE:
            busy = 0.0
        if busy > _BUSY:
            self.interval_s = min(MAX_INTERVAL_S, max(MIN_INTERVAL_S, self.interval_s * _FACTOR))
        elif busy < _RELAXED:
            shorter = self.interval_s / _FACTOR
            self.interval_s = shorter if shorter >= MIN_INTERVAL_S else 0.0
        return self.interval_s > 0.0 or computed >= passed * _MIN_SHARE


MAX_STREAMS = 128  # that a pass serves before other work has its turn
SLOT_S = 0.005  # streams that are due within one slot wait for one timer


class StreamPass:
    """Serves all plain streams that have new tokens in one callback: once per turn of the event loop, or at the
    interval of `Pace`.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._queue: list[PlainStream] = []
        self._held: dict[int, list[PlainStream]] = {}  # by the slot of their time
        self._measuring = False
        self._served = False  # any stream, since the last measurement

    def add(self, stream: PlainStream) -> None:
        """The stream has accepted a step. Several steps of one turn, or of the interval, are sent as one event."""
        if stream.queued:
            return
        if not self._pace.interval_s or stream.urgent:
            self._enqueue(stream)
            return
        if stream.held:
            return
        due_mono = stream.served_mono + min(self._pace.interval_s, stream.max_delay_s)
        if due_mono > asyncio.get_running_loop().time():
            self._hold(stream, int(due_mono / SLOT_S) + 1)
        else:
            self._enqueue(stream)

    def _enqueue(self, stream: PlainStream) -> None:
        stream.queue()
        self._queue.append(stream)
        if len(self._queue) == 1:
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
            if stream.held:  # else its end has been queued meanwhile
                self._enqueue(stream)

    def _run(self) -> None:
        streams, self._queue = self._queue[:MAX_STREAMS], self._queue[MAX_STREAMS:]
        loop = asyncio.get_running_loop()
        if self._queue:
            loop.call_soon(self._run)
        self._served = True
        if not self._measuring and (self._pace.interval_s or self._pace.computes()):
            self._measuring = True
            self._pace.begin()
            loop.call_later(PERIOD_S, self._measure)
        now_mono = loop.time()
        for stream in streams:
            stream.queued, stream.served_mono = False, now_mono
            try:
                stream.advance()
            except Exception as error:  # a boundary: an error in one answer must not delay the others
                log.error("a stream crashed", exc_info=error)
                stream.fail(error)

    def _measure(self) -> None:
        """Measure the load for as long as there are streams to serve and the process computes for them."""
        serves, self._served = self._served or bool(self._held), False
        if not serves:
            self._pace.end()
        self._measuring = serves and self._pace.measure()
        if self._measuring:
            asyncio.get_running_loop().call_later(PERIOD_S, self._measure)
