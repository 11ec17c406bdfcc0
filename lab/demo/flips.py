"""Promise 4: roles flip under load, in both directions, and no request fails."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from lab.demo.client import Answer, ApiClient, Ask
from lab.demo.findings import Section
from lab.demo.identity import asks, compare_with, reference
from lab.demo.prompts import Prompts
from services.launcher.suite import Suite
from shared.domain.instance import Role
from shared.errors import PolyphaseError

FLIP_MS = 10.0
USERS = 6


@dataclass(slots=True)
class Load:
    """What the background users saw."""

    served: int = 0
    failed: list[str] = field(default_factory=list)


async def check_flips(suite: Suite, api: ApiClient, prompts: Prompts) -> Section:
    """One instance of each role there and back again, while six users keep asking."""
    section = Section("Roles flip under load, in both directions")
    rows: list[tuple[str, ...]] = []
    chosen = prompts.various(8, 40, 600, seed=41)
    plain = await reference(suite, api, chosen)
    async with under_load(api, prompts) as load:
        for role in (Role.PREFILL, Role.DECODE):
            instance = sorted(await suite.ready(role))[-1]
            for target in (role.other, role):
                before = load.served
                row = await _flip(suite, instance, target)
                rows.append(
                    (
                        instance,
                        f"{target.other.value} → {target.value}",
                        f"{row['flip_s'] * 1e3:.3f} ms",
                        f"{row['drain_s'] * 1e3:.0f} ms",
                        str(load.served - before),
                    )
                )
                _judge(section, instance, target, row)
            answers = list(await asyncio.gather(*(api.complete(ask) for ask in asks(chosen))))
            await compare_with(suite, section, f"after {instance} flipped there and back", plain, answers)
    section.table = (("instance", "flip", "flip time", "drain time", "served meanwhile"), rows)
    section.check("requests that failed", not load.failed, 0, "; ".join(load.failed[:3]) or 0)
    section.figures["requests_under_flips"] = load.served
    return section


@asynccontextmanager
async def under_load(api: ApiClient, prompts: Prompts, users: int = USERS) -> AsyncIterator[Load]:
    """Users who ask again as soon as they are answered, for the length of the block."""
    load = Load()
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for number in range(users):
            group.create_task(_user(api, prompts, load, stop, number))
        try:
            yield load
        finally:
            stop.set()


async def _user(api: ApiClient, prompts: Prompts, load: Load, stop: asyncio.Event, number: int) -> None:
    turn = 0
    while not stop.is_set():
        turn += 1
        seed = number * 1000 + turn
        ask = Ask(prompts.of_length(20 + seed % 300, seed), 8 + seed % 40, f"load-{uuid.uuid4().hex[:12]}")
        try:
            answer: Answer = await api.stream(ask)
        except (PolyphaseError, httpx.HTTPError) as error:
            load.failed.append(f"{type(error).__name__}: {error}")
            continue
        if answer.error or len(answer.tokens) != ask.max_tokens:
            load.failed.append(answer.error or f"{len(answer.tokens)} of {ask.max_tokens} tokens")
        else:
            load.served += 1


async def _flip(suite: Suite, instance: str, target: Role) -> dict[str, Any]:
    async with suite.monitor() as monitor:
        row = await monitor.flip(instance, drain_timeout_s=30.0, who="polyphase demo")
    await suite.wait_ready([instance])
    assert (await suite.instances())[instance]["role"] == target.value
    return row


def _judge(section: Section, instance: str, target: Role, row: dict[str, Any]) -> None:
    flip_ms, drain_ms = row["flip_s"] * 1e3, row["drain_s"] * 1e3
    section.at_most(f"{instance} to {target.value}: the flip itself", FLIP_MS, flip_ms, "ms")
    for name, value in (("flip", flip_ms), ("drain", drain_ms)):
        key = f"{name}_to_{target.value}_ms"
        section.figures[key] = max(section.figures.get(key, 0.0), value)
