"""The cluster in place of vLLM's engine: requests of vLLM's front end become jobs of the pipeline.

`ClusterLLM` is vLLM's front end, `ClusterCore` stands in for its engine core. vLLM keeps validation, templates,
parsers, n > 1, detokenisation, stop strings, usage and streaming; the core receives tokens with sampling parameters
and returns tokens. A table states for each field of vLLM's requests whether it reaches the engine, is handled here, or
is refused.
"""

import asyncio
import copy
import math
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
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from gateway import vllm_patches
from gateway.admission import QueuedJob, RequestState, current_request
from gateway.job import Gaps, Job, JobSpec
from gateway.media import NO_MEDIA, EncodedMedia, Media, encoded
from gateway.plain_stream import Pace, PlainStream, StreamPass
from gateway.settings import GatewaySettings
from gateway.structured_outputs import Grammars
from shared.domain.adapters import is_version
from shared.domain.job import NAME_CHARS, Generation, Phase, WhenFull, job_name
from shared.errors import InvalidRequest, Overloaded, PolyphaseError
from shared.runtime.logs import get_log, in_logs
from shared.wire.messages import TokenStep, decode_rows

log = get_log(__name__)
LOGPROBS_AT_ONCE = 1024  # values that vLLM makes into objects in one turn of the event loop: some 6 ms
_LONG_PROMPT = 16 << 10  # tokens; each pass over a longer prompt gets a turn of the event loop of its own
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "repetition": FinishReason.REPETITION}
_PIN_SEED = 0x5EED
# Parameters of KV transfers are the cluster's; the rest of vllm_xargs is for an operator's logits processors.
_CLUSTER_ARGS = ("kv_", "ec_")
# Arguments of `add_request` that are passed on; all others are fields of a request that are refused or hints.
PASSED = frozenset(
    {"arrival_time", "lora_request", "prompt_text", "reasoning_ended", "reasoning_parser_kwargs", "tokenization_kwargs"}
)


class Fate(StrEnum):
    """What becomes of a field of vLLM's requests."""

    CARRIED = "carried"  # its value reaches the engine
    HERE = "here"  # the front end applies it, or made it
    HINT = "hint"  # changes no answer, and has no effect
    REFUSED = "refused"  # any value but an empty one is a 400


@dataclass(frozen=True, slots=True)
class Field:
    """why: for a refused field, the sentence for the client; else what happens to the field."""

    fate: Fate
    why: str = ""


_CARRIED = Field(Fate.CARRIED)
_EMBEDDINGS = "embeddings of a prompt are not served: send its text"
_NO_LOG = "this cluster does not return it: leave it out"

# A request is vLLM's EngineCoreRequest with its SamplingParams (0.32). A test fails for a field without an entry, so
# that a field of a new vLLM is not dropped in silence.
REQUEST: dict[str, Field] = {
    "request_id": _CARRIED,
    "prompt_token_ids": _CARRIED,
    "mm_features": Field(
        Fate.CARRIED, "as media items and their processed data; `gateway.media` says which are served"
    ),
    "sampling_params": _CARRIED,
    "pooling_params": Field(Fate.REFUSED, "this cluster generates text: it has no embeddings, scores or classes"),
    "arrival_time": Field(Fate.CARRIED, "as the time at which all of the body had arrived"),
    "lora_request": Field(Fate.CARRIED, "as the adapter's key"),
    "cache_salt": _CARRIED,
    "data_parallel_rank": Field(
        Fate.REFUSED, "the scheduler chooses the engine: leave out the header X-Data-Parallel-Rank"
    ),
    "prompt_embeds": Field(Fate.REFUSED, _EMBEDDINGS),
    "prompt_is_token_ids": Field(Fate.REFUSED, _EMBEDDINGS),
    "client_index": Field(Fate.HERE, "names one of several front ends of an engine"),
    "current_wave": Field(Fate.HERE, "for data-parallel engines, which are separate instances here"),
    "priority": Field(Fate.REFUSED, "requests are ordered by their SLO class: name one in the header X-Polyphase-SLO"),
    "trace_headers": Field(Fate.HERE, "`gateway.tracing` reads the request's own headers"),
    "resumable": Field(Fate.REFUSED, "the prompt of a request must be complete: send it in one piece"),
    "external_req_id": Field(Fate.HERE, "the client's name for the request"),
    "reasoning_ended": _CARRIED,
    "reasoning_parser_kwargs": _CARRIED,
    "abort_immediately": Field(Fate.REFUSED, "the cluster decides how KV is transferred"),
    "session_id": Field(Fate.HINT, "the edge reads it before: see `gateway.sessions`"),
    "kv_hints": Field(Fate.REFUSED, "the cluster decides how KV is transferred: leave them out"),
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
    "stop": Field(Fate.HERE, "found in the text; the job is then ended"),
    "stop_token_ids": _CARRIED,
    "ignore_eos": _CARRIED,
    "max_tokens": Field(Fate.CARRIED, "less the tokens that the client has already"),
    "min_tokens": _CARRIED,
    "logprobs": _CARRIED,
    "prompt_logprobs": _CARRIED,
    "prompt_logprob_token_ids": Field(Fate.REFUSED, _NO_LOG),
    "prompt_logprob_start": Field(Fate.REFUSED, _NO_LOG),
    "logprob_token_ids": _CARRIED,
    "flat_logprobs": Field(Fate.HERE, "the format of log probabilities"),
    "detokenize": Field(Fate.HERE, "detokenisation"),
    "skip_special_tokens": Field(Fate.HERE, "detokenisation"),
    "spaces_between_special_tokens": Field(Fate.HERE, "detokenisation"),
    "include_stop_str_in_output": Field(Fate.HERE, "detokenisation"),
    "output_kind": Field(Fate.HERE, "the grouping of outputs"),
    "stream_interval": Field(Fate.HERE, "the grouping of outputs"),
    "skip_clone": Field(Fate.HERE, "for vLLM's own objects"),
    "output_text_buffer_length": Field(Fate.HERE, "follows from the stop strings"),
    "_eos_token_id": _CARRIED,
    "_all_stop_token_ids": _CARRIED,
    "_watermarking_skipped": Field(Fate.HERE, "for engines with a watermark"),
    "structured_outputs": _CARRIED,
    "logit_bias": _CARRIED,
    "allowed_token_ids": _CARRIED,
    "extra_args": Field(Fate.CARRIED, "without the parameters of KV transfers"),
    "bad_words": _CARRIED,
    "_bad_words_token_ids": _CARRIED,
    "skip_reading_prefix_cache": _CARRIED,
    "thinking_token_budget": _CARRIED,
    "repetition_detection": _CARRIED,
    "routed_experts_prompt_start": Field(Fate.REFUSED, _NO_LOG),
    "trace_decode_token_ids": _CARRIED,
}
_ZERO_IS_A_VALUE = {"data_parallel_rank", "prompt_logprob_start"}


def refuse_request(request: EngineCoreRequest) -> None:
    """Raises InvalidRequest that names the first field with a value that the cluster cannot serve."""
    for name, field in REQUEST.items():
        if field.fate is Fate.REFUSED:
            refuse(name, getattr(request, name), field)
    refuse_sampling(request.sampling_params)


def refuse_arguments(arguments: dict[str, Any]) -> None:
    """`refuse_request` for fields that are still arguments of the front end."""
    for name, value in arguments.items():
        if (field := REQUEST.get(name)) is not None and field.fate is Fate.REFUSED:
            refuse(name, value, field)


def refuse_sampling(params: SamplingParams | None) -> None:
    """`refuse_request` for sampling parameters; a request without any does not want text."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"pooling_params cannot be served: {REQUEST['pooling_params'].why}")
    for name, field in SAMPLING.items():
        if field.fate is Fate.REFUSED:
            refuse(name, getattr(params, name), field)


def refuse(name: str, value: Any, field: Field) -> None:
    """Raises InvalidRequest, unless `value` is empty."""
    if value is None or (isinstance(value, int | float | list) and not value and name not in _ZERO_IS_A_VALUE):
        return
    given = f" ({value!r})" if isinstance(value, int | float | str) else ""
    raise InvalidRequest(f"{name}{given} cannot be served: {field.why}")


class JobRunner(Protocol):
    """Runs jobs: the pipeline, or its replacement in a measurement."""

    async def run(self, job: Job) -> None:
        """Returns when all tokens were accepted, or raises why not."""
        ...


@dataclass(slots=True, eq=False)
class _RunningJob:
    job: Job
    queued: QueuedJob
    stream: PlainStream | None = None
    task: asyncio.Task[None] | None = None
    reuse_sent: bool = False  # the output with its prefix cache hits
    scoring: asyncio.Task[None] | None = None  # makes objects of the prompt's log probabilities
    held_steps: list[TokenStep] = dataclass_field(default_factory=list)  # steps that wait for `scoring`


class ClusterLLM(AsyncLLM):  # type: ignore[misc]  # vLLM is untyped to mypy
    """vLLM's front end. Its engine core is the cluster."""

    def __init__(self, config: VllmConfig, core: "ClusterCore", grammars: Grammars, media: Media) -> None:
        """media: what the gateway can process of images and the like."""
        vllm_patches.detokenise_from_prompt_ends()
        vllm_patches.refuse_media(config.model_config, media.refusal)
        with vllm_patches.engine_core(core):
            super().__init__(vllm_config=config, executor_class=None, log_stats=False, log_requests=False)
        self._core = core
        self._grammars = grammars
        vllm_patches.defer_grammars(self.input_processor)
        vllm_patches.guard_media(self.renderer)
        vllm_patches.process_each(self.output_processor, core.output_failed)
        core.attach(self.output_processor, config.model_config.get_vocab_size())

    async def add_request(self, request_id: str, prompt: Any, params: SamplingParams, **how: Any) -> Any:
        """Add one job; all APIs come through here. Raises VLLMValidationError, which is a 400."""
        state = current_request.get()
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
            extra_args = (params.extra_args or {}).items()
            params.extra_args = {
                name: value for name, value in extra_args if not name.startswith(_CLUSTER_ARGS)
            } or None
            if params.structured_outputs is not None:
                params.structured_outputs = await self._grammars.check(params)
            if isinstance(prompt, dict):
                await _yield_if_long(prompt.get("prompt_token_ids"))
            passed = {name: value for name, value in how.items() if name in PASSED}
            queue = await super().add_request(safe_id[:NAME_CHARS], prompt, params, **passed)
        except (VLLMClientError, GracefulHTTPError) as error:
            state.rejection = error
            raise
        if state.on_submitted is not None and state.rejection is None and state.refusal is None:
            await state.on_submitted()
        return queue

    async def _add_request(self, request: EngineCoreRequest, *how: Any) -> None:
        """Register a request and submit it. Where that fails or is cancelled vLLM (0.32) keeps the registration."""
        try:
            await super()._add_request(request, *how)
        except BaseException:
            self._core.forget(request.request_id)
            raise

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """The client left. For an answer that reached a stop string vLLM calls `abort_requests_async` instead."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._core.cancel(self.output_processor.abort_requests(ids, internal))

    async def notify_kv_transfer_request_rejected(self, *_: Any, **__: Any) -> None:
        """No KV is held for a request before it is a job; vLLM would submit a request to free it."""


class ClusterCore:
    """The part of vLLM's EngineCoreClient that AsyncLLM calls."""

    engine_ranks_managed = (0,)
    resources = SimpleNamespace(engine_dead=False)

    def __init__(self, settings: GatewaySettings, pipeline: JobRunner, pace: Pace, gaps: Gaps | None = None) -> None:
        """gaps: where the gaps between tokens are counted."""
        self._settings = settings
        self._slos = {name: slo.as_slo(name) for name, slo in settings.slo.items()}
        self._gaps = gaps or Gaps()
        self._pipeline = pipeline
        self.on_refused: Callable[[str, str], None] = lambda slo, code: None  # called for jobs that find no room
        self.on_turn: Callable[[Job], None] = lambda job: None  # called for the complete answers of sessions
        self.adapter_key: Callable[[LoRARequest], str] = lambda request: request.lora_name
        self._jobs: dict[str, _RunningJob] = {}
        self._streams = StreamPass(pace)
        self._outputs: list[EngineCoreOutput] = []
        self._ready = asyncio.Event()
        self._requests: Any = None  # vLLM's output processor, in which the requests are registered
        self._vocabulary = 0

    @property
    def loaded_adapters(self) -> set[str]:
        """Keys of the adapters that were loaded at run time and that jobs have."""
        found = {running.job.spec.generation.adapter for running in self._jobs.values()}
        return {key for key in found if is_version(key)}

    def attach(self, output_processor: Any, vocabulary: int) -> None:
        """Set the front end's output processor, and the number of tokens that the model knows."""
        self._requests, self._vocabulary = output_processor, vocabulary

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_lora_async(self, request: LoRARequest) -> bool:
        """The front end adds the adapters of the settings at its start; instances load them at theirs. Those that
        operators load later do not come here (`gateway.adapters`).

        Raises InvalidRequest for any other adapter, such as one of a resolver of vLLM's.
        """
        if request.lora_name not in self._settings.lora.adapters:
            raise InvalidRequest(f"adapter {request.lora_name} is not in the cluster file: write it under `lora`")
        return True

    def dp_engines_running(self) -> bool:
        return False

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Start a job. Does not wait for room: a job that finds none fails like a job that ran."""
        await _yield_if_long(request.prompt_token_ids)
        if not self._requests.has_request(request.request_id):
            return  # one of n, of which another has failed meanwhile
        state, queued = current_request.get(), None
        try:
            spec = self._spec(request, state)
            try:
                queued = state.start_job(len(spec.prompt_token_ids))
            except PolyphaseError as error:
                self.on_refused(spec.slo.name, error.code)
                raise
            self._start(spec, queued)
        except Exception as error:  # the request is registered: an exception from here would leave it so for ever
            if queued is not None and request.request_id not in self._jobs:
                queued.leave()
            if not isinstance(error, PolyphaseError):
                log.error("a job did not start", job_id=request.request_id, exc_info=error)
                error = _internal(error)
            self._fail(request.request_id, error, state)

    async def get_output_async(self) -> EngineCoreOutputs:
        """All steps since the last call, in one batch; waits while there are none."""
        await self._ready.wait()
        self._ready.clear()
        outputs, self._outputs = self._outputs, []
        return EngineCoreOutputs(outputs=outputs)

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        """End jobs whose answer has reached a stop string."""
        for request_id in request_ids:
            try:
                self._stop(request_id)
            except Exception as error:  # called by vLLM's output handler of all requests
                self.output_failed(request_id, error)

    def cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            running = self._jobs.get(request_id)
            if running is not None and running.task is not None:
                running.task.cancel()

    def output_failed(self, request_id: str, error: Exception) -> None:
        """A step could not be made into output: end this request, and no other, with an error."""
        log.error("the output of a request failed", job_id=request_id, exc_info=error)
        running = self._jobs.get(request_id)
        self._fail(request_id, _internal(error))
        if running is not None:
            running.job.output_failed(PolyphaseError.code)
            self.cancel((request_id,))

    def forget(self, request_id: str) -> None:
        """The addition of this request, or of another of its n, has failed: nothing waits for it."""
        if (state := self._requests.request_states.get(request_id)) is not None:
            self.cancel(self._forget(state))

    def shutdown(self, timeout: float | None = None) -> None:
        self.cancel(self._jobs)

    async def close(self) -> None:
        """Cancel all jobs and wait until their calls are cancelled."""
        self.shutdown()
        await asyncio.gather(*(running.task for running in self._jobs.values() if running.task), return_exceptions=True)

    def _spec(self, request: EngineCoreRequest, state: RequestState) -> JobSpec:
        """Raises InvalidRequest for what the cluster cannot serve."""
        refuse_request(request)
        params = cast(SamplingParams, request.sampling_params)
        prompt = request.prompt_token_ids or []
        if params.prompt_logprobs is not None:
            self._charge_logprobs(params.prompt_logprobs, len(prompt), state)
        media = self._media(request.mm_features, state) if request.mm_features else NO_MEDIA
        carry = _can_carry(params)
        if not carry and params.seed is None and params.temperature > 0:
            # A lost answer can be repeated only with the same random numbers.
            params = copy.copy(params)
            params.seed = hash((request.request_id, _PIN_SEED)) & 0x7FFFFFFF
        return JobSpec(
            job_id=request.request_id,
            prompt_token_ids=prompt,
            generation=Generation(
                msgspec.msgpack.encode(params),
                state.arrived_s,
                state.salted(request.cache_salt or ""),
                *_reasoning(request),
                self.adapter_key(request.lora_request) if request.lora_request is not None else "",
                media.items,
                media.data,
            ),
            max_tokens=params.max_tokens or self._settings.max_model_len - len(prompt),
            carry=carry,
            local_only=params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None,
            slo=self._slos[state.slo],
            one_precision=state.one_precision or not self._slos[state.slo].mixed_precision,
            caller=state.caller,
            session=state.session,
        )

    def _media(self, features: list[MultiModalFeatureSpec], state: RequestState) -> EncodedMedia:
        """The same object for each of the request's n. Raises InvalidRequest and Busy for too many bytes."""
        if state.media is None or state.media[0] is not features:
            found = encoded(features, self._settings.max_media_bytes)
            state.hold(len(found.data))
            state.media = features, found
        return state.media[1]

    def _charge_logprobs(self, candidates: int, tokens: int, state: RequestState) -> None:
        """Raises InvalidRequest where the prompts of a body want more log probabilities than a body may have."""
        candidates = (candidates if candidates >= 0 else self._vocabulary) + 1  # the prompt's own token is one
        state.prompt_logprobs += tokens * candidates
        limit = self._settings.max_prompt_logprobs
        if state.prompt_logprobs > limit:
            raise InvalidRequest(
                f"prompt_logprobs of a body: {tokens} tokens with {candidates} candidates each bring it to "
                f"{state.prompt_logprobs} log probabilities, the limit is {limit}: request fewer candidates or tokens"
            )

    def _start(self, spec: JobSpec, queued: QueuedJob) -> None:
        state, job_id = queued.request, spec.job_id
        deadline_mono = time.monotonic() + self._settings.job_timeout_s
        if spec.slo.when_full is WhenFull.DELAY:
            deadline_mono += self._settings.slo[spec.slo.name].queue_s
        job = Job(spec, _discard, self._settings.gateway_id, deadline_mono, gaps=self._gaps)
        job.siblings = self._requests.request_states[job_id].parent_req
        if state.trace is not None:
            tokens, name = len(spec.prompt_token_ids), state.client_request_id
            job.trace = state.trace.open(job_id, spec.arrived_s, tokens, spec.max_tokens, spec.slo.name, name)
        stream, state.stream = state.stream, None
        if stream is not None:
            job.streamed = True
            max_delay_s = spec.slo.tpot_s * self._settings.stream_interval_share
            stream.bind(job_id, self._requests, self._stop, self.output_failed, job.delivered, max_delay_s)
        running = self._jobs[job_id] = _RunningJob(job, queued, stream)
        job.emit = partial(self._emit, running)
        running.task = asyncio.get_running_loop().create_task(self._run(running), name=f"job {job_id}")
        running.task.add_done_callback(lambda task: self._ended(job_id, task))

    async def _run(self, running: _RunningJob) -> None:
        job, state = running.job, running.queued.request
        job_id = job.spec.job_id
        if job.trace is not None:
            in_logs(job.trace.trace_id)
        try:
            await running.queued.wait_for_turn(job.left_s)  # the pipeline finds a deadline that passes here
            await self._pipeline.run(job)
            if running.scoring is not None:
                await running.scoring
        except PolyphaseError as error:
            if not isinstance(error, Overloaded):
                log.warning("job failed", job_id=job_id, code=error.code, error=error.message)
            self._fail(job_id, error, state)
        except Exception as error:  # a boundary: a client must not wait for a job that crashed
            log.error("job crashed", job_id=job_id, exc_info=error)
            self._fail(job_id, _internal(error), state)
        finally:
            if running.scoring is not None:
                running.scoring.cancel()

    def _ended(self, job_id: str, task: asyncio.Task[None]) -> None:
        running = self._jobs.pop(job_id)
        running.queued.leave()
        spec = running.job.spec
        if spec.session and running.job.finished and not spec.local_only:
            self.on_turn(running.job)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the end of a job crashed; its client may wait in vain", job_id=job_id, exc_info=error)

    def _stop(self, request_id: str) -> None:
        if running := self._jobs.get(request_id):
            running.job.stop()
            self.cancel((request_id,))

    def _fail(self, request_id: str, error: PolyphaseError, state: RequestState | None = None) -> None:
        """Give a request's handler the error; vLLM turns it into a status, or an event in a stream that has begun.

        The handler then ends the request, with all of its n jobs. Raises nothing.
        """
        vllm_error = GracefulHTTPError(error.message, HTTPStatus(error.http_status))
        if state is not None:
            if error.http_status == HTTPStatus.TOO_MANY_REQUESTS:
                state.refusal = error  # the edge answers: the front end knows no Retry-After
            elif error.http_status < HTTPStatus.INTERNAL_SERVER_ERROR:
                state.rejection = vllm_error  # the edge answers in place of a stream without events
            if (running := self._jobs.get(request_id)) is not None and running.stream is not None:
                try:
                    running.stream.advance()  # the client gets the tokens that have arrived
                except Exception as crash:
                    log.error("the rest of a stream was lost", job_id=request_id, exc_info=crash)
        registered = self._requests.request_states.get(request_id)
        if registered is None or registered.queue is None:
            return
        queue = registered.queue
        ended = self._forget(registered)
        queue.put(vllm_error)
        self.cancel(one for one in ended if one != request_id)

    def _forget(self, state: Any) -> list[str]:
        """Remove a request from the output processor, with the others of its n; the ids of all.

        Makes no last output of them: that may be what fails.
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

    def _emit(self, running: _RunningJob, step: TokenStep) -> None:
        """Pass a step on. Raises what is wrong with it, and then the job has not finished."""
        try:
            self._output(running, step)
        except Exception:
            running.job.finish_reason = ""
            raise

    def _output(self, running: _RunningJob, step: TokenStep) -> None:
        if running.scoring is not None:
            running.held_steps.append(step)
            return
        prompt_logprobs = _prompt_logprobs(step.prompt_logprobs) if step.prompt_logprobs else None
        if prompt_logprobs is not None and prompt_logprobs.logprobs.numel() > LOGPROBS_AT_ONCE:
            running.held_steps.append(msgspec.structs.replace(step, prompt_logprobs=b""))
            running.scoring = asyncio.get_running_loop().create_task(self._score(running, prompt_logprobs))
            return
        job, stream = running.job, running.stream
        if running.queued.waits and (job.phase is Phase.DECODE or step.finish_reason):
            running.queued.leave()
        reason = _REASONS[step.finish_reason] if step.finish_reason else None
        if stream is not None:
            stream.accept(step.tokens, reason, step.stop_reason)
            if not stream.queued:
                self._streams.add(stream)
            return
        prefill_stats = None
        if not running.reuse_sent:
            # `cached_tokens` as of the first token, as in vLLM: later losses and recomputations do not count.
            reused, running.reuse_sent = job.reused, True
            prefill_stats = PrefillStats(num_cached_tokens=reused.tokens, num_cache_creation_tokens=reused.created)
        self._outputs.append(
            EngineCoreOutput(
                request_id=job.spec.job_id,
                new_token_ids=step.tokens,
                new_logprobs=LogprobsLists(*_rows(step.logprobs)) if step.logprobs else None,
                new_prompt_logprobs_tensors=prompt_logprobs,
                finish_reason=reason,
                stop_reason=step.stop_reason,
                prefill_stats=prefill_stats,
            )
        )
        self._ready.set()

    async def _score(self, running: _RunningJob, logprobs: LogprobsTensors) -> None:
        """Give vLLM the log probabilities of a long prompt in slices, and then the steps that arrived meanwhile."""
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
            for step in running.held_steps:
                self._output(running, step)
        except Exception as error:
            self.output_failed(job_id, error)


def _discard(_: TokenStep) -> None:
    """Accepts no step: the job has not begun."""


async def _yield_if_long(token_ids: list[int] | None) -> None:
    """Give other tasks a turn of the event loop if a pass over these takes long."""
    if token_ids is not None and len(token_ids) > _LONG_PROMPT:
        await asyncio.sleep(0)


def _reasoning(request: EngineCoreRequest) -> tuple[bool | None, bytes]:
    """What an engine needs of a reasoning model's prompt: nothing without a grammar."""
    if request.sampling_params.structured_outputs is None:
        return None, b""
    arguments = request.reasoning_parser_kwargs
    return request.reasoning_ended, b"" if arguments is None else msgspec.msgpack.encode(arguments)


def _can_carry(params: SamplingParams) -> bool:
    """Whether later tokens depend on earlier ones only as context, so that any engine can continue from them."""
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
        or params.extra_args  # for logits processors of the operator, which may read the tokens so far
    )


def _rows(data: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids and log probabilities by position and candidate, ranks by position."""
    rows = decode_rows(data)
    ids = np.frombuffer(rows.ids, "<i4").reshape(-1, rows.candidates)
    values = np.frombuffer(rows.values, "<f4").reshape(-1, rows.candidates)
    return ids, values, np.frombuffer(rows.ranks, "<i4")


def _prompt_logprobs(data: bytes) -> LogprobsTensors:
    return LogprobsTensors(*(torch.tensor(part) for part in _rows(data)))


def _internal(error: BaseException) -> PolyphaseError:
    """An error of the gateway itself; its details are for the log, and not for the client."""
    return PolyphaseError(f"internal error: {type(error).__name__}")


def _require_text(request_id: str) -> None:
    try:
        request_id.encode()
    except UnicodeEncodeError:
        raise VLLMValidationError(
            f"request_id must be text, got {request_id[:100]!r}: half of a surrogate pair is no character",
            parameter="request_id",
        ) from None


def _require_finite(params: SamplingParams) -> None:
    """Python's JSON parser accepts NaN and Infinity, and vLLM's comparisons let NaN pass."""
    for name in params.__struct_fields__:
        value = getattr(params, name)
        numbers = value.values() if isinstance(value, dict) else (value,)
        for number in numbers:
            if isinstance(number, float) and not math.isfinite(number):
                raise VLLMValidationError(f"{name} must be a finite number, got {number}", parameter=name, value=number)
