"""Scenarios of processes: one or all processes of a service are killed or frozen, and wall clocks jump."""

import asyncio
from functools import partial

from benchmarks.chaos.faults import HOUR_S, NOTICED_S, clock_jump, decode, freeze, kill, kill_in_turn, prefill, services
from benchmarks.chaos.scenario import scenario
from benchmarks.chaos.under_test import SuiteUnderTest

process = partial(scenario, "processes")
control_plane = partial(scenario, "control plane")
clock = partial(scenario, "clocks")

process("kill-decode", "kill -9 of one decode instance", kill(decode(1)))
process("kill-prefill", "kill -9 of one prefill instance", kill(prefill(1)))
process("kill-all-decode", "kill -9 of every decode instance at once", kill(decode(), outage=True))
process("kill-all-prefill", "kill -9 of every prefill instance at once", kill(prefill(), outage=True))


@process("kill-in-turn", "kill -9 of a decode instance each second, six times", bound_s=90.0)
async def _kill_in_turn(suite: SuiteUnderTest) -> None:
    """The next victim waits until the other decode instances are ready, so one instance of the role always runs."""
    for name in (*suite.decode, *suite.decode):
        await suite.until_ready(*(other for other in suite.decode if other != name))
        suite.processes.kill(name)
        await asyncio.sleep(1.0)
    await suite.until_ready(*suite.decode)


process("kill-schedulers", "kill -9 of both schedulers at once", kill(services("scheduler"), outage=True))
process("kill-monitor", "kill -9 of the monitor", kill(services("monitor")))
process("kill-predictor", "kill -9 of the length predictor", kill(services("predictor")))
process(
    "kill-control-plane",
    "kill -9 of schedulers, monitor, predictor",
    kill(services("scheduler", "monitor", "predictor"), outage=True),
)
process("freeze-decode", "one decode instance stands still for 4 s", freeze(decode(1)), outage_s=NOTICED_S)
process("freeze-prefill", "one prefill instance stands still for 4 s", freeze(prefill(1)), outage_s=NOTICED_S)
process("freeze-monitor", "the monitor stands still for 4 s", freeze(services("monitor")))
process("freeze-schedulers", "both schedulers stand still for 4 s", freeze(services("scheduler"), outage=True))
process("freeze-predictor", "the predictor stands still for 4 s", freeze(services("predictor")))
process("freeze-gateway", "one of two gateways stands still for 4 s", freeze(services("gateway", count=1), outage=True))


@process("hang-decode", "a decode instance stands still for good", outage_s=NOTICED_S)
async def _hang_decode(suite: SuiteUnderTest) -> None:
    """A frozen instance that nothing thaws: the launcher has to restart it."""
    name = suite.decode[0]
    pid = suite.processes.statuses[name].pid
    suite.processes.freeze(name)
    await suite.processes.back({name: pid}, timeout_s=20.0)


control_plane("either-scheduler", "kill -9 of one scheduler, then of the other", kill_in_turn(services("scheduler")))
control_plane(
    "either-gateway",
    "kill -9 of one gateway, then of the other",
    kill_in_turn(services("gateway")),
    breaks=True,
    bound_s=60.0,
)


@control_plane("monitor-and-decode", "kill -9 of the monitor and of a decode instance together")
async def _monitor_and_decode(suite: SuiteUnderTest) -> None:
    """While no monitor can report the loss, jobs are still placed on the instance, and wait for a connection."""
    await suite.kill_until_back(*suite.named("monitor"), suite.decode[0])
    await suite.until_ready()


clock("clock-monitor", "the monitor's clock jumps an hour ahead, and behind", clock_jump(services("monitor")))
clock(
    "clock-front",
    "clocks of schedulers and a gateway jump an hour ahead, and behind",
    clock_jump(lambda s: (*s.named("scheduler"), s.named("gateway")[0])),
)
clock(
    "clock-instances",
    "clocks of two instances jump an hour ahead, and behind",
    clock_jump(lambda s: (s.decode[0], s.prefill[0])),
)


@clock("clock-restart", "a decode instance is restarted with its clock an hour behind")
async def _restart_with_clock_behind(suite: SuiteUnderTest) -> None:
    """The restarted instance looks older than its predecessor."""
    name = suite.decode[0]
    suite.switches.clock(-HOUR_S, name)
    await suite.kill_until_back(name)
    await suite.until_ready(name, timeout_s=10.0)
