"""Live decisions, logged with all that they rest on, are made again just so."""

from collections import Counter
from pathlib import Path
from random import Random

import msgspec
import pytest
from structlog.testing import capture_logs

from services.global_scheduler.journal import Decision, Journal, LogStarted, read, replay
from shared.domain.instance import Role
from shared.domain.job import JobView, LengthPrediction, Phase, Slo, WhenFull
from shared.domain.prompt import PrefixDelta
from shared.domain.route import PolicySpec
from shared.errors import InvalidRequest, Overloaded, Unavailable
from tests.services.global_scheduler.conftest import Start, report

CLUSTER = {"p0": Role.PREFILL, "p1": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE, "d2": Role.DECODE}


def job(number: int, rng: Random) -> JobView:
    prediction = LengthPrediction(number % 3, 200 * (number % 3), 200 * (number % 3 + 1), 0.8, "classifier")
    return JobView(
        f"j{number}", rng.randrange(1, 900), 100, prediction=prediction, prefix=(7, 8, 9) if number % 4 else ()
    )


async def test_live_decisions_are_made_again(start: Start, tmp_path: Path) -> None:
    file, rng = tmp_path / "decisions", Random(1)
    adaptive = {"placement": "adaptive", "split": "adaptive", "dispatch": "adaptive"}
    scheduler = await start(**adaptive, policy_seed=None, decision_log=file)
    with pytest.raises(Unavailable):
        await scheduler.client.place(job(0, rng), timeout_s=5)
    await scheduler.hear(**CLUSTER)
    scheduler.state.placer.apply_prefixes("p1", PrefixDelta(1, 0, added=[7, 8, 9], starts=True))
    for number in range(120):
        await scheduler.client.place(job(number, rng), exclude=("d1",) if number % 7 == 0 else (), timeout_s=5)
        if number % 3 == 0:
            await scheduler.client.report([report(f"j{number // 2}", Phase.DECODE)], timeout_s=5)
        if number % 5 == 0:
            await scheduler.client.report([report(f"j{number // 3}", output_tokens=number + 1)], timeout_s=5)
        if number == 40:
            await scheduler.follow(split=PolicySpec("cronus"), dispatch=PolicySpec("random"))
        if number == 70:
            await scheduler.follow(split=PolicySpec("adaptive"), dispatch=PolicySpec("adaptive"))
            await scheduler.follow(split=PolicySpec("of another version"))
        if number == 90:
            scheduler.state.placer.forget_prefixes("p1")
    await scheduler.client.report([report("j1")], timeout_s=5)

    pairs = list(replay(flushed(scheduler.state.placer._journal, file)))
    assert len(pairs) == 121
    assert pairs[0][0].error == Unavailable.code
    for logged, again in pairs:
        assert again == logged
    assert len({logged.route.policy for logged, _ in pairs if logged.route}) == 1
    assert (
        len({(logged.route.prefill, logged.route.decode, logged.route.split) for logged, _ in pairs if logged.route})
        > 5
    )


async def test_refusals_and_delays_are_made_again_with_all_that_they_say(start: Start, tmp_path: Path) -> None:
    """With what was learned from outcomes before them, too."""
    file = tmp_path / "decisions"
    chat = Slo("default", 0.5, 0.05, 1.0, WhenFull.REJECT)
    batch = Slo("batch", 60.0, 1.0, 0.1, WhenFull.DELAY)
    scheduler = await start(placement="least_load", split="full", dispatch="power_of_two", decision_log=file)
    await scheduler.hear(**CLUSTER)
    codes = Counter[str]()
    for number in range(150):
        slo = batch if number % 3 == 0 else chat
        try:
            await scheduler.client.place(JobView(f"j{number}", 900, 100, slo), timeout_s=5)
        except Overloaded as refusal:
            codes[refusal.code] += bool(refusal.retry_after_s)
        if number % 10 == 9:
            missed = report(f"j{number - 9}", output_tokens=20)
            await scheduler.client.report([msgspec.structs.replace(missed, slo_met=number % 20 == 9)], timeout_s=5)
    assert codes["overloaded"] > 3
    assert codes["delayed"] > 3
    pairs = list(replay(flushed(scheduler.state.placer._journal, file)))
    assert len(pairs) == 150
    for logged, again in pairs:
        assert again == logged
    assert {logged.error for logged, _ in pairs} == {"", "overloaded", "delayed"}


def adaptive_again() -> dict[str, dict[str, str]]:
    return {kind: {"name": "adaptive"} for kind in ("split", "dispatch")}


def flushed(journal: Journal | None, file: Path) -> Path:
    assert journal is not None
    assert journal._file is not None
    journal._file.flush()
    return file


async def test_other_inputs_make_other_decisions(start: Start, tmp_path: Path) -> None:
    """What is left out of a log shows: the replay does not just repeat what it reads."""
    file, rng = tmp_path / "decisions", Random(1)
    scheduler = await start(placement="round_robin", decision_log=file)
    await scheduler.hear(**CLUSTER)
    for number in range(20):
        await scheduler.client.place(job(number, rng), timeout_s=5)
    entries = list(read(flushed(scheduler.state.placer._journal, file)))
    dropped = next(at for at, entry in enumerate(entries) if isinstance(entry, Decision))
    with Journal(tmp_path / "less", 1 << 20) as less:
        for entry in entries[:dropped] + entries[dropped + 1 :]:
            less.add(entry)
    assert any(again != logged for logged, again in replay(tmp_path / "less"))


def test_a_full_log_stops_and_says_so_and_half_an_entry_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "decisions"
    with capture_logs() as logs, Journal(file, 400) as journal:
        for number in range(100):
            journal.add(LogStarted(number))
    assert [entry["event"] for entry in logs] == ["the decision log is full; decisions are no longer logged"]
    whole = list(read(file))
    assert [entry.seed for entry in whole if isinstance(entry, LogStarted)] == list(range(len(whole)))
    assert file.stat().st_size <= 400
    file.write_bytes(file.read_bytes()[:-3])
    assert len(list(read(file))) == len(whole) - 1


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    with pytest.raises(InvalidRequest, match="does not begin like a decision log"):
        next(replay(empty))
    newer = tmp_path / "newer"
    entry = msgspec.msgpack.encode({"type": "FromALaterVersion"})
    newer.write_bytes(len(entry).to_bytes(4, "big") + entry)
    with pytest.raises(InvalidRequest, match=r"newer is not a decision log of this version: .*FromALaterVersion"):
        next(read(newer))
    with pytest.raises(InvalidRequest, match="cannot write"), Journal(tmp_path, 100):
        pass


def test_a_disk_that_takes_no_more_fails_no_request() -> None:
    """/dev/full takes what a buffer holds, and nothing after it."""
    with capture_logs() as logs, Journal(Path("/dev/full"), 1 << 20) as journal:
        for number in range(2000):
            journal.add(LogStarted(number))
    assert [entry["event"] for entry in logs] == ["decisions are no longer logged"]
