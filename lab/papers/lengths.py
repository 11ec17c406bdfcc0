"""The lengths of requests that the papers' workloads have, from the public tables below the data folder."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from shared.errors import NotFound
from shared.sim.traces import read_trace
from shared.sim.workload import Workload

SHAREGPT = Path("traces/token_counts/sharegpt_8k_filtered_stats_llama2_tokenizer.csv")
CODING = Path("traces/azure2023/AzureLLMInferenceTrace_code.csv")
CONVERSATION = Path("traces/azure2023/AzureLLMInferenceTrace_conv.csv")


def sharegpt(data: Path, count: int, seed: int = 0) -> Workload:
    """`count` requests like the first turns of ShareGPT, at most 2048 tokens in all; all at time 0.

    The public table counts the conversation so far as the prompt. Its prompts of up to 512 tokens have a mean of 162,
    that of ShareGPT's first turns (161, with outputs of 338: vLLM, SOSP 2023, Fig 11); outputs are longer here (414).
    """
    table = read_trace(_file(data, SHAREGPT))
    prompt, output = table.prompt_tokens, table.output_tokens
    fits = np.flatnonzero((prompt >= 4) & (prompt <= 512) & (output >= 4))
    at = np.random.default_rng(seed).choice(fits, count, replace=count > len(fits))
    return Workload("ShareGPT", np.zeros(count), prompt[at], output[at])


def azure(data: Path, which: Path, count: int, longest_tokens: int | None = None) -> Workload:
    """The first `count` requests of an Azure trace; prompts cut so that a request has at most `longest_tokens`."""
    trace = read_trace(_file(data, which)).head(count)
    if longest_tokens is None:
        return trace
    output = np.minimum(trace.output_tokens, longest_tokens // 2)
    return replace(trace, prompt_tokens=np.minimum(trace.prompt_tokens, longest_tokens - output), output_tokens=output)


def _file(data: Path, path: Path) -> Path:
    if not (data / path).is_file():
        raise NotFound(f"no {path} below {data}; give the folder that holds `traces/`")
    return data / path
