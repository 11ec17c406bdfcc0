"""Plain streams say what vLLM's generators say of the same tokens: every field, on every path there is for them."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import Busy, EngineFailed
from shared.wire.messages import TokenStep
from tests.gateway.api import Api
from tests.gateway.scripted import ABORT, Act, Front, Script, Seen, text_of

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
USAGES: list[dict[str, bool] | None] = [
    None,
    {"include_usage": False},
    {"include_usage": True},
    {"include_usage": True, "continuous_usage_stats": True},
]
_ids = itertools.count()


@pytest.fixture
def front(api: Api) -> Iterator[Front]:
    script = Script()
    with api.running_jobs(script):
        yield Front(api, script)


def body_of(kind: str, **more: Any) -> dict[str, Any]:
    chat, prompt = [{"role": "user", "content": "Hello"}], [400, 401, 402]
    said: dict[str, Any] = {"messages": chat} if kind == "chat" else {"prompt": prompt}
    return {"model": "demo", "stream": True, "max_tokens": 200, "request_id": f"r{next(_ids)}", **said, **more}


async def both(front: Front, body: dict[str, Any], groups: list[list[Act]], *, direct: bool) -> tuple[Seen, Seen]:
    """What vLLM's generator says, and what ours does."""
    with front.vllms():
        theirs = await front.seen(body, groups)
        assert not front.plain
    ours = await front.seen(body, groups, direct=direct)
    assert front.plain
    return theirs, ours


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[int], list[list[Act]]]:
    """Tokens of any kind, pieces of characters among them, in steps and groups of steps of any size, and an end."""
    common = st.integers(300, 340)
    tokens = draw(st.lists(st.one_of(common, st.integers(0, 1023)), max_size=30))
    acts: list[Act] = []
    left = list(tokens)
    while left:
        size = draw(st.integers(1, 4))
        acts.append(TokenStep(left[:size]))
        left = left[size:]
    acts.append(draw(st.sampled_from(ENDS)))
    sizes = draw(st.lists(st.integers(1, 4), min_size=len(acts), max_size=len(acts)))
    groups: list[list[Act]] = []
    while acts:
        size = sizes.pop()
        groups.append(acts[:size])
        acts = acts[size:]
    if not isinstance(groups[-1][-1], TokenStep):  # at a moment of its own: vLLM's drops what came with it
        *steps, end = groups.pop()
        groups += [steps, [end]]
    return tokens, groups


ENDS: list[Act] = [
    TokenStep([310], "length"),
    TokenStep([310, 311], "stop"),
    TokenStep([], "stop"),
    TokenStep([312], "stop", 312),
    TokenStep([305, 305], "repetition"),
    TokenStep([], "length"),
    EngineFailed("the engine \u2026 failed"),
    Busy("too much to do"),
    RuntimeError("a bug"),
    ABORT,
]


@pytest.mark.parametrize("kind", ["chat", "completions"])
@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data(), answer=answers())
async def test_both_say_the_same(front: Front, kind: str, data: st.DataObject, answer: Any) -> None:
    tokens, groups = answer
    text = front.tokenizer.decode(tokens)
    cuts = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6))
    stops = [text[at : at + size] for at, size in data.draw(st.lists(cuts, max_size=2))] if text else []
    body = body_of(
        kind,
        stream_options=data.draw(st.sampled_from(USAGES)),
        stop=[stop for stop in stops if stop],
        include_stop_str_in_output=data.draw(st.booleans()),
        skip_special_tokens=data.draw(st.booleans()),
        spaces_between_special_tokens=data.draw(st.booleans()),
        min_tokens=data.draw(st.sampled_from([0, 0, 3])),
    )
    theirs, ours = await both(front, body, groups, direct=data.draw(st.booleans()))
    if ours.finish_reason == "stop" and theirs.finish_reason in ("length", "repetition"):
        # The engine's last step completes a stop string. vLLM finds it when that step has ended the job already: its
        # client reads "stop" all the same, and only the job's record differs.
        theirs = replace(theirs, finish_reason="stop")
    assert ours == theirs


def one_by_one(tokens: list[int], finish: str = "length") -> list[list[Act]]:
    return [[TokenStep([token], finish if at == len(tokens) - 1 else "")] for at, token in enumerate(tokens)]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("kind", ["chat", "completions"])
async def test_what_an_answer_is_made_of(front: Front, kind: str, usage: Any, direct: bool) -> None:
    """The same, and not because nothing was compared: text over the seams of characters, reasons, counts."""
    tokens = front.tokenizer.encode("Grüße, 世界! \U0001f600 done", add_special_tokens=False)
    theirs, ours = await both(front, body_of(kind, stream_options=usage), one_by_one(tokens), direct=direct)
    assert ours == theirs
    assert text_of(ours.events) == "Grüße, 世界! \U0001f600 done"
    assert ours.events[-1] == "[DONE]"
    answer = [event for event in ours.events[:-1] if event["choices"]]
    assert len(answer) == len(tokens) + (kind == "chat")
    assert answer[-1]["choices"][0]["finish_reason"] == "length"
    ending = ours.events[-2]
    assert ending["system_fingerprint"]
    if usage and usage["include_usage"]:
        assert ending["usage"]["completion_tokens"] == len(tokens)
        assert all(("usage" in event) == bool(usage.get("continuous_usage_stats")) for event in answer)


@pytest.mark.parametrize("kind", ["chat", "completions"])
async def test_a_stop_string_over_the_seam_of_steps_that_come_at_once(front: Front, kind: str) -> None:
    tokens = front.tokenizer.encode("one two three four five six", add_special_tokens=False)
    groups: list[list[Act]] = [[TokenStep([token]) for token in tokens]]
    theirs, ours = await both(front, body_of(kind, stop=["o thr"]), groups, direct=True)
    assert ours == theirs
    assert text_of(ours.events) == "one tw"
    assert (ours.finish_reason, ours.events[-2]["choices"][0]["stop_reason"]) == ("stop", "o thr")


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"logprobs": 1},
        {"echo": True},
        {"return_token_ids": True},
        {"stream_interval": 3},
        {"prompt": [[400, 401], [402]]},
    ],
)
async def test_other_completions_take_vllms_path(front: Front, more: dict[str, Any]) -> None:
    assert await front.writer(**body_of("completions") | more) == "completion_stream_generator"


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"logprobs": True},
        {"echo": True, "add_generation_prompt": False},
        {"return_token_ids": True},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "none"},
    ],
)
async def test_other_chats_take_vllms_path(front: Front, more: dict[str, Any]) -> None:
    assert await front.writer(**body_of("chat") | more) == "chat_completion_stream_generator"


async def test_what_a_slow_reader_does_not_take_becomes_one_event(front: Front) -> None:
    tokens = front.tokenizer.encode("one two three four five six seven", add_special_tokens=False)
    steps = one_by_one(tokens)
    slow: list[list[Act]] = [*steps[:-1], [lambda: front.body.make_room()], steps[-1]]
    seen = await front.seen(body_of("completions"), slow, direct=True, full_after=2)
    assert text_of(seen.events) == "one two three four five six seven"
    assert len(seen.events) == 1 + 2 + 1 + 1 + 1  # the response's own, two, all that waited, the end, [DONE]


async def test_what_waits_at_the_end_goes_out_with_it(front: Front) -> None:
    tokens = front.tokenizer.encode("one two three four five six seven", add_special_tokens=False)
    seen = await front.seen(body_of("completions"), one_by_one(tokens), direct=True, full_after=2)
    assert text_of(seen.events) == "one two three four five six seven"
    assert len(seen.events) == 1 + 2 + 1 + 1


async def test_requests_of_keys_with_unlike_salts_share_no_prefix(front: Front) -> None:
    salts = []
    for of_key, of_request in (("", None), ("a", None), ("b", None), ("a", "own"), ("", "own"), ("a", None)):
        front.cache_salt = of_key
        more = {"cache_salt": of_request} if of_request else {}
        await front.seen(body_of("chat", **more), [[TokenStep([300], "length")]])
        salts.append(front.script.jobs[0].spec.generation.cache_salt)
    assert salts[0] == ""
    assert salts[4] == "own"
    assert salts[1] == salts[5]
    assert len(set(salts)) == 5
    assert not any(salt in ("a", "b") for salt in salts), "workers see no key's salt"
