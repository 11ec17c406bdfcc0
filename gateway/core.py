"""Our cluster in the place of vLLM's engine core: a request of its front end becomes a job of the pipeline.

vLLM keeps validation, templates, parsers, n > 1, detokenisation, stop strings, usage and streaming. What reaches us
is tokens and sampling parameters; what we give back is tokens.
"""

import asyncio
import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Protocol, cast

import msgspec
import numpy as np
import torch
from vllm import SamplingParams
from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from gateway.admission import Seat, Ticket
from gateway.context import caller
from gateway.fields import refuse_request
from gateway.gaps import Gaps
from gateway.job import Job, JobSpec
from gateway.pace import Pace
from gateway.settings import GatewaySettings
from gateway.stream import PlainStream, submitted
from gateway.stream_pass import StreamPass
from gateway.tracing import request_trace
from gateway.turns import after_prompt
from shared.domain.job import Generation, Phase, WhenFull
from shared.errors import InvalidRequest, Overloaded, PolyphaseError
from shared.runtime.logs import get_log, in_logs
from shared.wire.messages import TokenStep, decode_rows

log = get_log(__name__)
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "repetition": FinishReason.REPETITION}
_PIN_SEED = 0x5EED
LOGPROBS_AT_ONCE = 1024  # values that the front end makes into objects in one turn of the event loop: some 6 ms


class JobRunner(Protocol):
    """Runs a job to its end: the pipeline, or what a measurement puts in its place."""

    async def run(self, job: Job) -> None:
        """Returns when all tokens were accepted, or raises why not."""
        ...


@dataclass(slots=True, eq=False)
class _Running:
    job: Job
    seat: Seat
    stream: PlainStream | None = None
    task: asyncio.Task[None] | None = None
    left: bool = False  # its seat: it decodes
    told: bool = False  # what it reuses
    scoring: asyncio.Task[None] | None = None  # reads its prompt's log probabilities
    held: list[TokenStep] = field(default_factory=list)  # steps that wait for that


class ClusterCore:
    """The part of vLLM's EngineCoreClient that AsyncLLM calls."""

    engine_ranks_managed = (0,)
    resources = SimpleNamespace(engine_dead=False)

    def __init__(self, settings: GatewaySettings, pipeline: JobRunner, pace: Pace, gaps: Gaps | None = None) -> None:
        """gaps: where those between tokens are counted."""
        self._settings = settings
        self._gaps = gaps or Gaps()
        self._pipeline = pipeline
        self.on_refused: Callable[[str, str], None] = lambda slo, code: None  # told of each that there is no room for
        self._jobs: dict[str, _Running] = {}
        self._streams = StreamPass(pace)
        self._outputs: list[EngineCoreOutput] = []
        self._ready = asyncio.Event()
        self._requests: Any = None
        self._vocabulary = 0

    def attach(self, output_processor: Any, vocabulary: int) -> None:
        """Learn who knows the handlers that wait for jobs: the output processor of the front end; and how many tokens
        its model knows.
        """
        self._requests, self._vocabulary = output_processor, vocabulary

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        """We generate."""
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Start a job. Never waits; a job that there is no room for fails like one that ran."""
        await after_prompt(request.prompt_token_ids)
        if not self._requests.has_request(request.request_id):
            return  # one of n, of which another has failed meanwhile
        ticket, seat = caller.get().ticket, None
        try:
            spec = self._spec(request)
            try:
                seat = ticket.start(len(spec.prompt_token_ids))
            except PolyphaseError as error:
                self.on_refused(spec.slo.name, error.code)
                raise
            self._start(request.request_id, spec, seat)
        except Exception as error:  # the request is registered: raised from here it would stay so for ever
            if seat is not None and request.request_id not in self._jobs:
                seat.leave()
            if not isinstance(error, PolyphaseError):
                log.error("a job did not start", job_id=request.request_id, exc_info=error)
                error = _internal(error)
            self._fail(request.request_id, error, ticket)

    def _start(self, request_id: str, spec: JobSpec, seat: Seat) -> None:
        deadline_s = time.monotonic() + self._settings.job_timeout_s
        if spec.slo.when_full is WhenFull.DELAY:
            deadline_s += self._settings.slo[spec.slo.name].queue_s
        job = Job(spec, _nobody, self._settings.gateway_id, deadline_s, gaps=self._gaps)
        job.siblings = self._requests.request_states[request_id].parent_req
        if (trace := request_trace.get()) is not None:
            tokens = len(spec.prompt_token_ids)
            name = caller.get().request_id
            job.trace = trace.open(spec.job_id, spec.arrived_s, tokens, spec.max_tokens, spec.slo.name, name)
        running = self._jobs[spec.job_id] = _Running(job, seat, self._stream_of(job))
        job.emit = partial(self._emit, running)
        running.task = asyncio.get_running_loop().create_task(self._run(running), name=f"job {spec.job_id}")
        running.task.add_done_callback(lambda ended: self._ended(spec.job_id, ended))

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        """End jobs whose client has its answer: the output processor has found a stop string in it."""
        for request_id in request_ids:
            try:
                self._stopped(request_id)
            except Exception as error:  # vLLM's output handler calls, for all requests
                self.output_failed(request_id, error)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Give up jobs whose client is gone."""
        for request_id in request_ids:
            running = self._jobs.get(request_id)
            if running is not None and running.task is not None:
                running.task.cancel()

    async def get_output_async(self) -> EngineCoreOutputs:
        """All steps since the last call, in one batch; waits while there are none."""
        await self._ready.wait()
        self._ready.clear()
        outputs, self._outputs = self._outputs, []
        return EngineCoreOutputs(outputs=outputs)

    def output_failed(self, request_id: str, error: Exception) -> None:
        """A step of this request could not be made into output: the request ends with an error, and no other does."""
        log.error("the output of a request failed", job_id=request_id, exc_info=error)
        running = self._jobs.get(request_id)
        self._fail(request_id, _internal(error))
        if running is not None:
            running.job.broke(PolyphaseError.code)
            self.cancel((request_id,))

    def _stopped(self, request_id: str) -> None:
        if running := self._jobs.get(request_id):
            running.job.stop()
            self.cancel((request_id,))

    def dp_engines_running(self) -> bool:
        """No data-parallel engines here."""
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """Cancel every job."""
        self.cancel(self._jobs)

    async def close(self) -> None:
        """Cancel every job and wait until its legs are told."""
        self.shutdown()
        await asyncio.gather(*(running.task for running in self._jobs.values() if running.task), return_exceptions=True)

    async def _run(self, running: _Running) -> None:
        job_id = running.job.spec.job_id
        if running.job.trace is not None:
            in_logs(running.job.trace.trace_id)
        try:
            await running.seat.turn(running.job.left_s)  # a deadline that passes here is the pipeline's to find
            await self._pipeline.run(running.job)
            if running.scoring is not None:
                await running.scoring
        except PolyphaseError as error:
            if not isinstance(error, Overloaded):
                log.warning("job failed", job_id=job_id, code=error.code, error=error.message)
            self._fail(job_id, error, running.seat.ticket)
        except Exception as error:  # the boundary: a client must never wait for a job that crashed
            log.error("job crashed", job_id=job_id, exc_info=error)
            self._fail(job_id, _internal(error), running.seat.ticket)
        finally:
            if running.scoring is not None:
                running.scoring.cancel()

    def _fail(self, request_id: str, error: PolyphaseError, ticket: Ticket | None = None) -> None:
        """Give a request's handler the error; vLLM turns it into a status, or an event in a stream that has begun.

        The handler is then through with the request: of n jobs the others end, too. Raises nothing.
        """
        told = GracefulHTTPError(error.message, HTTPStatus(error.http_status))
        if ticket is not None and error.http_status == HTTPStatus.TOO_MANY_REQUESTS:
            ticket.refusal = error  # the edge answers: the front end knows no Retry-After
        elif ticket is not None and error.http_status < HTTPStatus.INTERNAL_SERVER_ERROR:
            ticket.rejection = told  # so it does in the place of a stream that has no event yet
        if ticket is not None and (running := self._jobs.get(request_id)) is not None and running.stream is not None:
            try:
                running.stream.advance()  # what it has is its client's
            except Exception as crash:
                log.error("the rest of a stream was lost", job_id=request_id, exc_info=crash)
        state = self._requests.request_states.get(request_id)
        if state is None or state.queue is None:
            return
        queue = state.queue
        ended = self._forget(state)
        queue.put(told)
        self.cancel(one for one in ended if one != request_id)

    def forget(self, request_id: str) -> None:
        """Nobody waits for this request: adding it, or another of its n, has failed."""
        if (state := self._requests.request_states.get(request_id)) is not None:
            self.cancel(self._forget(state))

    def _forget(self, state: Any) -> list[str]:
        """Take a request out of the output processor, with the others of its n; the ids of all.

        No last output is made of them: that may be what fails.
        """
        requests, parent = self._requests, state.parent_req
        ids = {state.request_id, *(parent.child_requests if parent is not None else ())}
        states = [known for one in ids if (known := requests.request_states.get(one)) is not None]
        for each in states:
            each.queue = None
        try:
            requests.abort_requests([parent.request_id if parent is not None else state.request_id], internal=True)
        except Exception as error:
            log.error("vLLM could not abort a request", job_id=state.request_id, exc_info=error)
        for each in states:  # what was half finished when it failed
            if requests.request_states.pop(each.request_id, None) is not None:
                others = requests.external_req_ids.get(each.external_req_id, [])
                if each.request_id in others:
                    others.remove(each.request_id)
                if not others:
                    requests.external_req_ids.pop(each.external_req_id, None)
        return [each.request_id for each in states]

    def _ended(self, job_id: str, task: asyncio.Task[None]) -> None:
        self._jobs.pop(job_id).seat.leave()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the end of a job crashed; its client may wait in vain", job_id=job_id, exc_info=error)

    def _spec(self, request: EngineCoreRequest) -> JobSpec:
        """Raises InvalidRequest for what the cluster cannot do."""
        refuse_request(request)
        params = cast(SamplingParams, request.sampling_params)
        self._charge_logprobs(params, len(request.prompt_token_ids or ()))
        carry = _can_carry(params)
        if not carry and params.seed is None and params.temperature > 0:
            # A lost answer can be produced again only if the dice fall the same way.
            params = copy.copy(params)
            params.seed = hash((request.request_id, _PIN_SEED)) & 0x7FFFFFFF
        who = caller.get()
        prompt = request.prompt_token_ids or []
        return JobSpec(
            job_id=request.request_id,
            prompt_token_ids=prompt,
            generation=Generation(
                msgspec.msgpack.encode(params),
                who.arrived_s,
                who.salted(request.cache_salt or ""),
                *_reasoning(request),
            ),
            max_tokens=params.max_tokens or self._settings.max_model_len - len(prompt),
            carry=carry,
            local_only=params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None,
            slo=self._settings.slo[who.slo].as_slo(who.slo),
            caller=who.ticket.caller,
        )

    def _charge_logprobs(self, params: SamplingParams, tokens: int) -> None:
        """Raises InvalidRequest where the prompts of a body want more log probabilities than one may have."""
        wanted = params.prompt_logprobs
        if wanted is None:
            return
        candidates = (wanted if wanted >= 0 else self._vocabulary) + 1  # the prompt's own token is one
        ticket, most = caller.get().ticket, self._settings.max_prompt_logprobs
        ticket.prompt_logprobs += tokens * candidates
        if ticket.prompt_logprobs > most:
            raise InvalidRequest(
                f"prompt_logprobs of a body: {tokens} tokens with {candidates} candidates each bring it to "
                f"{ticket.prompt_logprobs} log probabilities, the limit is {most}: ask for fewer candidates or tokens"
            )

    def _stream_of(self, job: Job) -> PlainStream | None:
        """The stream that submits this request, if it is a plain one."""
        stream = submitted.get()
        if stream is not None:
            submitted.set(None)
            job.streamed = True
            most_s = job.spec.slo.tpot_s * self._settings.stream_interval_share
            stream.bind(job.spec.job_id, self._requests, self._stopped, self.output_failed, job.delivered, most_s)
        return stream

    def _emit(self, running: _Running, step: TokenStep) -> None:
        """Hand a step on. Raises what is wrong with it, and then the job has not finished."""
        try:
            self._take(running, step)
        except Exception:
            running.job.finish_reason = ""
            raise

    async def _score(self, running: _Running, logprobs: LogprobsTensors) -> None:
        """Have vLLM take the log probabilities of a long prompt in slices, and then the steps that came meanwhile."""
        job_id = running.job.spec.job_id
        positions, candidates = logprobs.logprobs.shape
        size = max(1, LOGPROBS_AT_ONCE // candidates)
        try:
            for start in range(0, positions, size):
                if (state := self._requests.request_states.get(job_id)) is None:
                    return
                parts = (part[start : start + size] for part in (logprobs[0], logprobs[1], logprobs[2]))
                state.logprobs_processor._update_prompt_logprobs(LogprobsTensors(*parts))
                await asyncio.sleep(0)
            running.scoring = None
            for step in running.held:
                self._take(running, step)
        except Exception as error:
            self.output_failed(job_id, error)

    def _take(self, running: _Running, step: TokenStep) -> None:
        if running.scoring is not None:
            running.held.append(step)
            return
        of_prompt = _prompt_logprobs(step.prompt_logprobs) if step.prompt_logprobs else None
        if of_prompt is not None and of_prompt.logprobs.numel() > LOGPROBS_AT_ONCE:
            running.held.append(msgspec.structs.replace(step, prompt_logprobs=b""))
            running.scoring = asyncio.get_running_loop().create_task(self._score(running, of_prompt))
            return
        job, stream = running.job, running.stream
        if not running.left and (job.phase is Phase.DECODE or step.finish_reason):
            running.left = True
            running.seat.leave()
        if stream is not None:
            reason = _REASONS[step.finish_reason] if step.finish_reason else None
            stream.take(step.tokens, reason, step.stop_reason)
            if not stream.queued:
                self._streams.add(stream)
            return
        self._outputs.append(
            EngineCoreOutput(
                request_id=job.spec.job_id,
                new_token_ids=step.tokens,
                new_logprobs=_logprobs(step.logprobs) if step.logprobs else None,
                new_prompt_logprobs_tensors=of_prompt,
                finish_reason=_REASONS[step.finish_reason] if step.finish_reason else None,
                stop_reason=step.stop_reason,
                prefill_stats=None if running.told else _reused(job),
            )
        )
        running.told = True
        self._ready.set()


def _reused(job: Job) -> PrefillStats:
    """For `cached_tokens` and the like, as of the first token: what is computed again after a loss, or when blocks were
    taken back, does not count, as in vLLM.
    """
    reused = job.reused
    return PrefillStats(num_cached_tokens=reused.tokens, num_cache_creation_tokens=reused.created)


def _nobody(_: TokenStep) -> None:
    """Takes no step: the job has not begun."""


def _reasoning(request: EngineCoreRequest) -> tuple[bool | None, bytes]:
    """What an engine needs of a reasoning model's prompt: nothing, where it is not to hold to a grammar."""
    if request.sampling_params.structured_outputs is None:
        return None, b""
    arguments = request.reasoning_parser_kwargs
    return request.reasoning_ended, b"" if arguments is None else msgspec.msgpack.encode(arguments)


def _can_carry(params: SamplingParams) -> bool:
    """Whether later tokens depend on earlier ones only as context, so that any engine can go on from them."""
    return not (
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.seed is not None
        or params.min_tokens
        or params.structured_outputs is not None
        or params.bad_words
        or params.thinking_token_budget is not None
        or params.repetition_detection is not None
        or params.prompt_logprobs is not None
        or params.prompt_logprob_token_ids is not None
        or params.trace_decode_token_ids is not None
    )


def _rows(data: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids and log probabilities by position and candidate, ranks by position."""
    rows = decode_rows(data)
    ids = np.frombuffer(rows.ids, "<i4").reshape(-1, rows.candidates)
    values = np.frombuffer(rows.values, "<f4").reshape(-1, rows.candidates)
    return ids, values, np.frombuffer(rows.ranks, "<i4")


def _logprobs(data: bytes) -> LogprobsLists:
    return LogprobsLists(*_rows(data))


def _prompt_logprobs(data: bytes) -> LogprobsTensors:
    return LogprobsTensors(*(torch.tensor(part) for part in _rows(data)))


def _internal(error: BaseException) -> PolyphaseError:
    """A bug of ours, as its client is told of it: the details are for the log."""
    return PolyphaseError(f"internal error: {type(error).__name__}")
