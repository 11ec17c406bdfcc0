"""A real engine with or without speculative decoding: answers, answers whose beginnings are known, and its counters."""

import asyncio
from typing import Any

from vllm import SamplingParams

from tests.services.worker.engines.engine_run import Run, greedy, guided
from tests.services.worker.engines.own_engine import started

PHRASE = [400, 731, 902, 18, 655, 1200]
THINKS, ENDS_THINKING = "<|assistant|>", "."  # of a model that does not reason: what counts as reasoning here
TOKENS, DRAFTED = 40, 3
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTED, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
OWN = ("grammar", "least")  # accepts no others, and would end with others
KNOWN = [*PHRASE, *PHRASE, 77]  # what no engine would say, with beginnings that n-grams know


def kinds() -> dict[str, SamplingParams]:
    """Each for a part of the sampler's state."""
    return {
        "plain": greedy(),
        "penalties": greedy(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, logprobs=2),
        "grammar": guided(regex=r"([a-z]{1,9} ){3,30}"),
        "budget": greedy(thinking_token_budget=15),
        "least": greedy(min_tokens=30, stop_token_ids=list(range(0, 4096, 2)), max_tokens=TOKENS),
    }


async def found(port: int, speculates: bool) -> dict[str, Any]:
    arguments = {"reasoning_config": {"reasoning_start_str": THINKS, "reasoning_end_str": ENDS_THINKING}}
    arguments |= {"speculative_config": NGRAM} if speculates else {}
    async with started(port, 1 << 20, {}, kv_cache_bytes=64 << 20, engine_args=arguments) as here:
        run, answers = Run(here.engine), dict[str, Any]()
        assistant = here.engine._core.engine_core.structured_output_manager.tokenizer.encode(THINKS)
        prompt = [*PHRASE * 8, *assistant]
        for name, params in kinds().items():
            run.submit(name, prompt, TOKENS, params, salt=name)
            ends = [await run.end(name)]
            known = run.tokens[name][:13] if name in OWN else KNOWN
            run.submit(f"{name} known", prompt, TOKENS, params, salt=f"{name} 2", forced_tokens=known)
            ends.append(await run.end(f"{name} known"))
            tokens = run.tokens[name], run.tokens[f"{name} known"]
            answers[name] = [*tokens, [end.finish_reason for end in ends]]
        async with asyncio.timeout(20):
            while here.engine.step_s:  # the last step is recorded after its tokens were sent
                await asyncio.sleep(0.01)
        steps = here.engine.steps
        page, decodes = steps.page("e", 1, 0, 1 << 20), steps.decodes
        drafts = [steps.drafts, steps.drafted_tokens, steps.accepted_tokens]
        for name, params in kinds().items():
            known = answers[name][1][: len(KNOWN)]
            resumed = f"{name} resumed"
            run.submit(resumed, prompt, TOKENS, params, salt=resumed, forced_tokens=known, resumes=True)
            end = await run.end(resumed)
            answers[name] += [known + run.tokens[resumed], end.finish_reason]
        run.submit("refused", prompt, TOKENS, greedy(logit_bias={5: 1.0}))
        refused = await run.end("refused")
        return {
            "answers": answers,
            "refused": [refused.finish_reason, str(refused.stop_reason)],
            "drafts": drafts,
            "decodes": decodes,
            "chunks": [chunk for step in page.steps for chunk in step.prefill],
            "prompt": len(prompt),
        }
