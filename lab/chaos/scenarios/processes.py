"""Kill, freeze and thaw: one process, all of a role, again and again."""

import asyncio

from lab.chaos.arena import Arena
from lab.chaos.scenario import Scenario

# A frozen peer cannot be told from a slow one before its heartbeats are missed: half a second apart, two seconds long.
NOTICED_S = 2.5
FROZEN_S = 4.0


async def kill_one(arena: Arena, *names: str) -> None:
    """The others take over; the launcher brings it back."""
    await arena.processes.back(arena.processes.kill(*names))


async def kill_all(arena: Arena, *names: str) -> None:
    """Until one is back nobody can do their work."""
    with arena.away():
        await arena.processes.back(arena.processes.kill(*names))
        await arena.roles.ready(*(name for name in names if name in arena.roles.first))


async def freeze(arena: Arena, *names: str) -> None:
    """For some seconds they are there and do nothing."""
    arena.processes.freeze(*names)
    await asyncio.sleep(FROZEN_S)
    arena.processes.thaw()


async def freeze_all(arena: Arena, *names: str) -> None:
    """As `freeze`, of something that nobody else can do."""
    with arena.away():
        await freeze(arena, *names)


async def hang(arena: Arena, name: str) -> None:
    """It never wakes: only somebody from outside can help."""
    pid = arena.processes.statuses[name].pid
    arena.processes.freeze(name)
    await arena.processes.back({name: pid}, timeout_s=20.0)


async def kill_in_turn(arena: Arena) -> None:
    """Six times, whoever comes next, a second apart or more; never the last one of its role."""
    for name in (*arena.decode, *arena.decode):
        await arena.roles.ready(*(other for other in arena.decode if other != name))
        arena.processes.kill(name)
        await asyncio.sleep(1.0)
    await arena.roles.ready(*arena.decode)


async def _decode_instance(arena: Arena) -> None:
    await kill_one(arena, arena.decode[0])


async def _prefill_instance(arena: Arena) -> None:
    await kill_one(arena, arena.prefill[0])


async def _kill_all_decode(arena: Arena) -> None:
    await kill_all(arena, *arena.decode)


async def _kill_all_prefill(arena: Arena) -> None:
    await kill_all(arena, *arena.prefill)


async def _kill_schedulers(arena: Arena) -> None:
    await kill_all(arena, *arena.named("scheduler"))


async def _kill_monitor(arena: Arena) -> None:
    await kill_one(arena, *arena.named("monitor"))


async def _kill_predictor(arena: Arena) -> None:
    await kill_one(arena, *arena.named("predictor"))


async def _kill_control_plane(arena: Arena) -> None:
    with arena.away():
        names = (*arena.named("scheduler"), *arena.named("monitor"), *arena.named("predictor"))
        await arena.processes.back(arena.processes.kill(*names))
        await arena.roles.ready(*arena.roles.first)


async def _freeze_decode(arena: Arena) -> None:
    await freeze(arena, arena.decode[0])


async def _freeze_prefill(arena: Arena) -> None:
    await freeze(arena, arena.prefill[0])


async def _freeze_monitor(arena: Arena) -> None:
    await freeze(arena, *arena.named("monitor"))


async def _freeze_schedulers(arena: Arena) -> None:
    await freeze_all(arena, *arena.named("scheduler"))


async def _freeze_predictor(arena: Arena) -> None:
    await freeze(arena, *arena.named("predictor"))


async def _freeze_gateway(arena: Arena) -> None:
    await freeze_all(arena, arena.named("gateway")[0])


async def _hang_decode(arena: Arena) -> None:
    await hang(arena, arena.decode[0])


PROCESSES = (
    Scenario("kill-decode", "kill -9 of one decode instance", _decode_instance),
    Scenario("kill-prefill", "kill -9 of one prefill instance", _prefill_instance),
    Scenario("kill-all-decode", "kill -9 of every decode instance at once", _kill_all_decode),
    Scenario("kill-all-prefill", "kill -9 of every prefill instance at once", _kill_all_prefill),
    Scenario("kill-in-turn", "kill -9 of a decode instance each second, six times", kill_in_turn, bound_s=90.0),
    Scenario("kill-schedulers", "kill -9 of both schedulers at once", _kill_schedulers),
    Scenario("kill-monitor", "kill -9 of the monitor", _kill_monitor),
    Scenario("kill-predictor", "kill -9 of the length predictor", _kill_predictor),
    Scenario("kill-control-plane", "kill -9 of schedulers, monitor, predictor", _kill_control_plane),
    Scenario("freeze-decode", "one decode instance stands still for 4 s", _freeze_decode, away_s=NOTICED_S),
    Scenario("freeze-prefill", "one prefill instance stands still for 4 s", _freeze_prefill, away_s=NOTICED_S),
    Scenario("freeze-monitor", "the monitor stands still for 4 s", _freeze_monitor),
    Scenario("freeze-schedulers", "both schedulers stand still for 4 s", _freeze_schedulers),
    Scenario("freeze-predictor", "the predictor stands still for 4 s", _freeze_predictor),
    Scenario("freeze-gateway", "one of two gateways stands still for 4 s", _freeze_gateway),
    Scenario("hang-decode", "a decode instance stands still for good", _hang_decode, away_s=NOTICED_S),
)

# MERGED clocks.py
# Clocks that jump. Only wall clocks do; `time.time` of the processes says what it is told to.


HOUR_S = 3600.0
_STAY_S = 1.5


async def _jump(arena: Arena, *names: str) -> None:
    """An hour ahead, an hour behind, and back."""
    for offset_s in (HOUR_S, -HOUR_S, 0.0):
        arena.switches.clock(offset_s, *names)
        await asyncio.sleep(_STAY_S)


async def _monitor(arena: Arena) -> None:
    await _jump(arena, *arena.named("monitor"))


async def _front(arena: Arena) -> None:
    await _jump(arena, *arena.named("scheduler"), arena.named("gateway")[0])


async def _instance(arena: Arena) -> None:
    await _jump(arena, arena.decode[0], arena.prefill[0])


async def _restart_behind(arena: Arena) -> None:
    """A restarted instance, whose clock is behind, looks older than its predecessor."""
    name = arena.decode[0]
    arena.switches.clock(-HOUR_S, name)
    await arena.processes.back(arena.processes.kill(name))
    await arena.roles.ready(name, timeout_s=10.0)


CLOCKS = (
    Scenario("clock-monitor", "the monitor's clock jumps an hour ahead, and behind", _monitor),
    Scenario("clock-front", "clocks of schedulers and a gateway jump an hour ahead, and behind", _front),
    Scenario("clock-instances", "clocks of two instances jump an hour ahead, and behind", _instance),
    Scenario("clock-restart", "a decode instance is restarted with its clock an hour behind", _restart_behind),
)

# MERGED control_plane.py
# Two of a service, and either is lost: nobody waits for the one that is gone.


async def either_scheduler(arena: Arena) -> None:
    """One after the other, each back before the next."""
    for name in arena.named("scheduler"):
        await kill_one(arena, name)
        await asyncio.sleep(0.5)


async def either_gateway(arena: Arena) -> None:
    """One after the other; whoever asked the other one notices nothing."""
    for name in arena.named("gateway"):
        await kill_one(arena, name)
        await asyncio.sleep(0.5)


async def monitor_and_decode(arena: Arena) -> None:
    """An instance dies while nobody can say so: jobs are still placed there, and wait for a connection."""
    monitor = arena.processes.kill(*arena.named("monitor"))
    decode = arena.processes.kill(arena.decode[0])
    await arena.processes.back(monitor | decode)
    await arena.roles.ready(*arena.roles.first)


CONTROL_PLANE = (
    Scenario("either-scheduler", "kill -9 of one scheduler, then of the other", either_scheduler),
    Scenario("either-gateway", "kill -9 of one gateway, then of the other", either_gateway, breaks=True, bound_s=60.0),
    Scenario("monitor-and-decode", "kill -9 of the monitor and of a decode instance together", monitor_and_decode),
)
