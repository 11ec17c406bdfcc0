"""The clients of `polyphase bench troubles`: what they ask for, and a log of what became of each request."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from lab.chaos.client import Ask, Ending, send
from lab.chaos.load import Address

_POLITE_S = 0.3  # between an error and the next try
_LOOK_S = 0.01  # between two looks at how late the clients themselves are


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client asks for; lengths in tokens. slo: its class, "" for the default."""

    prompt_tokens: int
    output_tokens: int
    slo: str = ""


@dataclass(slots=True)
class Shot:
    """One request as its client saw it. Unix seconds; ended_s: 0 while it is open.

    code: of the error it was answered with. cut: its connection ended, and nothing said why. doubt: its gateway or its
    scheduler may have stood still meanwhile, so that what they saw of it, and when they tell, is not known.
    """

    slo: str
    began_s: float
    ended_s: float = 0.0
    status: int = 0
    code: str = ""
    cut: bool = False
    doubt: bool = False
    ttft_s: float | None = None
    tpot_s: float | None = None
    gaps_s: tuple[float, ...] = ()  # between two messages with tokens
    late_s: float = 0.0  # by which this process came late to what it had to do meanwhile, at worst

    @property
    def done(self) -> bool:
        """Answered in full."""
        return self.ended_s > 0.0 and not self.code and not self.cut

    @property
    def jct_s(self) -> float:
        """Sending to the end."""
        return self.ended_s - self.began_s


@dataclass(slots=True)
class Clients:
    """All clients of a suite; every request that any of them sent is in `shots`."""

    addresses: Sequence[Address]
    shots: list[Shot] = field(default_factory=list)
    _rng: Random = field(default_factory=lambda: Random(7))
    _late: list[tuple[float, float]] = field(default_factory=list)  # when, and by how much

    async def watch(self) -> None:
        """Note how late this process is, until cancelled: where cores are few, gaps grow by that on their way."""
        while True:
            due_s = time.time() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            if (late_s := time.time() - due_s) > _LOOK_S:
                self._late.append((time.time(), late_s))

    async def one(self, wish: Wish, address: Address | None = None) -> Shot:
        """Send a request and wait for its end."""
        address = address or self.addresses[len(self.shots) % len(self.addresses)]
        shot = Shot(wish.slo or "default", time.time())
        self.shots.append(shot)
        reply = await send(address, self._ask(wish))
        times = reply.token_times_s
        shot.status = reply.status
        shot.ttft_s = reply.ttft_s
        if len(reply.tokens) > 1:
            shot.tpot_s = (times[-1] - times[0]) / (len(reply.tokens) - 1)
            shot.gaps_s = tuple(after - before for before, after in pairwise(times) if after > before)
        shot.cut = reply.ending not in (Ending.DONE, Ending.ERROR)
        shot.code = (reply.code or "error") if reply.ending is Ending.ERROR else ""
        shot.ended_s = time.time()
        shot.late_s = max((late_s for when_s, late_s in self._late if when_s >= shot.began_s), default=0.0)
        return shot

    def users(self, number: int, *wishes: Wish) -> "Users":
        """So many who ask again as soon as they are answered, each for the wishes in turn."""
        return Users(self, number, wishes)

    async def burst(self, number: int, wish: Wish) -> None:
        """So many at once; ends with the last answer."""
        await asyncio.gather(*(self.one(wish) for _ in range(number)))

    def _ask(self, wish: Wish) -> Ask:
        name = f"trouble-{uuid.uuid4().hex[:12]}"
        body = {
            "model": "demo",
            "prompt": [self._rng.randrange(300, 1200) for _ in range(wish.prompt_tokens)],
            "max_tokens": wish.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "request_id": name,
            "cache_salt": name,
        }
        return Ask(name, "/v1/completions", body, wish.slo)


class Users:
    """An async context manager: they begin, and at its end each is waited for until its last answer is there."""

    def __init__(self, clients: Clients, number: int, wishes: Sequence[Wish]) -> None:
        self._clients = clients
        self._number = number
        self._wishes = wishes
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Users":
        self._tasks = [asyncio.create_task(self._user(number)) for number in range(self._number)]
        self._watch = asyncio.create_task(self._clients.watch())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._watch.cancel()
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=kind is not None)

    async def _user(self, turn: int) -> None:
        while not self._stop.is_set():
            turn += 1
            shot = await self._clients.one(self._wishes[turn % len(self._wishes)])
            if not shot.done:
                await asyncio.sleep(_POLITE_S)
