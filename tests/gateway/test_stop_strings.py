"""A request that ends by a stop string has completed: the client has all it asked for, and nothing runs on."""

import asyncio
from typing import Any

import httpx
import pytest

from shared.domain.job import Phase
from tests.gateway.api import Api, events, until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


async def ask(api: Api, path: str, **body: Any) -> httpx.Response:
    return await (api.chat(**body) if path == "chat" else api.complete(**body))


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content") or ""


def last_token_never_comes(api: Api, last: int) -> None:
    """Unless the job is stopped its decode leg would hang."""
    for decode in api.cluster.decodes:
        decode.before_token = lambda count: asyncio.sleep(0.002) if count < last else asyncio.Event().wait()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat", "completions"])
async def test_it_is_recorded_as_completed_and_both_legs_are_free(api: Api, path: str, stream: bool) -> None:
    full = text_of((await ask(api, path, max_tokens=40)).json()["choices"][0])
    stop = full[len(full) // 2 :][:6]
    await api.final_reports(1)
    api.renew()
    last_token_never_comes(api, 38)
    response = await ask(api, path, max_tokens=40, stop=[stop], stream=stream)
    if stream:
        choices = [choice for event in await events(response) for choice in event["choices"]]
        assert "".join(text_of(choice) for choice in choices) == full[: full.index(stop)]
        assert choices[-1]["finish_reason"] == "stop"
    else:
        (choice,) = response.json()["choices"]
        assert (text_of(choice), choice["finish_reason"]) == (full[: full.index(stop)], "stop")
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
    full = text_of((await api.complete(max_tokens=40)).json()["choices"][0])
    stop = full[len(full) // 2 :][:6]
    await api.final_reports(1)
    api.renew()
    last_token_never_comes(api, 38)
    body = (await api.complete(max_tokens=40, stop=[stop], n=2, temperature=0.5)).json()
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "stop"]
    assert [(report.phase, report.outcome) for report in await api.final_reports(2)] == [(Phase.COMPLETED, "stop")] * 2


async def test_the_first_token_may_match_already(api: Api) -> None:
    first = text_of((await api.complete(max_tokens=1)).json()["choices"][0])
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
