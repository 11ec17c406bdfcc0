"""A real engine that runs answers again whose beginnings are known, with logits that are not those of the first run."""

from typing import Any

import torch
from vllm import SamplingParams

from services.worker.engines.vllm_patches import ForcedTokens
from tests.services.worker.engines.engine_run import Run, guided
from tests.services.worker.engines.own_engine import started

PROMPT = [5 + at % 900 for at in range(70)]
TOKENS, KNOWN = 32, 13


class Shaken:
    """Disturbs logits: of all rows while `on`, else of the rows whose next token is known."""

    def __init__(self) -> None:
        self.on = False
        self.rows = 0
        self._random = torch.Generator().manual_seed(1)
        self._apply = ForcedTokens.apply
        ForcedTokens.apply = lambda forced, logits: self.apply(forced, logits)  # type: ignore[method-assign]

    def apply(self, forced: Any, logits: Any) -> Any:
        known = [row for row, (tokens, out) in forced._rows.items() if len(out) < len(tokens)]
        for row in range(len(logits)) if self.on else known:
            logits[row] += 5.0 * torch.randn(logits.shape[1], generator=self._random)
            self.rows += 1
        return self._apply(forced, logits)


def kinds() -> dict[str, SamplingParams]:
    """What cannot be carried, each for another part of the sampler's state."""
    drawn = {"temperature": 1.0, "top_p": 0.95, "seed": 7, "ignore_eos": True}
    regex = guided(regex=r"([a-z]+,[0-9]+;){20,40}")
    regex.temperature, regex.seed = 1.0, 11
    return {
        "seed": SamplingParams(**drawn),
        "penalties": SamplingParams(
            temperature=0, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.5
        ),
        "seed and penalties": SamplingParams(**drawn, frequency_penalty=1.0, min_p=0.001, logprobs=2),
        "least": SamplingParams(
            temperature=1.0, seed=3, min_tokens=20, max_tokens=TOKENS, stop_token_ids=list(range(0, 4096, 2))
        ),
        "grammar": regex,
    }


async def again(run: Run, shaken: Shaken, name: str, sampling: SamplingParams) -> dict[str, Any]:
    """The first run; another one whose logits are disturbed; and one that is made to repeat the first one's tokens."""
    run.submit(f"{name} first", PROMPT, TOKENS, sampling, salt=f"{name} 1")
    ends = [await run.end(f"{name} first")]
    first = run.tokens[f"{name} first"]
    shaken.on = True
    run.submit(f"{name} free", PROMPT, TOKENS, sampling, salt=f"{name} 2")
    await run.end(f"{name} free")
    shaken.on, shaken.rows = False, 0
    run.submit(f"{name} forced", PROMPT, TOKENS, sampling, salt=f"{name} 3", forced_tokens=first[:KNOWN])
    ends.append(await run.end(f"{name} forced"))
    return {
        "first": first,
        "free": run.tokens[f"{name} free"],
        "forced": run.tokens[f"{name} forced"],
        "ends": [end.finish_reason for end in ends],
        "shaken": shaken.rows,
    }


async def together(run: Run, name: str, sampling: SamplingParams, first: list[int]) -> list[list[int]]:
    """Runs of several lengths beside each other, the prompt of each in several steps."""
    run.engine.set_chunk_size(48)
    names = {f"{name} {count}": count for count in (1, 5, KNOWN, TOKENS - 1)}
    for one, count in names.items():
        run.submit(one, PROMPT, TOKENS, sampling, salt=one, forced_tokens=first[:count])
    for one in names:
        await run.end(one)
    run.engine.set_chunk_size(4096)
    return [run.tokens[one] for one in names]


async def found(port: int, overlapping: bool) -> dict[str, Any]:
    """Each kind of request, with asynchronous scheduling or without."""
    async with started(port, 1 << 20, {}, kv_cache_bytes=64 << 20, async_scheduling=overlapping) as here:
        run, shaken, wanted = Run(here.engine), Shaken(), kinds()
        answers: dict[str, Any] = {name: await again(run, shaken, name, params) for name, params in wanted.items()}
        first = answers["seed and penalties"]["first"]
        run.submit("no token", PROMPT, TOKENS, wanted["seed"], forced_tokens=[10**6])
        return {
            "answers": answers,
            "together": await together(run, "together", wanted["seed and penalties"], first),
            "refused": (await run.end("no token")).stop_reason,
        }
