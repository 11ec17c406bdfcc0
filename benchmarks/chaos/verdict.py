"""The cluster monitor's verdict during a fault: it must name the problem, and be good again after the fault.

The fields of the verdict are compared with what the scenario expects, with the states of the instances, and with the
requests that the clients have counted.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from benchmarks.chaos.under_test import SuiteUnderTest
from benchmarks.suite import until_found
from services.launcher.suite import until
from shared.domain.instance import Role
from shared.domain.verdict import Count, Level, Problem, Stage, Verdict
from shared.wire.clients.monitor import MonitorClient

Hold = Callable[[SuiteUnderTest], AbstractAsyncContextManager[object]]  # a fault for the length of a block
NAMED_S, GOOD_S = 60.0, 60.0  # the longest waits
LOOKS, BETWEEN_S = 3, 1.0  # verdicts that are compared, the first that names the problem among them
_POLL_S = 0.2
_REPORT_S = 6.0  # the longest time from the end of a request to the monitor: refusals are reported every 3 s
_STAMP_S = 1.0  # a scheduler's time of a request's end is so much later than the client's
_INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class Expected:
    """The problem that the verdict must name, by its code. None: any value passes."""

    problem: str
    level: Level = Level.DEGRADED
    stage: Stage | None = None
    instances: tuple[str, ...] | None = None
    value: tuple[float, float] = (0.0, _INFINITE)  # the bounds of the measured value
    states: Mapping[str, str] = field(default_factory=dict)  # of the instances that are not ready meanwhile
    counts_requests: bool = True  # the reports of all requests reach the monitor


async def check_verdict(hold: Hold, expected: Expected, suite: SuiteUnderTest) -> None:
    """Hold the fault until the problem is named and compared; then wait for a good verdict.

    Notes the times of both, and the number of comparisons. Raises AssertionError that lists all differences, and
    DeadlineExceeded.
    """
    suite.outage_s = _INFINITE  # clients may have to wait, or get errors, for as long as the fault is held
    differences: list[str] = []
    compared = 0
    async with suite.monitor() as monitor:
        await _until_good(monitor, len(suite.state.instance_ids))
        began = time.monotonic()
        async with hold(suite):
            verdict, problem = await _until_named(monitor, expected.problem)
            suite.figures["alarm_s"] = round(time.monotonic() - began, 1)
            cause = problem.cause or "no cause"
            suite.notes.append(f"named after {suite.figures['alarm_s']} s: {verdict.headline} ({cause})")
            for look in range(LOOKS):
                if look:
                    await asyncio.sleep(BETWEEN_S)
                    verdict = await _verdict(monitor)
                fields = compare(verdict, expected, suite)
                compared += len(fields)
                differences += [f"{name} is {got}, not {want}" for name, (want, got, ok) in fields.items() if not ok]
        undone = time.monotonic()
        await _until_good(monitor, len(suite.roles))
        suite.figures["clear_s"] = round(time.monotonic() - undone, 1)
    suite.notes.append(f"good again after {suite.figures['clear_s']} s")
    suite.figures |= {"figures": compared, "wrong": len(differences)}
    if differences:
        raise AssertionError("; ".join(dict.fromkeys(differences)))


Fields = dict[str, tuple[object, object, bool]]  # name → expected value, reported value, whether they agree


def compare(verdict: Verdict, expected: Expected, suite: SuiteUnderTest) -> Fields:
    """The fields of a verdict beside their expected values."""
    problem = _problem(verdict, expected.problem)
    levels = {each.level for each in verdict.problems}
    worst = Level.DOWN if Level.DOWN in levels else Level.DEGRADED
    fields: Fields = {
        "problem": (expected.problem, verdict.headline, problem is not None),
        "level of the verdict": (worst, verdict.level, verdict.level is worst),
    }
    if problem is not None:
        low, high = expected.value
        reported = problem.value or 0.0
        fields["value"] = (f"{low:g}..{high:g}", reported, low <= reported <= high)
        for name in ("level", "stage", "instances"):
            want, got = getattr(expected, name), getattr(problem, name)
            fields[name] = (want, got, want in (None, got))
    for role, count in counts(suite.roles, expected.states).items():
        for name in Count.__struct_fields__:
            want, got = getattr(count, name), getattr(verdict.counts[role], name)
            fields[f"{role.value} {name}"] = (want, got, want == got)
    least, most = _requests(verdict, suite)
    ok = least <= verdict.requests <= most or not expected.counts_requests
    fields["requests"] = (f"{least}..{most}", verdict.requests, ok)
    return fields


def counts(roles: Mapping[str, Role], states: Mapping[str, str]) -> dict[Role, Count]:
    """The instances by role and state, where all but those in `states` are ready."""

    def count(role: Role) -> Count:
        found = Counter(states.get(name, "ready") for name, its in roles.items() if its is role)
        return Count(expected=found.total(), **found)

    return {role: count(role) for role in Role}


def _requests(verdict: Verdict, suite: SuiteUnderTest) -> tuple[float, float]:
    """The least and the largest number of requests that ended in the verdict's window, by the clients' clocks."""
    assert suite.load is not None
    to_unix_s = time.time() - time.monotonic()
    answers = [(answer.began_mono + to_unix_s, answer.ended_mono + to_unix_s) for answer in suite.load.answered]
    begin_s, end_s = verdict.time_s - verdict.window_s, verdict.time_s
    least = sum(begin_s + _STAMP_S <= ended_s <= end_s - _REPORT_S for _, ended_s in answers)
    most = sum(begin_s - _REPORT_S <= ended_s <= end_s for _, ended_s in answers)
    whole = bool(answers) and min(answers)[0] < begin_s - _REPORT_S  # the window has requests of this load alone
    # At the gateway a request may end before its client has noted the end.
    return least, most + suite.bed.users if whole else _INFINITE


def _problem(verdict: Verdict, code: str) -> Problem | None:
    return next((problem for problem in verdict.problems if problem.what == code), None)


async def _verdict(monitor: MonitorClient) -> Verdict:
    return await monitor.verdict()


async def _until_named(monitor: MonitorClient, code: str) -> tuple[Verdict, Problem]:
    async def find() -> tuple[Verdict, Problem] | None:
        verdict = await _verdict(monitor)
        problem = _problem(verdict, code)
        return None if problem is None else (verdict, problem)

    return await until_found(find, NAMED_S, f"the verdict to name {code}", _POLL_S)


async def _until_good(monitor: MonitorClient, ready: int) -> None:
    """Wait for a verdict with requests, so many ready instances, and no problem but that an instance is missing."""

    async def good() -> bool:
        verdict = await _verdict(monitor)
        problems = {problem.what for problem in verdict.problems} - {"instances_missing"}
        return bool(verdict.requests and not problems) and sum(c.ready for c in verdict.counts.values()) == ready

    await until(good, GOOD_S, "the verdict to be good", poll_s=_POLL_S)
