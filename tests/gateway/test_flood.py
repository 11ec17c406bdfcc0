"""Bodies that ask for much, through the real API layer: bounded, in turn, and gone with their client."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from shared.domain.job import Phase
from shared.errors import InvalidRequest
from tests.gateway.api import PROMPT, Api, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


class Held:
    """Prefills that wait until told to go on."""

    def __init__(self, api: Api) -> None:
        self.go = asyncio.Event()
        self.prefills = api.cluster.prefill.prefills
        api.cluster.prefill.before_token = lambda _: self.go.wait()


async def nothing_waits(api: Api) -> None:
    await until(lambda: api.admission.jobs == api.admission.tokens == 0)


async def settled(read: Callable[[], int], least: int) -> int:
    """The value once it is `least` or more and other requests have had their turn on the loop."""
    await until(lambda: read() >= least)
    for _ in range(50):
        await asyncio.sleep(0)
    return read()


@pytest.mark.parametrize("body", [{"n": 5000}, {"prompt": ["Hello"] * 1000}])
async def test_a_body_of_too_many_jobs_is_refused_before_it_is_work(api: Api, body: dict[str, Any]) -> None:
    answer = await api.complete(**{"temperature": 1, **body})
    assert answer.status_code == 400
    assert "the limit is 24" in answer.json()["error"]["message"]
    assert not api.cluster.prefill.prefills
    await nothing_waits(api)


@pytest.mark.parametrize("body", [{"n": 24, "temperature": 1}, {"prompt": [PROMPT] * 24}])
async def test_jobs_of_one_body_take_turns_and_others_need_not_wait(api: Api, body: dict[str, Any]) -> None:
    held = Held(api)
    large = asyncio.create_task(api.complete(**body, return_token_ids=True))
    assert await settled(lambda: len(held.prefills), 4) == 4
    small = asyncio.create_task(api.complete())
    assert await settled(lambda: len(held.prefills), 5) == 5
    held.go.set()
    assert (await small).status_code == 200
    assert len((await large).json()["choices"]) == 24
    assert len(held.prefills) == 25
    await nothing_waits(api)
    # Word of them comes after the answers: the next test would count it as its own.
    await api.cluster.prefill.releases(25)


@pytest.mark.parametrize("path", ["complete", "chat"])
async def test_what_a_client_that_leaves_had_asked_for_is_gone(api: Api, path: str) -> None:
    held = Held(api)
    ask = api.complete if path == "complete" else api.chat
    task = asyncio.create_task(ask(n=24, temperature=1))
    assert await settled(lambda: len(held.prefills), 4) == 4
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await nothing_waits(api)
    held.go.set()
    assert await settled(lambda: len(api.cluster.prefill.released), 4) == 4
    assert len(held.prefills) == 4
    assert {each.transfer_id for each in held.prefills} == {*api.cluster.prefill.released}


async def test_of_a_burst_as_many_pass_as_may_wait(api: Api) -> None:
    held = Held(api)
    async with httpx.AsyncClient(
        base_url=api.client.base_url, timeout=30, limits=httpx.Limits(max_connections=None)
    ) as client:
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 2}
        posts = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(200)]
        await until(lambda: sum(post.done() for post in posts) == 136, 30)
        refused = [post.result() for post in posts if post.done()]
        assert {answer.status_code for answer in refused} == {429}
        assert all("retry-after" in answer.headers for answer in refused)
        assert await settled(lambda: len(held.prefills), 64) == 64
        held.go.set()
        assert [(await post).status_code for post in posts].count(200) == 64
    await nothing_waits(api)


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_tokens_are_bounded_too(api: Api, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(api)
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(api.app.state.engine_client._core, "on_refused", lambda slo, code: told.append((slo, code)))
    long = [400 + number % 50 for number in range(2000)]
    first = [asyncio.create_task(api.complete(prompt=long)) for _ in range(4)]
    assert await settled(lambda: len(held.prefills), 4) == 4
    refused = await api.complete(prompt=[long, long], stream=stream)  # of two of them one would fit
    assert refused.status_code == 429
    assert "retry-after" in refused.headers
    assert "10000" in refused.json()["error"]["message"]
    assert told == [("default", "busy")]
    held.go.set()
    assert {(await task).status_code for task in first} == {200}
    await nothing_waits(api)


async def test_one_failed_job_of_a_body_ends_the_others(api: Api) -> None:
    decode, jobs = api.cluster.decodes[0], iter((1, 2, 3))

    def second_fails(number: int) -> Any:
        if number == 0 and next(jobs) == 2:
            raise InvalidRequest("this one cannot be computed")
        return asyncio.Event().wait()

    decode.before_token = second_fails
    answer = await api.complete(n=3, temperature=1)
    assert answer.status_code == 400
    assert "cannot be computed" in answer.json()["error"]["message"]
    phases = Counter(report.phase for report in await api.final_reports(3))
    assert phases == {Phase.FAILED: 1, Phase.CANCELLED: 2}


async def test_a_job_whose_turn_does_not_come_ends_with_its_deadline(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = api.app.state.engine_client.engine_core._settings
    monkeypatch.setattr(
        api.app.state.engine_client.engine_core, "_settings", settings.model_copy(update={"job_timeout_s": 0.3})
    )
    held = Held(api)
    answer = await api.complete(n=6, temperature=1)
    assert answer.status_code == 504
    assert len(held.prefills) == 4
    await nothing_waits(api)
