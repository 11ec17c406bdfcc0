"""Session ids of requests, apart by API key, and hints that prefetch a session's KV."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gateway.auth import KeyRing, create_key
from gateway.job import Job
from gateway.sessions import ID_CHARS, WARMS_AT_ONCE, SessionBook, session_key
from shared.domain.prompt import hashes_of, packed, unpacked
from shared.domain.route import PrefixPull
from shared.errors import EngineFailed, InvalidRequest, Unavailable
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.messages import PLACE
from tests.gateway.api import HELLO, PROMPT, Api
from tests.gateway.cluster import Cluster, answer, make_job, until

LONG = list(range(400, 600))


def test_the_book_is_bounded_by_sessions_and_bytes() -> None:
    book = SessionBook(most=2, max_bytes=400)
    book.ended(ended("a", [1] * 10, [2]))
    book.ended(ended("a", [1] * 20, [2]))
    assert (len(book), book.bytes) == (1, 84)
    book.ended(ended("b", [1] * 10, [2]))
    book.ended(ended("c", [1] * 10, [2]))
    assert book.get("a") is None
    assert (len(book), book.bytes) == (2, 88)
    book.ended(ended("d", [1] * 80, [2]))
    assert [name for name in "abcd" if book.get(name) is not None] == ["c", "d"]
    assert book.bytes == 368
    book.ended(ended("e", [1] * 101, []))
    assert (len(book), book.bytes) == (0, 0)


def test_ids_of_any_text_have_keys() -> None:
    assert session_key("", "user", "\ud800") != session_key("", "user", "ü")
    with pytest.raises(InvalidRequest, match=r"prompt_cache_key: a session id .* 256 characters, .* has 300"):
        session_key("", "prompt_cache_key", "x" * 300)


async def test_the_turns_of_a_session_go_to_one_scheduler(cluster: Cluster) -> None:
    addresses = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "tcp://127.0.0.1:3")
    schedulers = SchedulerClient(cluster.pipeline._clients, addresses)
    views = [make_job([1], session=f"s{number % 20}")[0].view() for number in range(60)]
    by_session: dict[str, set[str]] = {}
    for view in views:
        by_session.setdefault(view.session, set()).add(schedulers._first_for(view))
    assert {len(found) for found in by_session.values()} == {1}
    assert len({address for found in by_session.values() for address in found}) == 3


async def key_of(api: Api, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body: Any) -> str:
    """The session of one request, as the scheduler and the instances see it."""
    short: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": PROMPT, "max_tokens": 2},
        "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
        "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    }
    placed = len(api.cluster.places)
    response = await api.post(path, {**short[path], **body}, **(headers or {}))
    assert response.status_code == 200, response.text
    decode = api.cluster.decodes[0].decodes[-1].job
    assert {place.job.session for place in api.cluster.places[placed:]} == {decode.session}
    return decode.session


async def warm(api: Api, session_id: str, **headers: str) -> int:
    return (await api.client.post(f"/v1/sessions/{session_id}/warm", headers=headers)).status_code


def outcomes(api: Api) -> dict[str, float]:
    found = api.edge._metrics.warms.collect()[0].samples
    return {sample.labels["outcome"]: sample.value for sample in found if sample.name.endswith("_total")}


async def ends(api: Api, outcome: str, begin: Callable[[], Any]) -> None:
    """A warm that `begin` requests has that outcome."""
    before = outcomes(api)
    assert await begin() == 202
    await until(lambda: outcomes(api) != before)
    assert outcomes(api) == {**before, outcome: before.get(outcome, 0.0) + 1.0}


def ended(session: str, prompt: list[int], tokens: list[int]) -> Job:
    job, _ = make_job(prompt, session=session)
    job.tokens = tokens
    return job


class TestRequests:
    """Over vLLM's API layer."""

    pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

    async def test_fields_name_sessions(self, api: Api) -> None:
        expected = session_key("", "user", "chat-1")
        chat = "/v1/chat/completions"
        assert await key_of(api) == ""
        assert await key_of(api, headers={"X-Session-Id": "chat-1"}) == expected
        assert await key_of(api, user="chat-1") == expected
        assert await key_of(api, chat, prompt_cache_key="chat-1", user="someone") == expected
        assert await key_of(api, chat, session_id="chat-1", prompt_cache_key="other", user="someone") == expected
        assert await key_of(api, chat, headers={"X-Session-Id": "chat-1"}, prompt_cache_key="other") == expected
        assert await key_of(api, "/v1/responses", conversation={"id": "chat-1"}, user="someone") == expected
        assert await key_of(api, "/v1/responses", conversation="chat-1") == expected
        assert await key_of(api, "/v1/messages", metadata={"user_id": "chat-1"}) == expected
        assert await key_of(api, user="chat-2") not in ("", expected)

    async def test_streams_of_the_fast_path_have_sessions(self, api: Api) -> None:
        assert await key_of(api, stream=True, user="chat-1") == session_key("", "user", "chat-1")

    @pytest.mark.parametrize("field", ["X-Session-Id", "prompt_cache_key", "user"])
    async def test_ids_are_bounded(self, api: Api, field: str) -> None:
        for count, status in ((ID_CHARS, 200), (ID_CHARS + 1, 400)):
            text = "s" * count
            headers, body = ({field: text}, {}) if field == "X-Session-Id" else ({}, {field: text})
            response = await api.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2, **body}, **headers)
            assert response.status_code == status, response.text
        assert response.json()["error"]["message"].startswith(f"{field}: a session id has at most 256 characters")

    async def test_two_keys_never_share_a_session(self, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        (first, key), (second, other) = create_key("one"), create_key("two")
        monkeypatch.setattr(api.edge, "_keys", KeyRing((key, other)))
        one, two = ({"Authorization": f"Bearer {secret}"} for secret in (first, second))
        keys = [await key_of(api, headers=headers, user="chat-1") for headers in (one, two)]
        assert keys == [session_key("one", "user", "chat-1"), session_key("two", "user", "chat-1")]
        assert len({*keys, session_key("", "user", "chat-1")}) == 3
        await key_of(api, headers=one, user="only of one")
        assert await warm(api, "only of one", **two) == 404
        assert await warm(api, "only of one", **one) == 202
        assert (await api.client.post("/v1/sessions/only%20of%20one/warm")).status_code == 401

    async def test_a_hint_has_the_next_instance_pull_the_context(self, api: Api) -> None:
        cluster, (target, holder) = api.cluster, (api.cluster.prefill, api.cluster.decodes[1])
        assert (await api.complete(prompt=LONG, user="agent/1")).status_code == 200
        context = [*LONG, *answer(LONG, 6)]
        api.reset()
        cluster.pull = PrefixPull(holder.ref, 192)
        try:
            await ends(api, "pulled", lambda: warm(api, "agent/1"))
        finally:
            cluster.pull = None
        job = cluster.places[-1].job
        assert (job.warms, job.session, job.prompt_tokens) == (True, session_key("", "", "agent/1"), len(context) + 1)
        assert job.prefix == hashes_of(packed(context))
        (export,), (pull,) = holder.exports, target.pulls
        assert unpacked(export.prompt) == context[:192]
        assert unpacked(pull.prompt) == context[:193]
        assert pull.handle.transfer_id == export.transfer_id
        assert pull.if_room
        await asyncio.gather(*(worker.releases(1) for worker in (holder, target)))
        assert not target.prefills
        assert not any(worker.decodes for worker in cluster.decodes)

    async def test_where_nothing_can_be_pulled_nothing_is_done(self, api: Api) -> None:
        cluster, holder = api.cluster, api.cluster.decodes[1]
        assert await warm(api, "unknown") == 404
        await api.complete(prompt=LONG, user="agent/2")
        await ends(api, "placed", lambda: warm(api, "agent/2"))
        cluster.pull, holder.holds = PrefixPull(holder.ref, 192), False
        try:
            await ends(api, "gone", lambda: warm(api, "agent/2"))
            api.reset()
            cluster.prefill.no_pull = EngineFailed("no")
            await ends(api, "failed", lambda: warm(api, "agent/2"))
            await asyncio.gather(*(worker.releases(1) for worker in (holder, cluster.prefill)))
            cluster.no_room = lambda request: Unavailable("full") if request.job.warms else None
            await ends(api, "failed", lambda: warm(api, "agent/2"))
        finally:
            cluster.pull, cluster.no_room = None, lambda _: None

    async def test_hints_at_once_are_bounded_and_one_session_is_prefetched_once(self, api: Api) -> None:
        cluster, placed = api.cluster, len(api.cluster.places)
        may_place = asyncio.Event()
        place = cluster.place

        async def waiting(request: Any, call: Any) -> Any:
            if request.job.warms:
                await may_place.wait()
            return await place(request, call)

        for number in range(WARMS_AT_ONCE + 1):
            await api.complete(user=f"s{number}")
        assert cluster.scheduler is not None
        handlers = cluster.scheduler._handlers
        before, handlers[PLACE.name] = handlers[PLACE.name], waiting
        try:
            for number in range(WARMS_AT_ONCE):
                assert await warm(api, f"s{number}") == 202
            assert await warm(api, "s0") == 202
            assert await warm(api, f"s{WARMS_AT_ONCE}") == 429
        finally:
            handlers[PLACE.name] = before
            may_place.set()
        await until(lambda: sum(place.job.warms for place in cluster.places[placed:]) == WARMS_AT_ONCE)
