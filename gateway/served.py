"""Which of vLLM's routes are not served, and why. Every other route that vLLM mounts is served.

This table is the only list. A test compares it with what vLLM mounts with all its options on, and with docs/api.md.
"""

import re

_SPLIT = (
    "it is one half of a front end that is split over several servers, and a gateway is the whole of one: send token "
    "ids as `prompt` to /v1/completions with `return_token_ids`, or text to /tokenize"
)
_BY_ID = "any client that knows an id could end the request of another client: close the connection instead"
_STORED = "no gateway stores responses: keep the answer of the request itself"
_SCALES = "instances join and leave the cluster by themselves: use `polyphase drain` and `polyphase flip`"
_ADAPTERS = "this cluster serves no LoRA adapters: name the model itself"
_ENGINE = "it is about an engine in the server's process, and a gateway has none: use `polyphase` for instances"
_WEIGHTS = "weights are loaded when an instance starts: restart it with the model that it should serve"

UNSERVED: dict[str, str] = {
    "/v1/chat/completions/render": _SPLIT,
    "/v1/completions/render": _SPLIT,
    "/v1/messages/render": _SPLIT,
    "/v1/responses/render": _SPLIT,
    "/v1/chat/completions/derender": _SPLIT,
    "/v1/completions/derender": _SPLIT,
    "/inference/v1/generate": _SPLIT,
    "/inference/v1/abort_requests": _BY_ID,
    "/abort_requests": _BY_ID,
    "/v1/responses/{response_id}": _STORED,
    "/v1/responses/{response_id}/cancel": _STORED,
    "/v1/systemone": (
        "it reads its text once for each question, and fetches images from addresses that clients name, and no limit "
        "of this gateway covers that: send completions with `logprobs` and `logprob_token_ids`"
    ),
    "/v1/load_lora_adapter": _ADAPTERS,
    "/v1/unload_lora_adapter": _ADAPTERS,
    "/adapters": _ADAPTERS,
    "/adapters/{adapter_name}": _ADAPTERS,
    "/scale_elastic_ep": _SCALES,
    "/is_scaling_elastic_ep": _SCALES,
    "/fault_tolerance/apply": _SCALES,
    "/fault_tolerance/status": _SCALES,
    "/kv_event_sources": "KV events come from instances, which publish them to the schedulers of the cluster alone",
    "/start_profile": _ENGINE,
    "/stop_profile": _ENGINE,
    "/reset_prefix_cache": _ENGINE,
    "/reset_mm_cache": _ENGINE,
    "/reset_encoder_cache": _ENGINE,
    "/collective_rpc": _ENGINE,
    "/server_info": _ENGINE,
    "/sleep": _ENGINE,
    "/release_kv_cache_memory": _ENGINE,
    "/wake_up": _ENGINE,
    "/is_sleeping": _ENGINE,
    "/pause": _ENGINE,
    "/resume": _ENGINE,
    "/is_paused": _ENGINE,
    "/get_world_size": _ENGINE,
    "/init_weight_transfer_engine": _WEIGHTS,
    "/shutdown_weight_transfer_engine": _WEIGHTS,
    "/start_weight_update": _WEIGHTS,
    "/start_draft_weight_update": _WEIGHTS,
    "/update_weights": _WEIGHTS,
    "/finish_weight_update": _WEIGHTS,
    "/update_weight_version": _WEIGHTS,
    "/weight_info": _WEIGHTS,
    "/weight_checker": _WEIGHTS,
}

_PATTERNS = {re.compile(re.sub(r"{\w+}", "[^/]+", path)): why for path, why in UNSERVED.items()}


def why_not(path: str) -> str:
    """Why a request for `path` is not served; empty where vLLM has no such route, or it is served."""
    return next((why for pattern, why in _PATTERNS.items() if pattern.fullmatch(path)), "")
