"""The gateway's tracing spans: of the HTTP request, of each job in it, of each attempt, and of the gateway's own steps.

Instances and schedulers export their own spans, below the span whose context (`wire`) came with their call. Before a
job's first token the gateway only opens the spans that other processes need; all others are made from the timeline at
the end of the job. Attributes hold names, numbers and codes, never text of a prompt, an answer or an error.
"""

import time
from collections.abc import Awaitable, Collection
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.errors import PolyphaseError
from shared.timeline import RequestTimeline, Span

if TYPE_CHECKING:
    from shared.runtime.otlp import Trace, Tracer

TRACE = "polyphase.trace"  # key of the request's ASGI scope for its RequestTrace
_OPERATIONS = {"/v1/completions": "text_completion"}  # else "chat", by OpenTelemetry's conventions for generative AI
_REQUEST_ID_CHARS = 256
_CONTEXT = {b"traceparent", b"tracestate"}
_OWN = {Span.HANDOVER, Span.REPLY, Span.PAUSED, Span.RECOMPUTED}  # stretches that no other process exports


class RequestTrace:
    def __init__(self, root: "Trace", model: str, path: str, began_s: float) -> None:
        self.root = root
        self._model = model
        self._operation = _OPERATIONS.get(path, "chat")
        self._began_s = began_s
        self._received = False
        self.error = ""  # the error code of the last job that failed

    def open(
        self, job_id: str, arrived_s: float, prompt_tokens: int, max_tokens: int, slo: str, request_id: str = ""
    ) -> "JobTrace":
        """Begin the span of a job. request_id: the client's name of the request; may be empty."""
        if not self._received:
            self._received = True
            self.root.add("receive", self._began_s, arrived_s)
        attributes: dict[str, str | int] = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": max_tokens,
            "gen_ai.usage.input_tokens": prompt_tokens,
            "polyphase.job.id": job_id,
            "polyphase.slo": slo,
        }
        if request_id:
            attributes["polyphase.request.id"] = request_id[:_REQUEST_ID_CHARS].encode(errors="replace").decode()
        return JobTrace(self, self.root.child(f"{self._operation} {self._model}", arrived_s, attributes))


class JobTrace:
    """The spans of one job. `wire` is sent with the calls of the current attempt."""

    def __init__(self, request: RequestTrace, span: "Trace") -> None:
        self._request = request
        self._span = span
        self._attempts: list[Trace] = []
        self._over = 0  # attempts that have ended
        self._placement: Trace | None = None
        self.trace_id = span.trace_id
        self.wire = ""

    def attempt(self, began_s: float) -> None:
        attributes = {"polyphase.attempt": len(self._attempts) + 1}
        self._attempts.append(self._span.child("attempt", began_s, attributes))
        self.wire = self._attempts[-1].wire

    def failed(self, error: PolyphaseError) -> None:
        self._end_attempt(time.time(), error.code)

    def moved(self) -> None:
        """The current attempt ends because the job continues on another instance."""
        self._end_attempt(time.time(), "")

    def placing(self, began_s: float) -> str:
        """A placement is requested, once or several times; the context for that call."""
        if self._placement is None:
            self._placement = self._attempts[-1].child("placement", began_s, kind="client")
        return self._placement.wire

    def placed(self, until_s: float) -> None:
        self._end_placement(until_s, "")

    def leg_lost(self, instance_id: str, began_s: float, until_s: float, error: str) -> None:
        """A call of an instance failed; the instance itself may not export a span of it."""
        self._attempts[-1].add("lost", began_s, until_s, {"polyphase.instance.id": instance_id}, error=error)

    def ended(self, timeline: RequestTimeline, split: int, finish_reason: str, error: str) -> None:
        """The job is over, and its timeline is complete. error: its error code, if it failed."""
        ended_s = timeline.ended_s
        self._end_placement(ended_s, error)
        if self._over < len(self._attempts):
            self._end_attempt(ended_s, error)
        for stretch in timeline.spans:
            attributes = {"polyphase.instance.id": stretch.instance_id} if stretch.instance_id else None
            if stretch.span is Span.INTAKE:
                self._span.add(stretch.span, stretch.started_s, stretch.ended_s)
            elif stretch.span in _OWN and stretch.attempt <= len(self._attempts):
                self._attempts[stretch.attempt - 1].add(stretch.span, stretch.started_s, stretch.ended_s, attributes)
        figures: dict[str, str | int | float | list[str]] = {
            "gen_ai.usage.output_tokens": timeline.output_tokens,
            "polyphase.outcome": timeline.outcome,
            "polyphase.attempts": len(self._attempts),
            "polyphase.split": split,
        }
        if finish_reason:
            figures["gen_ai.response.finish_reasons"] = [finish_reason]
        if (ttft_s := timeline.ttft_s) is not None:
            figures["gen_ai.response.time_to_first_chunk"] = ttft_s
            self._span.event("first_token", timeline.first_token_s)
        if (tpot_s := timeline.tpot_s) is not None:
            figures["polyphase.tpot_s"] = tpot_s
        if timeline.gaps:
            figures["polyphase.longest_gap_s"] = timeline.longest_gap_s
        self._request.error = error or self._request.error
        self._span.end(ended_s, figures, error=error)

    def _end_attempt(self, ended_s: float, error: str) -> None:
        self._over = len(self._attempts)
        self._attempts[-1].end(ended_s, error=error)

    def _end_placement(self, ended_s: float, error: str) -> None:
        if self._placement is not None:
            self._placement.end(ended_s, error=error)
            self._placement = None


class TracedRequests:
    """Opens the span of each HTTP request. routes: the paths that spans may name; clients can make up any others."""

    def __init__(self, tracer: "Tracer", model: str, routes: Collection[str]) -> None:
        self._tracer = tracer
        self._model = model
        self._routes = frozenset(routes)

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Have `app` answer, with a span below the client's span if the request names one."""
        began_s, status, failed = time.time(), 0, ""
        root = self._begin(scope, began_s)
        if root is None:
            await app(scope, receive, send)
            return
        request = RequestTrace(root, self._model, scope["path"], began_s)
        # Without the context, of which vLLM would log that it does not trace.
        headers = [each for each in scope["headers"] if each[0] not in _CONTEXT]
        scope = {**scope, "headers": headers, TRACE: request}

        def sending(message: Message) -> Awaitable[None]:
            nonlocal status
            status = message.get("status", status)
            return send(message)

        try:
            await app(scope, receive, sending)
        except Exception as crash:
            failed = type(crash).__name__
            raise
        finally:
            error = failed or request.error or (str(status) if status >= 500 else "")
            root.end(time.time(), {"http.response.status_code": status} if status else None, error=error)

    def _begin(self, scope: Scope, began_s: float) -> "Trace | None":
        headers, method, path = dict(scope["headers"]), scope["method"], scope["path"]
        attributes = {"http.request.method": method, "url.scheme": scope.get("scheme", "http")}
        name = method
        if path in self._routes:
            name = f"{method} {path}"
            attributes |= {"http.route": path, "url.path": path}
        return self._tracer.root(
            headers.get(b"traceparent", b"").decode("latin-1"),
            headers.get(b"tracestate", b"").decode("latin-1"),
            name,
            began_s,
            attributes,
        )
