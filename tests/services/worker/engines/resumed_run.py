"""Real engines that go on with answers which another engine, or the same one before, has begun."""

import asyncio
from typing import Any

from vllm import SamplingParams
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.structured_output.utils import choice_as_grammar

from services.worker.engines.base import CacheExport
from services.worker.engines.vllm import VllmEngine
from services.worker.engines.vllm_patches import sampling_state
from shared.wire.messages import decode_rows
from tests.services.worker.engines.engine_run import Run, greedy, guided
from tests.services.worker.engines.own_engine import started

THINKS, ENDS_THINKING = "<|assistant|>", "."
FORCED_END = " it is over."  # of thinking beyond its budget: several tokens
TOKENS = 32
AFTER = (1, 10, 12, 21)  # tokens after which answers leave: before, within and after FORCED_END, too
BUDGET = 10
HOPS = 8
BEGINS = {"thinking twice": [4, 500, 408, 336, 1004, 18, 600, 4, 502]}  # made to begin so: with thinking that ends
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 60}}, "required": ["name"]}
ENGINE: dict[str, Any] = {
    "kv_cache_bytes": 64 << 20,
    "dtype": "float32",
    "engine_args": {
        "reasoning_config": {"reasoning_start_str": THINKS, "reasoning_end_str": FORCED_END},
        "reasoning_parser": "dotted",
    },
}
Answer = dict[str, Any]


class DottedReasoning(BaseThinkingReasoningParser):  # type: ignore[misc]  # vLLM is untyped here
    """For the demo model, which does not reason: what follows THINKS counts as reasoning, up to a full stop."""

    start_token, end_token = THINKS, ENDS_THINKING


def kinds() -> dict[str, SamplingParams]:
    """Each for a part of the sampler's state, or of the request's."""
    drawn: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "logprobs": 2}
    regex = guided(regex=r"([a-z]+,[0-9]+;){20,40}")
    regex.temperature, regex.seed = 1.0, 11
    both = guided(regex=r"[a-z]+(,[0-9]+;){20,40}")
    both.temperature, both.seed, both.thinking_token_budget = 1.0, 19, BUDGET
    words = SamplingParams(**drawn, seed=5, logit_bias={400: 6.0, 401: 5.0, 18: 5.0})
    choice = choice_as_grammar([f"{'a long answer ' * 9}{word}" for word in ("yes", "no")])
    repetition = guided(grammar=choice)
    repetition.repetition_detection = RepetitionDetectionParams(max_pattern_size=13, min_pattern_size=13, min_count=2)
    words._bad_words_token_ids = [[400, 401], [18]]
    return {
        "greedy": greedy(logprobs=2, prompt_logprobs=1),
        "seed": SamplingParams(**drawn, seed=7, top_p=0.95, top_k=200, min_p=0.001),
        "penalties": greedy(repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.5, logprobs=2),
        "seed and penalties": SamplingParams(**drawn, seed=3, frequency_penalty=1.0, repetition_penalty=1.1),
        "least": SamplingParams(
            temperature=1.0, seed=3, max_tokens=TOKENS, min_tokens=23, stop_token_ids=list(range(0, 4096, 2))
        ),
        "words": words,
        "repetition": repetition,
        "json": guided(json=SCHEMA),
        "regex": regex,
        "choice": guided(grammar=choice),
        "thinking": guided(regex=r"([a-z]{1,9} ){3,30}"),
        "budget": SamplingParams(**drawn, seed=13, thinking_token_budget=BUDGET),
        "budget and regex": both,
        "thinking twice": SamplingParams(**drawn, seed=17, thinking_token_budget=BUDGET),
    }


def prompt_of(kind: str, engine: VllmEngine) -> list[int]:
    prompt = [5 + at % 900 for at in range(70)]
    if kind in ("thinking", "budget", "budget and regex"):
        prompt += engine._core.engine_core.structured_output_manager.tokenizer.encode(THINKS)
    return prompt


def reasoning_of(kind: str) -> dict[str, Any]:
    if kind in ("thinking", "budget and regex"):
        return {"reasoning_ended": False, "reasoning": b"\x80"}  # no arguments of the parser
    return {}


class Leaving:
    """Holds requests after so many tokens, and takes their state."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self._held: dict[str, tuple[int, asyncio.Future[bytes]]] = {}
        before_step = engine._scheduling.before_step

        def held_before_step() -> None:
            self._hold()
            before_step()

        engine._scheduling.before_step = held_before_step  # type: ignore[method-assign]

    async def state(self, name: str, after: int) -> bytes:
        """When all of these tokens are out. The request is aborted then."""
        future: asyncio.Future[bytes] = self._loop.create_future()
        self._held[name] = after, future
        state = await asyncio.wait_for(future, 60)
        self._engine.abort(name)
        return state

    def _hold(self) -> None:
        """On the engine's thread."""
        core = self._engine._core.engine_core
        for name, (after, future) in list(self._held.items()):
            request = core.scheduler.requests.get(name)
            if request is None:
                continue
            if request.num_output_tokens + request.num_output_placeholders >= after:
                request.next_decode_eligible_step = 1 << 60  # the scheduler leaves it out
            if request.num_output_tokens == after and not request.num_in_flight_tokens:
                del self._held[name]
                self._loop.call_soon_threadsafe(future.set_result, sampling_state(core, name))


def rows_of(run: Run, name: str) -> list[list[Any]]:
    """Ids and values of the log probabilities, by token."""
    rows: list[list[Any]] = []
    for step in run.steps[name]:
        if step.logprobs:
            found = decode_rows(step.logprobs)
            rows.append([found.ids, found.values])
    return rows


async def answer_of(run: Run, name: str) -> Answer:
    end = await run.end(name)
    return {
        "tokens": run.tokens[name],
        "rows": rows_of(run, name),
        "end": [end.finish_reason, end.stop_reason],
        "prompt_logprobs": any(step.prompt_logprobs for step in run.steps[name]),
    }


async def resumed(run: Run, kind: str, whole: Answer, states: dict[int, bytes], salt: str = "") -> dict[int, Answer]:
    """The rests of an answer after each of these numbers of tokens."""
    prompt, params = prompt_of(kind, run.engine), kinds()[kind]
    for after, state in states.items():
        run.submit(
            f"{kind} {salt} {after}",
            prompt,
            TOKENS,
            params,
            salt or f"{kind} {after}",
            generation=reasoning_of(kind),
            forced_tokens=whole["tokens"][:after],
            resumes=True,
            state=state,
        )
    return {after: await answer_of(run, f"{kind} {salt} {after}") for after in states}


async def begun(run: Run, leaving: Leaving, kind: str) -> dict[str, Any]:
    """A whole answer; those that leave, with their states; and their rests in the same engine, which has their KV."""
    prompt, params = prompt_of(kind, run.engine), kinds()[kind]
    more: dict[str, Any] = {"generation": reasoning_of(kind), "sampling": params}
    more["forced_tokens"] = known = BEGINS.get(kind, [])
    run.submit(f"{kind} whole", prompt, TOKENS, salt=f"{kind} whole", **more)
    whole = await answer_of(run, f"{kind} whole")
    after = [each for each in AFTER if len(known) <= each < len(whole["tokens"])]
    for each in after:
        run.submit(f"{kind} {each} first", prompt, TOKENS, salt=kind, **more)
    states = await asyncio.gather(*(leaving.state(f"{kind} {each} first", each) for each in after))
    return {
        "whole": whole,
        "firsts": {each: run.tokens[f"{kind} {each} first"] for each in after},
        "states": dict(zip(after, states, strict=True)),
        "rests": await resumed(run, kind, whole, dict(zip(after, states, strict=True)), kind),
    }


async def hopped(run: Run, kind: str) -> list[Any]:
    """An answer that leaves again and again soon after its next token, without its KV."""
    tokens: list[int] = []
    state = b""
    for hop in range(HOPS):
        name = f"{kind} hop {hop}"
        begun = {"forced_tokens": list(tokens), "resumes": bool(tokens), "state": state}
        more: dict[str, Any] = {"generation": reasoning_of(kind), **begun}
        run.submit(name, prompt_of(kind, run.engine), TOKENS, kinds()[kind], **more)
        await run.produced(name, 1)
        nowhere = CacheExport(name, 0, lambda _: None, lambda: False)
        left = await run.engine.leave(name, nowhere) if hop < HOPS - 1 else None
        if left is None:
            end = await run.end(name)
            return [tokens + run.tokens[name], [end.finish_reason, end.stop_reason]]
        tokens += run.tokens[name]
        state = left.state
    raise AssertionError("the last one does not leave")


async def found(
    port: int, overlapping: bool, given: dict[str, Any] | None = None, caching: bool = True
) -> dict[str, Any]:
    """Each kind of answer, begun here; or the rests of those that another engine has begun. caching: of prefixes."""
    ReasoningParserManager.register_module("dotted", module=DottedReasoning)  # in this process alone
    engine = {**ENGINE, "engine_args": {**ENGINE["engine_args"], "enable_prefix_caching": caching}}
    async with started(port, 1 << 20, {}, async_scheduling=overlapping, **engine) as here:
        run = Run(here.engine)
        if given is None:
            leaving = Leaving(here.engine)
            return {kind: await begun(run, leaving, kind) for kind in kinds()}
        rests: dict[str, Any] = {
            kind: await resumed(run, kind, answer["whole"], answer["states"]) for kind, answer in given.items()
        }
        return {"rests": rests, **await _others(run, given)}


async def _others(run: Run, given: dict[str, Any]) -> dict[str, Any]:
    """Answers whose state is lost; and how many decodes the rest of an answer takes."""
    lost = {
        kind: await resumed(run, kind, given[kind]["whole"], dict.fromkeys(given[kind]["states"], b""), "lost")
        for kind in ("seed", "budget", "thinking twice")
    }
    decodes = []
    for kind, state in (("greedy", None), ("budget", None), ("budget", b"")):
        before, answer = await _decodes(run), given[kind]
        known = {AFTER[-1]: answer["states"][AFTER[-1]] if state is None else state}
        await resumed(run, kind, answer["whole"], known, f"counted {state is None}")
        decodes.append(await _decodes(run) - before)
    hopping = {kind: await hopped(run, kind) for kind in ("seed", "penalties", "least", "json", "budget and regex")}
    return {"lost": lost, "decodes": decodes, "hopping": hopping}


async def _decodes(run: Run) -> int:
    async with asyncio.timeout(20):
        while run.engine.step_s:  # the last step is recorded after its tokens were sent
            await asyncio.sleep(0.01)
    return run.engine.steps.decodes
