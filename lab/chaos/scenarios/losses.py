"""Requests that lose the instances they decode on: one that ends each of them, and one that cannot be carried."""

import asyncio

from lab.chaos.arena import Arena
from lab.chaos.client import Ask, Ending, Reply, send
from lab.chaos.load import fresh, learn
from lab.chaos.rude import wanting
from lab.chaos.scenario import Scenario
from services.launcher.suite import until
from shared.errors import InstancesLost, PolyphaseError

KILLER_TOKENS, PINNED_TOKENS = 200, 250
MOST_DEATHS = 4  # the gateway's `attempts`
LOSSES_OF_PINNED = 2
_POLL_S = 0.02
_REPORT_S = 10.0


async def _decodes_on(arena: Arena, job_id: str) -> str:
    """The instance that decodes the request, as schedulers know it; empty where none does."""
    for scheduler in arena.suite.schedulers():
        async with scheduler:
            try:
                rows = await scheduler.requests(phase="decode")
            except PolyphaseError:
                continue
        for row in rows:
            if job_id in row["job_id"]:
                return str(row["decode_instance"])
    return ""


def _job_id(ask: Ask) -> str:
    """Part of its job's id."""
    return str(ask.body["request_id"])


async def _killer(arena: Arena) -> None:
    """Each instance that decodes the request is killed as soon as it does; few die, and the request is refused."""
    ask = fresh(wanting(dict(arena.asks[0].body), max_tokens=KILLER_TOKENS))
    reading = asyncio.create_task(send(arena.gateways[0], ask))
    killed: list[str] = []
    pids: dict[str, int] = {}
    with arena.away():
        while not reading.done():
            name = await _decodes_on(arena, _job_id(ask))
            if name and killed[-1:] != [name]:
                killed.append(name)
                pids |= arena.processes.kill(name)
            await asyncio.sleep(_POLL_S)
        await arena.processes.back(pids)
        await arena.roles.ready(*arena.decode)
    reply = await reading
    arena.notes.append(f"{len(killed)} instances killed")
    _check_refused(reply, killed)

    async def told() -> bool:
        async with arena.suite.monitor() as monitor:
            found = await monitor.events(kind="request_refused")
        return any(_job_id(ask) in event["job_id"] for event in found)

    await until(told, _REPORT_S, f"an event {InstancesLost.code}")


def _check_refused(reply: Reply, killed: list[str]) -> None:
    if reply.ending is not Ending.ERROR:
        raise AssertionError(f"the request ended as {reply.ending} after {len(killed)} deaths")
    if len(killed) > MOST_DEATHS:
        raise AssertionError(f"{len(killed)} instances died of one request: {', '.join(killed)}")


async def _pinned(arena: Arena) -> None:
    """A penalised request, which an engine has to run again from its start, loses its instance again and again."""
    pinned = next(ask for ask in arena.asks if ask.key == "penalised")
    longer = Ask("penalised, long", pinned.path, {**pinned.body, "max_tokens": PINNED_TOKENS})
    right = (await learn(arena.gateways[0], [longer]))[longer.key]
    ask = fresh(longer)
    reading = asyncio.create_task(send(arena.gateways[0], ask))
    for number in range(LOSSES_OF_PINNED):
        found: list[str] = []

        async def decoding(found: list[str] = found) -> bool:
            found[:] = [await _decodes_on(arena, _job_id(ask))]
            return bool(found[0]) or reading.done()

        await until(decoding, _REPORT_S, "the request to be decoded")
        if reading.done():
            raise AssertionError(f"the request ended after {number} of {LOSSES_OF_PINNED} losses")
        await arena.processes.back(arena.processes.kill(found[0]))
        await arena.roles.ready(found[0])
    reply = await reading
    if tuple(reply.tokens) != right.tokens:
        raise AssertionError(f"{len(reply.tokens)} tokens, which are not the right {len(right.tokens)}: {reply.error}")


LOSSES = (
    Scenario("killer-request", "a request whose every decode instance is killed as soon as it decodes", _killer),
    Scenario(
        "lose-penalised", f"a penalised request loses its instance {LOSSES_OF_PINNED} times", _pinned, bound_s=80.0
    ),
)
