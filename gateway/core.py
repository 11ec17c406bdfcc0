"""Our cluster in the place of vLLM's engine core: a request of its front end becomes a job of the pipeline.

vLLM keeps validation, templates, parsers, n > 1, detokenisation, stop strings, usage and streaming. What reaches us
is tokens and sampling parameters; what we give back is tokens.
"""

import asyncio
import copy
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from enum import StrEnum
from functools import partial
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Protocol, cast

import msgspec
import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.renderers.chat_utils import BaseMultiModalItemTracker
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from gateway.admission import Seat, Ticket
from gateway.job import Gaps, Job, JobSpec
from gateway.plain_stream import Pace, PlainStream, StreamPass, submitted
from gateway.request_context import after_prompt, caller
from gateway.settings import GatewaySettings
from gateway.structured_outputs import Grammars
from gateway.tracing import request_trace
from gateway.vllm_patches import read_only_ends
from shared.domain.job import NAME_CHARS, Generation, Phase, WhenFull, job_name
from shared.errors import InvalidRequest, Overloaded, PolyphaseError
from shared.runtime.logs import get_log, in_logs
from shared.wire.messages import TokenStep, decode_rows

# MERGED fields.py
# What becomes of each field of vLLM's requests: it reaches the engine, is dealt with here, or is refused by name.
#
# A request is vLLM's EngineCoreRequest with its SamplingParams (0.32). A field that a new vLLM adds has no entry here,
# and a test fails until there is one: nothing that a client asks for is dropped in silence.


class Fate(StrEnum):
    """What becomes of a field."""

    CARRIED = "carried"  # its value reaches the engine
    HERE = "here"  # the front end does what it says, or it is of the front end's own making
    HINT = "hint"  # changes no answer, and has no effect
    REFUSED = "refused"  # any value that asks for something is a 400


@dataclass(frozen=True, slots=True)
class Field:
    """why: of what is refused, what a client reads; else what happens to it."""

    fate: Fate
    why: str = ""


_CARRIED = Field(Fate.CARRIED)
MEDIA = "this cluster computes text alone: send text, without images, audio, video or embeddings"
_NO_LOG = "this cluster does not carry what the engine would answer: leave it out"

REQUEST: dict[str, Field] = {
    "request_id": _CARRIED,
    "prompt_token_ids": _CARRIED,
    "mm_features": Field(Fate.REFUSED, MEDIA),
    "sampling_params": _CARRIED,
    "pooling_params": Field(Fate.REFUSED, "this cluster generates text: it has no embeddings, scores or classes"),
    "arrival_time": Field(Fate.CARRIED, "as the moment at which all of the body was here"),
    "lora_request": Field(Fate.REFUSED, "this cluster serves no LoRA adapters: name the model itself"),
    "cache_salt": _CARRIED,
    "data_parallel_rank": Field(
        Fate.REFUSED, "the scheduler chooses the engine: leave out the header X-Data-Parallel-Rank"
    ),
    "prompt_embeds": Field(Fate.REFUSED, MEDIA),
    "prompt_is_token_ids": Field(Fate.REFUSED, MEDIA),
    "client_index": Field(Fate.HERE, "which front end of an engine; each of ours has its own connection"),
    "current_wave": Field(Fate.HERE, "of data-parallel engines, which are instances here"),
    "priority": Field(Fate.REFUSED, "requests are ordered by their SLO class: name one in the header X-Polyphase-SLO"),
    "trace_headers": Field(Fate.HERE, "traces follow the request's own headers; see `tracing`"),
    "resumable": Field(Fate.REFUSED, "the prompt of a request must be all there: send it in one piece"),
    "external_req_id": Field(Fate.HERE, "the client's name of the request"),
    "reasoning_ended": _CARRIED,
    "reasoning_parser_kwargs": _CARRIED,
    "abort_immediately": Field(Fate.REFUSED, "how KV moves is the cluster's to say"),
    "session_id": Field(Fate.HINT, "placement looks at prefixes and loads, not at sessions"),
    "kv_hints": Field(Fate.REFUSED, "how KV moves is the cluster's to say: leave them out"),
}

SAMPLING: dict[str, Field] = {
    "n": Field(Fate.HERE, "each answer is a job"),
    "presence_penalty": _CARRIED,
    "frequency_penalty": _CARRIED,
    "repetition_penalty": _CARRIED,
    "temperature": _CARRIED,
    "watermarking": Field(Fate.REFUSED, "this cluster has no watermark: leave it out"),
    "top_p": _CARRIED,
    "top_k": _CARRIED,
    "min_p": _CARRIED,
    "seed": _CARRIED,
    "stop": Field(Fate.HERE, "found in the text; the engine is stopped"),
    "stop_token_ids": _CARRIED,
    "ignore_eos": _CARRIED,
    "max_tokens": Field(Fate.CARRIED, "as what is left of it after a lost attempt"),
    "min_tokens": _CARRIED,
    "logprobs": _CARRIED,
    "prompt_logprobs": _CARRIED,
    "prompt_logprob_token_ids": Field(Fate.REFUSED, _NO_LOG),
    "prompt_logprob_start": Field(Fate.REFUSED, _NO_LOG),
    "logprob_token_ids": _CARRIED,
    "flat_logprobs": Field(Fate.HERE, "how they are kept"),
    "detokenize": Field(Fate.HERE, "into text"),
    "skip_special_tokens": Field(Fate.HERE, "into text"),
    "spaces_between_special_tokens": Field(Fate.HERE, "into text"),
    "include_stop_str_in_output": Field(Fate.HERE, "into text"),
    "output_kind": Field(Fate.HERE, "how outputs are handed on"),
    "stream_interval": Field(Fate.HERE, "how outputs are handed on"),
    "skip_clone": Field(Fate.HERE, "of vLLM's own objects"),
    "output_text_buffer_length": Field(Fate.HERE, "follows from the stop strings"),
    "_eos_token_id": _CARRIED,
    "_all_stop_token_ids": _CARRIED,
    "_watermarking_skipped": Field(Fate.HERE, "of an engine that has a watermark"),
    "structured_outputs": _CARRIED,
    "logit_bias": _CARRIED,
    "allowed_token_ids": _CARRIED,
    "extra_args": Field(Fate.CARRIED, "without how KV moves"),
    "bad_words": _CARRIED,
    "_bad_words_token_ids": _CARRIED,
    "skip_reading_prefix_cache": _CARRIED,
    "thinking_token_budget": _CARRIED,
    "repetition_detection": _CARRIED,
    "routed_experts_prompt_start": Field(Fate.REFUSED, _NO_LOG),
    "trace_decode_token_ids": _CARRIED,
}
_ASKED = {"data_parallel_rank", "prompt_logprob_start"}  # of these 0 is a wish, too


def refuse_request(request: EngineCoreRequest) -> None:
    """Raises InvalidRequest that names the first field whose value asks for what the cluster cannot do."""
    for name, field in REQUEST.items():
        if field.fate is Fate.REFUSED:
            refuse(name, getattr(request, name), field)
    refuse_sampling(request.sampling_params)


def refuse_arguments(arguments: dict[str, Any]) -> None:
    """The same for fields that are arguments of the front end as yet."""
    for name, value in arguments.items():
        if (field := REQUEST.get(name)) is not None and field.fate is Fate.REFUSED:
            refuse(name, value, field)


def refuse_sampling(params: SamplingParams | None) -> None:
    """The same for sampling parameters; what has none asks for no text."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"pooling_params cannot be served: {REQUEST['pooling_params'].why}")
    for name, field in SAMPLING.items():
        if field.fate is Fate.REFUSED:
            refuse(name, getattr(params, name), field)


def refuse(name: str, value: Any, field: Field) -> None:
    """Raises InvalidRequest, unless `value` asks for nothing."""
    if value is None or (isinstance(value, int | float | list) and not value and name not in _ASKED):
        return
    given = f" ({value!r})" if isinstance(value, int | float | str) else ""
    raise InvalidRequest(f"{name}{given} cannot be served: {field.why}")


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
    held: list[TokenStep] = dataclass_field(default_factory=list)  # steps that wait for that


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


# MERGED llm.py
# vLLM's front end over a ClusterCore, and what of a client's wishes passes it.

# How KV moves is ours to say; the rest of vllm_xargs is for an operator's logits processors.
_OURS = ("kv_", "ec_")
# Arguments of `add_request` that are passed on; all others are fields of a request that are refused or hints.
PASSED = frozenset({"arrival_time", "tokenization_kwargs", "prompt_text", "reasoning_ended", "reasoning_parser_kwargs"})


class ClusterLLM(AsyncLLM):  # type: ignore[misc]  # vLLM is untyped to mypy
    """The front end. Its engine core is the cluster."""

    def __init__(self, config: VllmConfig, core: ClusterCore, grammars: Grammars) -> None:
        read_only_ends()
        _refuse_media()
        # vLLM offers no argument for the client of the engine core; this is its one seam.
        make = EngineCoreClient.make_async_mp_client
        EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: core)
        try:
            super().__init__(vllm_config=config, executor_class=None, log_stats=False, log_requests=False)
        finally:
            EngineCoreClient.make_async_mp_client = make
        self._core = core
        self._grammars = grammars
        self.input_processor.structured_outputs_config = None  # it would try them on the event loop
        core.attach(self.output_processor, config.model_config.get_vocab_size())
        _process_each(self.output_processor, core.output_failed)

    async def add_request(self, request_id: str, prompt: Any, params: SamplingParams, **how: Any) -> Any:
        """Every job comes through here. Raises VLLMValidationError, which is a 400."""
        ticket = caller.get().ticket
        try:
            safe_id = job_name(request_id)
            if safe_id is not request_id:
                _require_text(request_id)
            _require_finite(params)
            try:
                refuse_arguments(how)
                refuse_sampling(params)
            except InvalidRequest as error:
                raise VLLMValidationError(error.message) from None
            params = copy.copy(params)
            params.extra_args = {
                name: value for name, value in (params.extra_args or {}).items() if not name.startswith(_OURS)
            } or None
            if params.structured_outputs is not None:
                params.structured_outputs = await self._grammars.check(params)
            if isinstance(prompt, dict):
                await after_prompt(prompt.get("prompt_token_ids"))
            passed = {name: value for name, value in how.items() if name in PASSED}
            queue = await super().add_request(safe_id[:NAME_CHARS], prompt, params, **passed)
        except (VLLMClientError, GracefulHTTPError) as error:
            ticket.rejection = error
            raise
        if ticket.on_submitted is not None and ticket.rejection is None and ticket.refusal is None:
            await ticket.on_submitted()
        return queue

    async def _add_request(self, request: EngineCoreRequest, *how: Any) -> None:
        """Register a request and submit it. Where that fails or is cancelled vLLM (0.32) keeps the registration."""
        try:
            await super()._add_request(request, *how)
        except BaseException:
            self._core.forget(request.request_id)
            raise

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """The client is gone. vLLM itself tells its engine core the same of one whose answer hit a stop string."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._core.cancel(self.output_processor.abort_requests(ids, internal))

    async def notify_kv_transfer_request_rejected(self, *_: Any, **__: Any) -> None:
        """Nothing is held for a request before it is a job; vLLM would submit one to free it."""


def _refuse_media() -> None:
    """Have vLLM's chat parser, which all APIs share, refuse what is no text before it is fetched (0.32).

    The engines get tokens alone: an answer would be about a picture that the model never saw.
    """

    def refuse(_: BaseMultiModalItemTracker, modality: str) -> None:
        raise VLLMValidationError(f"{modality}: {MEDIA}", parameter=modality)

    BaseMultiModalItemTracker._validate_add = refuse


def _process_each(processor: OutputProcessor, failed: Callable[[str, Exception], None]) -> None:
    """Have vLLM's output processor end the request whose output raises, and that request alone.

    vLLM takes the outputs of all requests in one loop, in one task: what one of them raises ends the task, and with it
    the front end (0.32: AsyncLLM's `output_handler`). Should that task die all the same, this process can answer
    nothing any more, and ends.
    """
    process = processor.process_outputs

    def process_each(outputs: list[Any], *timestamp_and_stats: Any, **more: Any) -> OutputProcessorOutput:
        ended: list[str] = []
        for output in outputs:
            try:
                ended += process([output], *timestamp_and_stats, **more).reqs_to_abort
            except Exception as error:
                failed(output.request_id, error)
        return OutputProcessorOutput(request_outputs=[], reqs_to_abort=ended)

    processor.process_outputs = process_each
    processor.propagate_error = _end_process


def _end_process(error: BaseException) -> None:
    """At once: open streams break off, and the launcher starts another. Answers would be errors, one and all."""
    log.critical("vLLM's output handler died; the process ends", exc_info=error)
    os._exit(os.EX_SOFTWARE)


def _require_text(request_id: str) -> None:
    try:
        request_id.encode()
    except UnicodeEncodeError:
        raise VLLMValidationError(
            f"request_id must be text, got {request_id[:100]!r}: half of a surrogate pair is none",
            parameter="request_id",
        ) from None


def _require_finite(params: SamplingParams) -> None:
    """JSON as Python reads it knows NaN and Infinity, and vLLM's comparisons let NaN pass."""
    for name in params.__struct_fields__:
        value = getattr(params, name)
        numbers = value.values() if isinstance(value, dict) else (value,)
        for number in numbers:
            if isinstance(number, float) and not math.isfinite(number):
                raise VLLMValidationError(f"{name} must be a finite number, got {number}", parameter=name, value=number)
