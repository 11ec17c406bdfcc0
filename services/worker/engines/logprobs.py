"""vLLM's log probabilities to the wire's rows. Works on anything with `tolist`, so it needs no vLLM import."""

from typing import Any

from shared.wire.logprobs import LogprobRows, encode_rows


def encode_logprobs(logprobs: Any) -> bytes:
    """Sampled tokens' log probabilities (vLLM's LogprobsLists), or nothing."""
    if logprobs is None:
        return b""
    return encode_rows(
        LogprobRows(
            logprobs.logprob_token_ids.tolist(), logprobs.logprobs.tolist(), logprobs.sampled_token_ranks.tolist()
        )
    )


def encode_prompt_logprobs(tensors: Any) -> bytes:
    """The prompt's log probabilities (vLLM's LogprobsTensors), or nothing."""
    if tensors is None:
        return b""
    return encode_rows(
        LogprobRows(
            tensors.logprob_token_ids.tolist(), tensors.logprobs.tolist(), tensors.selected_token_ranks.tolist()
        )
    )
