"""A plain stream: one answer's tokens become text and events here, in one pass for all jobs of an engine's step.

vLLM's own detokeniser and stop strings; none of its outputs, collectors and generators a token.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from vllm.outputs import STREAM_FINISHED, CompletionOutput, RequestOutput
from vllm.v1.engine import FinishReason
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from gateway.chunks import Chunks
from gateway.connection import BodyWriter

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
