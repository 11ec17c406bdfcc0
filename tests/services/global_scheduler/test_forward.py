"""Handing on: what a receiver refuses costs only what is at fault."""

import asyncio
import json
import math
from collections.abc import Sequence

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from services.global_scheduler.forward import BATCH, SENDS, Batch, DeliveryQueue, ForwardMetrics, deliver, post_all
from shared.errors import InvalidRequest, Unavailable
from shared.wire.clients.http import JsonClient


class Receiver:
    """Refuses each message with a bad item, or is away from its n-th message on; keeps what it takes, by queue."""

    def __init__(self, bad: set[int], away_from: int = 10**9, failure: type[BaseException] = Unavailable) -> None:
        self.taken: list[list[int]] = [[], []]
        self.messages = 0
        self._bad, self._away_from, self._failure = bad, away_from, failure

    async def take(self, batches: Sequence[Batch]) -> None:
        self.messages += 1
        if self.messages >= self._away_from:
            raise self._failure("away")
        numbers = [[item["n"] for item in batch] for batch in batches]
        if self._bad & {number for each in numbers for number in each}:
            raise InvalidRequest("outcomes: not a number")
        for taken, new in zip(self.taken, numbers, strict=True):
            taken += new


def queues(registry: CollectorRegistry, outcomes: int, seconds: int) -> list[DeliveryQueue]:
    metrics = ForwardMetrics(registry)
    found = [DeliveryQueue("monitor", metrics), DeliveryQueue("demand", metrics)]
    for number in range(outcomes):
        found[0].add({"n": number})
    for number in range(seconds):
        found[1].add({"n": BATCH + number})
    return found


@pytest.mark.parametrize("bad", [0, 437, BATCH - 1, BATCH + 30])
async def test_one_bad_item_costs_nothing_but_itself(bad: int) -> None:
    registry, receiver = CollectorRegistry(), Receiver({bad})
    waiting = queues(registry, BATCH, 60)
    with capture_logs() as logs:
        assert await deliver(waiting, receiver.take)
    assert receiver.taken[0] == [n for n in range(BATCH) if n != bad]
    assert receiver.taken[1] == [n for n in range(BATCH, BATCH + 60) if n != bad]
    assert not any(waiting)
    (line,) = (line for line in logs if line["event"] == "deliveries refused")
    assert (line["count"], line["first"]) == (1, f"{{'n': {bad}}}")
    to = "monitor" if bad < BATCH else "demand"
    assert f'forward_dropped_total{{cause="refused",to="{to}"}} 1.0' in generate_latest(registry).decode()


async def test_a_receiver_that_refuses_all_is_asked_so_often_only() -> None:
    receiver = Receiver(set(range(2 * BATCH)))
    waiting = queues(CollectorRegistry(), BATCH, 60)
    assert await deliver(waiting, receiver.take)
    assert SENDS <= receiver.messages < SENDS + 20
    assert receiver.taken == [[], []]
    assert not any(waiting)


async def test_a_message_that_is_refused_for_itself_is_sent_once() -> None:
    async def refuse(batches: Sequence[Batch]) -> None:
        sent.append(batches)
        raise InvalidRequest("trouble: too long")

    sent: list[Sequence[Batch]] = []
    assert await deliver(queues(CollectorRegistry(), 0, 0), refuse)
    assert len(sent) == 1


@pytest.mark.parametrize("failure", [Unavailable, asyncio.CancelledError])
@pytest.mark.parametrize("away_from", range(1, 12))
async def test_nothing_is_lost_when_the_receiver_goes_meanwhile(away_from: int, failure: type[BaseException]) -> None:
    receiver = Receiver({6}, away_from, failure)
    waiting = queues(CollectorRegistry(), 16, 4)
    try:
        there = await deliver(waiting, receiver.take)
    except asyncio.CancelledError:
        there = False
    assert there is (receiver.messages < away_from)
    left = [[item["n"] for item in queue.next_batch()] for queue in waiting]
    assert [taken + rest for taken, rest in zip(receiver.taken, left, strict=True)] == [
        [n for n in range(16) if n != 6 or 6 in left[0]],
        list(range(BATCH, BATCH + 4)),
    ]


async def test_an_item_that_cannot_be_encoded_costs_nothing_but_itself() -> None:
    registry, taken = CollectorRegistry(), list[int]()

    async def answer(request: httpx.Request) -> httpx.Response:
        taken.extend(item["n"] for item in json.loads(request.content))
        return httpx.Response(200, json={})

    waiting = DeliveryQueue("monitor", ForwardMetrics(registry))
    for number in range(10):
        waiting.add({"n": number, "ttft_s": math.inf if number == 3 else 1.0})
    client = JsonClient("http://monitor", transport=httpx.MockTransport(answer))
    await post_all(waiting, client, "/outcomes")
    assert taken == [n for n in range(10) if n != 3]
    assert not waiting
    assert 'forward_dropped_total{cause="refused",to="monitor"} 1.0' in generate_latest(registry).decode()
