"""vLLM's log probabilities to the wire's rows. Works on numpy's arrays and torch's tensors, without importing vLLM."""

from typing import Any

import numpy as np

from shared.wire.messages import LogprobRows, encode_rows


def encode_logprobs(logprobs: Any) -> bytes:
    """Sampled tokens' log probabilities (vLLM's LogprobsLists), or nothing."""
    if logprobs is None:
        return b""
    return _encode(logprobs.logprob_token_ids, logprobs.logprobs, logprobs.sampled_token_ranks)


def encode_prompt_logprobs(tensors: Any) -> bytes:
    """The prompt's log probabilities (vLLM's LogprobsTensors), or nothing."""
    if tensors is None:
        return b""
    return _encode(tensors.logprob_token_ids, tensors.logprobs, tensors.selected_token_ranks)


def _encode(ids: Any, values: Any, ranks: Any) -> bytes:
    packed_ids = np.asarray(ids).astype("<i4")
    packed_values, packed_ranks = np.asarray(values).astype("<f4"), np.asarray(ranks).astype("<i4")
    return encode_rows(
        LogprobRows(packed_ids.shape[1], packed_ids.tobytes(), packed_values.tobytes(), packed_ranks.tobytes())
    )
