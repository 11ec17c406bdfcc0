"""Scenarios of processes: one or all of a service are killed or frozen, and wall clocks jump."""

import asyncio

from benchmarks.chaos.arena import Arena
from benchmarks.chaos.faults import HOUR_S, NOTICED_S, clock_jump, freeze, kill, kill_in_turn
from benchmarks.chaos.scenario import Scenario


async def _kill_decode_six_times(arena: Arena) -> None:
    """The next victim waits until the other decode instances are ready, so one instance of the role always runs."""
    for name in (*arena.decode, *arena.decode):
        await arena.roles.ready(*(other for other in arena.decode if other != name))
        arena.processes.kill(name)
        await asyncio.sleep(1.0)
    await arena.roles.ready(*arena.decode)


async def _hang_decode(arena: Arena) -> None:
    """A frozen instance that nothing thaws: the launcher has to restart it."""
    name = arena.decode[0]
    pid = arena.processes.statuses[name].pid
    arena.processes.freeze(name)
    await arena.processes.back({name: pid}, timeout_s=20.0)


async def _restart_with_clock_behind(arena: Arena) -> None:
    """The restarted instance looks older than its predecessor."""
    name = arena.decode[0]
    arena.switches.clock(-HOUR_S, name)
    await arena.processes.back(arena.processes.kill(name))
    await arena.roles.ready(name, timeout_s=10.0)


async def _monitor_and_decode(arena: Arena) -> None:
    """While no monitor can report the loss, jobs are still placed on the instance, and wait for a connection."""
    monitor = arena.processes.kill(*arena.named("monitor"))
    decode = arena.processes.kill(arena.decode[0])
    await arena.processes.back(monitor | decode)
    await arena.roles.ready(*arena.roles.first)


def _control_plane(arena: Arena) -> tuple[str, ...]:
    return (*arena.named("scheduler"), *arena.named("monitor"), *arena.named("predictor"))


PROCESSES = (
    Scenario("kill-decode", "kill -9 of one decode instance", kill(lambda arena: arena.decode[:1])),
    Scenario("kill-prefill", "kill -9 of one prefill instance", kill(lambda arena: arena.prefill[:1])),
    Scenario(
        "kill-all-decode", "kill -9 of every decode instance at once", kill(lambda arena: arena.decode, outage=True)
    ),
    Scenario(
        "kill-all-prefill", "kill -9 of every prefill instance at once", kill(lambda arena: arena.prefill, outage=True)
    ),
    Scenario(
        "kill-in-turn", "kill -9 of a decode instance each second, six times", _kill_decode_six_times, bound_s=90.0
    ),
    Scenario(
        "kill-schedulers",
        "kill -9 of both schedulers at once",
        kill(lambda arena: arena.named("scheduler"), outage=True),
    ),
    Scenario("kill-monitor", "kill -9 of the monitor", kill(lambda arena: arena.named("monitor"))),
    Scenario("kill-predictor", "kill -9 of the length predictor", kill(lambda arena: arena.named("predictor"))),
    Scenario("kill-control-plane", "kill -9 of schedulers, monitor, predictor", kill(_control_plane, outage=True)),
    Scenario(
        "freeze-decode",
        "one decode instance stands still for 4 s",
        freeze(lambda arena: arena.decode[:1]),
        outage_s=NOTICED_S,
    ),
    Scenario(
        "freeze-prefill",
        "one prefill instance stands still for 4 s",
        freeze(lambda arena: arena.prefill[:1]),
        outage_s=NOTICED_S,
    ),
    Scenario("freeze-monitor", "the monitor stands still for 4 s", freeze(lambda arena: arena.named("monitor"))),
    Scenario(
        "freeze-schedulers",
        "both schedulers stand still for 4 s",
        freeze(lambda arena: arena.named("scheduler"), outage=True),
    ),
    Scenario("freeze-predictor", "the predictor stands still for 4 s", freeze(lambda arena: arena.named("predictor"))),
    Scenario(
        "freeze-gateway",
        "one of two gateways stands still for 4 s",
        freeze(lambda arena: arena.named("gateway")[:1], outage=True),
    ),
    Scenario("hang-decode", "a decode instance stands still for good", _hang_decode, outage_s=NOTICED_S),
)

CLOCKS = (
    Scenario(
        "clock-monitor",
        "the monitor's clock jumps an hour ahead, and behind",
        clock_jump(lambda arena: arena.named("monitor")),
    ),
    Scenario(
        "clock-front",
        "clocks of schedulers and a gateway jump an hour ahead, and behind",
        clock_jump(lambda arena: (*arena.named("scheduler"), arena.named("gateway")[0])),
    ),
    Scenario(
        "clock-instances",
        "clocks of two instances jump an hour ahead, and behind",
        clock_jump(lambda arena: (arena.decode[0], arena.prefill[0])),
    ),
    Scenario(
        "clock-restart", "a decode instance is restarted with its clock an hour behind", _restart_with_clock_behind
    ),
)

CONTROL_PLANE = (
    Scenario(
        "either-scheduler",
        "kill -9 of one scheduler, then of the other",
        kill_in_turn(lambda arena: arena.named("scheduler")),
    ),
    Scenario(
        "either-gateway",
        "kill -9 of one gateway, then of the other",
        kill_in_turn(lambda arena: arena.named("gateway")),
        breaks=True,
        bound_s=60.0,
    ),
    Scenario("monitor-and-decode", "kill -9 of the monitor and of a decode instance together", _monitor_and_decode),
)
