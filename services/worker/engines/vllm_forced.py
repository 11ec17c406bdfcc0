"""Has vLLM produce known tokens first: the second run of an answer of which a client has the beginning.

Each step of such a run goes its usual way, through grammar, penalties and the request's own generator, and only the
choice is made for it: all other tokens get probability 0. So the sampler's whole state after the last known token is
that of an engine that drew these tokens itself, also where its own logits would have led elsewhere.

vLLM 0.32 has an interface of its own for each of its two model runners. Both call the processors of `logits_processors`
before temperature, top-k and top-p; neither takes any beside speculative decoding.
"""

from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2

from shared.runtime.logs import get_log

log = get_log(__name__)
FORCED = "polyphase_forced_tokens"  # of a request's `extra_args`


class ForcedTokens(LogitsProcessor):  # type: ignore[misc]  # vLLM is untyped here
    """For the model runner that CPUs have. It looks at the number of a request's output tokens, not at the tokens."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[list[int], list[int]]] = {}  # forced tokens, and vLLM's list of the output so far

    def is_argmax_invariant(self) -> bool:
        """Greedy requests are forced, too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of the batch."""
        process_dict_updates(self._rows, batch_update, _begun)

    def apply(self, logits: Any) -> Any:
        """Leave the next known token alone."""
        wanted = {row: forced[len(out)] for row, (forced, out) in self._rows.items() if len(out) < len(forced)}
        return _leave(logits, wanted)


class ForcedTokensV2(LogitsProcessorV2):  # type: ignore[misc]  # vLLM is untyped here
    """For the model runner that GPUs have by default."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._prompt_len = req_states.prompt_len
        self._slots: dict[int, list[int]] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Whether it has known tokens; the slot's last request is forgotten."""
        forced = forced_tokens(sampling_params)
        self._slots.pop(req_idx, None)
        if forced:
            self._slots[req_idx] = forced
        return bool(forced)

    def apply(self, logits: Any, ctx: Any) -> Any:
        """Leave the next known token alone. A row is a request: nothing is speculated."""
        if not self._slots:
            return logits
        wanted = {}
        for row, slot in enumerate(ctx.idx_mapping_np.tolist()):
            forced = self._slots.get(slot)
            if forced is not None:
                at = int(ctx.seq_lens_upper_bound_np[row]) - int(self._prompt_len.np[slot])
                if 0 <= at < len(forced):  # below 0 the prompt goes on in the next step
                    wanted[row] = forced[at]
        return _leave(logits, wanted)


def forced_tokens(params: SamplingParams) -> list[int]:
    """Of a request, as `CoreRequests` puts them there; empty for nearly all."""
    return list((params.extra_args or {}).get(FORCED, ()))


def force_known_tokens(config: VllmConfig) -> None:
    """Have the engine of this configuration obey FORCED."""
    if config.speculative_config is not None:
        log.warning("speculative decoding: an answer that cannot be carried may fail when its instance is lost")
        return
    ours = ForcedTokensV2 if config.use_v2_model_runner else ForcedTokens
    config.model_config.logits_processors = [*(config.model_config.logits_processors or ()), ours]


def _begun(params: SamplingParams, _: list[int] | None, output: list[int]) -> tuple[list[int], list[int]] | None:
    forced = forced_tokens(params)
    return (forced, output) if forced else None


def _leave(logits: Any, wanted: dict[int, int]) -> Any:
    """Of each row the token that is wanted, and no other."""
    if wanted:
        rows, tokens = list(wanted), list(wanted.values())
        logits[rows] = float("-inf")
        logits[rows, tokens] = 0.0
    return logits
