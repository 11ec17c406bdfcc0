"""vLLM's front end over a ClusterCore, and what of a client's wishes passes it."""

import copy
import math
import re
from collections.abc import Iterable
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient

from gateway.core import ClusterCore
from gateway.detokenising import read_only_ends
from gateway.grammars import Grammars
from gateway.turns import after_prompt

# How KV moves is ours to say; the rest of vllm_xargs is for an operator's logits processors.
_OURS = ("kv_", "ec_")
# Not passed on: which rank of an engine, ahead of whom, with which adapter, session or hints.
_PASSED = frozenset(
    {"arrival_time", "tokenization_kwargs", "prompt_text", "reasoning_ended", "reasoning_parser_kwargs"}
)
_REQUEST_ID = re.compile(r"[\w.:=+@-]{1,128}", re.ASCII)


class ClusterLLM(AsyncLLM):  # type: ignore[misc]  # vLLM is untyped to mypy
    """The front end. Its engine core is the cluster."""

    def __init__(self, config: VllmConfig, core: ClusterCore, grammars: Grammars) -> None:
        read_only_ends()
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
        core.attach(self.output_processor)

    async def add_request(self, request_id: str, prompt: Any, params: SamplingParams, **how: Any) -> Any:
        """Every job comes through here. Raises VLLMValidationError, which is a 400."""
        if not _REQUEST_ID.fullmatch(request_id):
            raise VLLMValidationError(
                "a request id has up to 100 letters, digits, or any of _.:=+@-", parameter="request_id"
            )
        _require_finite(params)
        params = copy.copy(params)
        params.extra_args = {
            name: value for name, value in (params.extra_args or {}).items() if not name.startswith(_OURS)
        } or None
        if params.structured_outputs is not None:
            params.structured_outputs = await self._grammars.check(params)
        if isinstance(prompt, dict):
            await after_prompt(prompt.get("prompt_token_ids"))
        passed = {name: value for name, value in how.items() if name in _PASSED}
        return await super().add_request(request_id, prompt, params, **passed)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """The client is gone. vLLM itself tells its engine core the same of one whose answer hit a stop string."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._core.cancel(self.output_processor.abort_requests(ids, internal))

    async def notify_kv_transfer_request_rejected(self, *_: Any, **__: Any) -> None:
        """Nothing is held for a request before it is a job; vLLM would submit one to free it."""


def _require_finite(params: SamplingParams) -> None:
    """JSON as Python reads it knows NaN and Infinity, and vLLM's comparisons let NaN pass."""
    for name in params.__struct_fields__:
        value = getattr(params, name)
        numbers = value.values() if isinstance(value, dict) else (value,)
        for number in numbers:
            if isinstance(number, float) and not math.isfinite(number):
                raise VLLMValidationError(f"{name} must be a finite number, got {number}", parameter=name, value=number)
