"""Corrupt, stale, replayed and garbage frames, on every socket."""

import asyncio
import socket
from contextlib import ExitStack, suppress

from lab.chaos import garbage
from lab.chaos.arena import Arena
from lab.chaos.clusters import KEYED, OPEN
from lab.chaos.scenario import Scenario
from lab.chaos.wires import Wire

BAD_S = 4.0
_HALF_OPEN = 10  # connections a port


async def garbage_everywhere(arena: Arena) -> None:
    """Noise on every port, well-framed nonsense on every ZeroMQ port."""
    await garbage.make_noise(arena.ports, arena.rng)
    await garbage.say([port for port in arena.ports if port.purpose != "http"], arena.rng)


async def half_open(arena: Arena) -> None:
    """Connections that say half a word, or none, and stay."""
    with ExitStack() as stack:
        for port in arena.ports:
            for number in range(_HALF_OPEN):
                with suppress(ConnectionRefusedError):  # an emulated instance has no KV to offer
                    made = stack.enter_context(socket.create_connection((port.host, port.port), timeout=2.0))
                    made.sendall(b"\xff\x00\x00"[: number % 4] if port.purpose != "http" else b"POST /v1/comp"[:number])
        await asyncio.sleep(BAD_S)


async def _corrupt(arena: Arena, *wires: Wire, share: float) -> None:
    for wire in wires:
        wire.proxy.corrupt(share)
    await asyncio.sleep(BAD_S)
    for wire in wires:
        wire.proxy.heal()
    if not sum(wire.proxy.corrupted for wire in wires):
        raise AssertionError("nothing was corrupted: the scenario shows nothing")


async def _replay(arena: Arena, *wires: Wire, back: bool = True) -> None:
    for _ in range(int(BAD_S / 0.5)):
        for wire in wires:
            wire.proxy.replay(back=back)
        await asyncio.sleep(0.5)
    if not sum(wire.proxy.replayed for wire in wires):
        raise AssertionError("nothing was replayed: the scenario shows nothing")


async def corrupt_state(arena: Arena) -> None:
    """Heartbeats and broadcasts with flipped bits: state is dropped, or put right by the next one."""
    beats, casts = arena.wires.between(purpose="heartbeats"), arena.wires.between(purpose="broadcasts")
    await _corrupt(arena, *beats, *casts, share=0.3)


async def replay_state(arena: Arena) -> None:
    """Old heartbeats and broadcasts come again."""
    await _replay(arena, *arena.wires.between(purpose="heartbeats"), *arena.wires.between(purpose="broadcasts"))


async def corrupt_rpc(arena: Arena) -> None:
    """Flipped bits in calls and answers; with the cluster's keys they cannot pass for what was sent."""
    await _corrupt(arena, *arena.wires.between(purpose="rpc"), share=0.005)


async def replay_rpc(arena: Arena) -> None:
    """Old calls come again: what they made was made already."""
    await _replay(arena, *arena.wires.between(purpose="rpc"), back=False)


FRAMES = (
    Scenario("garbage", "noise and well-framed nonsense on every port", garbage_everywhere, OPEN),
    Scenario("half-open", "ten connections a port that say half a word and stay for 4 s", half_open),
    Scenario("corrupt-state", "bits flip in 30 % of heartbeats and broadcasts", corrupt_state, OPEN, away_s=2.0),
    Scenario("replay-state", "old heartbeats and broadcasts come again", replay_state, OPEN, away_s=2.0),
    Scenario(
        "corrupt-rpc", "bits flip in 0.5 % of RPC messages, with keys", corrupt_rpc, KEYED, away_s=2.0, errors=True
    ),
    Scenario("replay-rpc", "old calls come again, twice a second", replay_rpc, OPEN, away_s=1.0),
    Scenario("garbage-keyed", "noise and nonsense of a stranger without the keys", garbage_everywhere, KEYED),
)
