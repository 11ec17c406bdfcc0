"""Plain streams say what vLLM's generators say of the same tokens: every field, on every path there is for them."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.domain.job import Phase
from shared.errors import Busy, EngineFailed, InvalidRequest, Overloaded
from shared.wire.messages import TokenStep
from tests.gateway.api import PROMPT, Api, events, until
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


async def ask(api: Api, path: str, **body: Any) -> httpx.Response:
    return await (api.chat(**body) if path == "chat" else api.complete(**body))


def choice_text(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content") or ""


def last_token_never_comes(api: Api, last: int) -> None:
    """Unless the job is stopped its decode leg would hang."""
    for decode in api.cluster.decodes:
        decode.before_token = lambda count: asyncio.sleep(0.002) if count < last else asyncio.Event().wait()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat", "completions"])
async def test_it_is_recorded_as_completed_and_both_legs_are_free(api: Api, path: str, stream: bool) -> None:
    full = choice_text((await ask(api, path, max_tokens=40)).json()["choices"][0])
    stop = full[len(full) // 2 :][:6]
    await api.final_reports(1)
    api.renew()
    last_token_never_comes(api, 38)
    response = await ask(api, path, max_tokens=40, stop=[stop], stream=stream)
    if stream:
        choices = [choice for event in await events(response) for choice in event["choices"]]
        assert "".join(choice_text(choice) for choice in choices) == full[: full.index(stop)]
        assert choices[-1]["finish_reason"] == "stop"
    else:
        (choice,) = response.json()["choices"]
        assert (choice_text(choice), choice["finish_reason"]) == (full[: full.index(stop)], "stop")
    (report,) = await api.final_reports(1)
    assert (report.phase, report.outcome) == (Phase.COMPLETED, "stop")
    assert report.slo_met is not None
    assert 0 < report.output_tokens < 40
    assert report.timeline is not None
    assert report.timeline.outcome == "stop"
    await asyncio.wait_for(api.cluster.decodes[0].cancelled.wait(), 2)
    transfer_id = api.cluster.prefill.prefills[0].transfer_id
    await until(lambda: transfer_id in api.cluster.prefill.released, 2)


async def test_of_two_answers_only_the_stopped_one_ends(api: Api) -> None:
    full = choice_text((await api.complete(max_tokens=40)).json()["choices"][0])
    stop = full[len(full) // 2 :][:6]
    await api.final_reports(1)
    api.renew()
    last_token_never_comes(api, 38)
    body = (await api.complete(max_tokens=40, stop=[stop], n=2, temperature=0.5)).json()
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "stop"]
    assert [(report.phase, report.outcome) for report in await api.final_reports(2)] == [(Phase.COMPLETED, "stop")] * 2


async def test_the_first_token_may_match_already(api: Api) -> None:
    first = choice_text((await api.complete(max_tokens=1)).json()["choices"][0])
    await api.final_reports(1)
    api.renew()
    last_token_never_comes(api, 1)
    (choice,) = (await api.complete(max_tokens=40, stop=[first])).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    (report,) = await api.final_reports(1)
    assert (report.phase, report.outcome, report.slo_met) == (Phase.COMPLETED, "stop", True)
    transfer_id = api.cluster.prefill.prefills[0].transfer_id
    await until(lambda: transfer_id in api.cluster.prefill.released, 2)


async def test_a_client_that_leaves_is_still_a_cancelled_one(api: Api) -> None:
    last_token_never_comes(api, 2)
    task = asyncio.create_task(api.complete(max_tokens=40, stop=["never"]))
    await until(lambda: bool(api.cluster.decodes[0].decodes))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    (report,) = await api.final_reports(1)
    assert (report.phase, report.outcome, report.slo_met) == (Phase.CANCELLED, "cancelled", None)


SAID = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "strng"}
TEXT = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/responses", {"input": "x", "text": TEXT}, "strng"),
    ("/v1/responses", {"input": "x", "priority": 3}, "priority (3) cannot be served"),
    ("/v1/responses", {"input": "x", "structured_outputs": {"regex": "(a"}}, "regex"),
    ("/v1/chat/completions", {"messages": SAID, "response_format": FORMAT}, "strng"),
    ("/v1/chat/completions", {"messages": SAID, "response_format": FORMAT, "n": 2}, "strng"),
    ("/v1/chat/completions", {"messages": SAID, "logprobs": True, "response_format": FORMAT}, "strng"),
    ("/v1/chat/completions", {"messages": SAID, "priority": 3}, "priority (3) cannot be served"),
    ("/v1/completions", {"prompt": PROMPT, "structured_outputs": {"grammar": "root ::= ("}}, "grammar"),
    ("/v1/completions", {"prompt": ["a", "b"], "structured_outputs": {"json": SCHEMA}}, "strng"),
    ("/v1/completions", {"prompt": PROMPT, "temperature": float("nan")}, "temperature must be a finite number"),
    ("/invocations", {"messages": SAID, "response_format": FORMAT}, "strng"),
    (
        "/v1/messages",
        {"messages": SAID, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "strng",
    ),
]


async def post(api: Api, path: str, **body: Any) -> Any:
    full = json.dumps({"model": "demo", "max_tokens": 6, **body})
    return await api.client.post(path, content=full, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(("path", "body", "why"), REFUSED)
async def test_the_status_and_the_reason_are_those_without_a_stream(
    api: Api, path: str, body: dict[str, Any], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = await post(api, path, **body)
    assert plain.status_code == 400, plain.text
    assert why in plain.text
    capfd.readouterr()
    streamed = await post(api, path, stream=True, **body)
    assert streamed.status_code == 400
    assert streamed.json() == plain.json()
    assert streamed.headers["content-type"] == plain.headers["content-type"]
    assert "Traceback" not in "".join(capfd.readouterr())
    assert not api.cluster.prefill.prefills
    assert api.admission.jobs == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "x"}),
        ("/v1/chat/completions", {"messages": SAID}),
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/messages", {"messages": SAID}),
    ],
)
@pytest.mark.parametrize("error", [InvalidRequest("it cannot be"), Overloaded("full", retry_after_s=3.0)])
async def test_so_are_those_of_a_job_that_ends_before_its_first_token(
    api: Api, path: str, body: dict[str, Any], error: InvalidRequest | Overloaded
) -> None:
    script = Script()
    with api.running_jobs(script):
        script.acts.put_nowait(error)
        script.acts.put_nowait(error)
        plain, streamed = await post(api, path, **body), await post(api, path, stream=True, **body)
    assert plain.status_code == error.http_status
    if path == "/v1/responses":  # it has announced the response: the job was submitted
        assert streamed.status_code == 200
        assert "response.created" in streamed.text
        assert error.message in streamed.text
        code = '"code": "invalid_request"' if isinstance(error, InvalidRequest) else '"code": "overloaded"'
        assert code in streamed.text
    elif isinstance(error, Overloaded):
        assert (streamed.status_code, streamed.headers["retry-after"]) == (429, "3")
    else:
        assert (streamed.status_code, streamed.json()) == (plain.status_code, plain.json())


async def test_a_response_is_announced_once_its_job_is_submitted(api: Api) -> None:
    script = Script()
    with api.running_jobs(script):
        body = {"model": "demo", "input": "x", "stream": True}
        async with api.client.stream("POST", "/v1/responses", json=body) as response:
            events = response.aiter_lines()
            assert await anext(events) == "event: response.created"
            assert len(script.jobs) == 1
            script.acts.put_nowait(InvalidRequest("it cannot be"))
            rest = [line async for line in events]
    assert any("it cannot be" in line for line in rest)


@pytest.mark.parametrize("name", [b"uuid/suffix", b"a, b", b"x" * 300, "\u00fc".encode(), b"\xfc", b"#{};|"])
async def test_a_server_that_returns_request_ids_does_so_for_any_and_in_refusals_too(
    api: Api, monkeypatch: pytest.MonkeyPatch, name: bytes
) -> None:
    """`enable_request_id_headers` adds this middleware of vLLM's."""
    from vllm.entrypoints.serve.middleware.x_request_id import XRequestIdMiddleware

    monkeypatch.setattr(api.edge, "app", XRequestIdMiddleware(api.app))
    monkeypatch.setattr(api.edge, "fast_path", None)
    refused = {"messages": SAID, "response_format": FORMAT}
    for body, status in (({"messages": SAID}, 200), (refused, 400)):
        for stream in (False, True):
            full = {"model": "demo", "max_tokens": 6, "stream": stream, **body}
            headers = {b"X-Request-Id": name}
            response = await api.client.post("/v1/chat/completions", json=full, headers=headers)
            assert response.status_code == status
            assert [value for key, value in response.headers.raw if key.lower() == b"x-request-id"] == [name]
