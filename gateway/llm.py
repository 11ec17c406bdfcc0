"""vLLM's front end over a ClusterCore, and what of a client's wishes passes it."""

import copy
import math
import os
from collections.abc import Callable, Iterable
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.renderers.chat_utils import BaseMultiModalItemTracker
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput

from gateway.context import caller
from gateway.core import ClusterCore
from gateway.detokenising import read_only_ends
from gateway.fields import MEDIA, refuse_arguments, refuse_sampling
from gateway.grammars import Grammars
from gateway.turns import after_prompt
from shared.domain.job import NAME_CHARS, job_name
from shared.errors import InvalidRequest
from shared.runtime.logs import get_log

log = get_log(__name__)
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
