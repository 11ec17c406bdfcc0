"""What becomes of each field of vLLM's requests: it reaches the engine, is dealt with here, or is refused by name.

A request is vLLM's EngineCoreRequest with its SamplingParams (0.32). A field that a new vLLM adds has no entry here,
and a test fails until there is one: nothing that a client asks for is dropped in silence.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from shared.errors import InvalidRequest


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
