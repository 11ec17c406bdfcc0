"""Our requests as vLLM's engine core takes them, and what it answers."""

import time
from typing import Any

import msgspec
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from services.worker.engines.base import EngineRequest
from services.worker.engines.logprobs import encode_logprobs, encode_prompt_logprobs
from services.worker.engines.vllm_forced import FORCED
from shared.wire.messages import Reused, TokenStep


class CoreRequests:
    """Makes them for one engine, by its VllmConfig."""

    def __init__(self, config: Any) -> None:
        self._model = config.model_config
        self._parses_reasoning = bool(config.structured_outputs_config.reasoning_parser)
        self._limits_reasoning = config.reasoning_config is not None and config.reasoning_config.enabled
        self._sampling = msgspec.msgpack.Decoder(SamplingParams)

    def make(self, request: EngineRequest) -> EngineCoreRequest:
        """Raises ValueError, TypeError, VLLMValidationError or MsgspecError for what no engine can compute."""
        params = self._sampling.decode(request.generation.sampling)
        self._check(request, params)
        params.max_tokens = 1 if request.first_token_only else request.max_tokens
        if request.first_token_only:
            params.min_tokens = 0
        if not request.wants_token:
            params.structured_outputs = None
        extra = dict(params.extra_args or {})
        for ours in ("kv_transfer_params", FORCED):  # only we may set them
            extra.pop(ours, None)
        if request.forced_tokens:
            extra[FORCED] = request.forced_tokens
        if request.export_to:
            extra["kv_transfer_params"] = {
                "export": {"transfer_id": request.export_to, "codec": request.export_codec.value}
            }
        elif request.import_from is not None:
            extra["kv_transfer_params"] = {"import": msgspec.to_builtins(request.import_from)}
        params.extra_args = extra or None
        return EngineCoreRequest(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=request.generation.arrived_s or time.time(),
            lora_request=None,
            cache_salt=request.generation.cache_salt or None,
            data_parallel_rank=None,
            reasoning_ended=request.generation.reasoning_ended,
            reasoning_parser_kwargs=_reasoning_arguments(request),
        )

    def _check(self, request: EngineRequest, params: SamplingParams) -> None:
        """What vLLM's front end checks and its engine takes for granted: such a request would end the step, and with
        it the engine. Grammars are left to the engine, which compiles them beside its steps.
        """
        prompt, model = request.prompt_token_ids, self._model
        if not 0 < len(prompt) < model.max_model_len:
            raise ValueError(f"a prompt of {len(prompt)} tokens; it must have 1 to {model.max_model_len - 1}")
        if not 0 <= min(prompt) <= max(prompt) < model.get_vocab_size():
            raise ValueError(f"token ids are 0 to {model.get_vocab_size() - 1}")
        forced = request.forced_tokens
        if forced and not 0 <= min(forced) <= max(forced) < model.get_vocab_size():
            raise ValueError(f"forced token ids must be 0 to {model.get_vocab_size() - 1}")
        params.verify(model, None, None, None)
        generation = request.generation
        if generation.reasoning and generation.reasoning_ended is not True and not self._parses_reasoning:
            raise ValueError(
                "structured output after reasoning: this instance has no reasoning parser and would begin the output "
                "at once: set engine_args: {reasoning_parser: ...} to the gateway's"
            )
        if params.thinking_token_budget is not None and not self._limits_reasoning:
            raise ValueError(
                f"thinking_token_budget {params.thinking_token_budget}: this instance has no reasoning parser: set "
                "engine_args: {reasoning_parser: ...}, or leave the budget out"
            )


def _reasoning_arguments(request: EngineRequest) -> dict[str, Any] | None:
    packed = request.generation.reasoning
    return msgspec.msgpack.decode(packed, type=dict[str, Any]) if packed else None


def token_step(output: Any) -> TokenStep:
    """An EngineCoreOutput."""
    return TokenStep(
        tokens=list(output.new_token_ids),
        finish_reason="" if output.finish_reason is None else str(output.finish_reason),
        stop_reason=output.stop_reason,
        logprobs=encode_logprobs(output.new_logprobs),
        prompt_logprobs=encode_prompt_logprobs(output.new_prompt_logprobs_tensors),
        reused=_reused(output.prefill_stats),
    )


def _reused(stats: Any) -> Reused | None:
    """Of PrefillStats, which vLLM gives with a request's first output."""
    if stats is None:
        return None
    return Reused(stats.num_cached_tokens, stats.num_cache_creation_tokens, stats.num_external_cached_tokens)
