"""Admission of requests, the fair queue of jobs that wait for placement, and the table that processes share."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.admission import MAX_RETRY_S, MIN_RETRY_S, Admissions, PlacementQueue, retry_after_s
from gateway.auth import ApiKey, KeyRates
from gateway.job import Job
from gateway.settings import BUILT_IN, GatewaySettings, SloClass
from gateway.table import Counts, Kind, LocalTable, ServedTokens, SharedTable, make_table, shared_table
from shared.domain.job import Phase, WhenFull
from shared.domain.route import InstanceRef, Route
from shared.errors import Busy, Delayed, InvalidRequest, Overloaded, PolyphaseError
from tests.gateway.cluster import PROMPT, Cluster, make_job, until
from tests.gateway.processes import Process, processes, use_table

BATCH = BUILT_IN["batch"].as_slo("batch")


def settings_of(**changes: Any) -> GatewaySettings:
    return GatewaySettings(schedulers=("tcp://127.0.0.1:1",), model="m", **changes)


# The fair queue


def no_route(cluster: Cluster, error: PolyphaseError) -> list[PolyphaseError]:
    """The scheduler's answer until the list is cleared."""
    errors = [error]
    cluster.no_room = lambda _: errors[0] if errors else None
    return errors


@pytest.mark.parametrize("batch", [True, False])
async def test_only_the_first_job_of_a_queue_requests_a_place_and_the_next_follows(
    cluster: Cluster, batch: bool
) -> None:
    """A batch job that finds others waiting requests none before its turn; jobs that come at once request one each."""
    errors = no_route(cluster, Delayed("later", cause="room", retry_after_s=0.01))
    running = []
    for number in range(3):
        running.append(asyncio.create_task(cluster.completes(job_id=f"j{number}", slo=BATCH if batch else None)))
        if batch:
            await until(lambda: len(cluster.places) > len(running))
    await until(lambda: len(cluster.places) >= 6)
    others = [place.job.job_id for place in cluster.places if place.job.job_id != "j0"]
    assert others == ([] if batch else ["j1", "j2"])
    assert all(place.job.can_wait for place in cluster.places)
    errors.clear()
    jobs = await asyncio.gather(*running)
    placed = list(dict.fromkeys(place.job.job_id for place in reversed(cluster.places)))
    assert placed == ["j2", "j1", "j0"]
    assert [job.timeline.decisions[0].kind for job in jobs] == ["delay", *(["placement"] if batch else ["delay"]) * 2]


async def test_a_job_that_is_cancelled_leaves_its_turn_to_the_next(cluster: Cluster) -> None:
    errors = no_route(cluster, Delayed("later", retry_after_s=0.01))
    jobs = [make_job(PROMPT, 5, slo=BATCH)[0] for _ in range(3)]
    running = [cluster.starts(job) for job in jobs]
    await until(lambda: len(cluster.places) >= 2)
    for task in running[:2]:
        task.cancel()
    await asyncio.gather(*running[:2], return_exceptions=True)
    errors.clear()
    await running[2]
    assert [job.finished for job in jobs] == [False, False, True]


SHORT_QUEUE = {"slo": {"batch": SloClass(when_full=WhenFull.DELAY, queue_s=0.1)}}


@pytest.mark.parametrize("cluster", [SHORT_QUEUE], indirect=True)
async def test_patience_in_the_queue_ends_in_a_429(cluster: Cluster) -> None:
    no_route(cluster, Delayed("later", retry_after_s=0.01))
    job, _ = make_job(PROMPT, 5, slo=BATCH)
    with pytest.raises(Overloaded, match="'batch'") as refused:
        await cluster.pipeline.run(job)
    assert (refused.value.http_status, refused.value.cause, job.phase) == (429, "queue", Phase.FAILED)
    assert refused.value.retry_after_s


async def test_a_refusal_is_not_retried_and_keeps_its_time_over_the_wire(cluster: Cluster) -> None:
    no_route(cluster, Overloaded("full", cause="ttft", retry_after_s=7.5))
    with pytest.raises(Overloaded) as refused:
        await cluster.completes()
    assert (refused.value.retry_after_s, len(cluster.places)) == (7.5, 1)


async def test_the_view_of_a_job_says_that_it_has_begun_and_how_many_tokens_are_expected(cluster: Cluster) -> None:
    cluster.prefill.dispatches = False
    await cluster.completes(slo=BATCH)
    assert [request.job.begun for request in cluster.places] == [False, True]
    job: Job = make_job(PROMPT, 100)[0]
    assert job.view().answer_tokens == 0
    job.expected_tokens, job.tokens = 40, [1] * 10
    assert job.view().answer_tokens == 30
    job.tokens = [1] * 80
    assert job.view().answer_tokens == 20, "it is longer than expected: a quarter more"


ROUTE = Route(None, InstanceRef("d", 1, "tcp://127.0.0.1:2"), 0, policy="fixed")


def job_of(caller: str, prompt: list[int] = PROMPT) -> Job:
    job = make_job(prompt, 5, slo=BATCH)[0]
    return replace(job, spec=replace(job.spec, caller=caller))


async def test_a_placed_prompt_is_charged_before_the_next_turn_is_decided() -> None:
    queue, order = PlacementQueue(), list[str]()
    may_place = asyncio.Event()
    for caller in "ab":
        queue.shares.came(caller, 0.0)

    async def place(job: Job) -> Route:
        order.append(job.spec.caller)
        await may_place.wait()
        return ROUTE

    async with asyncio.TaskGroup() as group:
        for caller in "aabb":
            group.create_task(queue.place(job_of(caller), place, 60.0))
        await until(lambda: queue.waiting("batch") == 4)
        may_place.set()
    assert "".join(order) == "abab"
    assert queue.waiting("batch") == 0


async def test_a_job_that_was_delayed_on_its_way_in_requests_no_place_before_the_delay_is_over() -> None:
    """Its turn in the empty queue is no reason to request a place at once again."""
    queue, requests = PlacementQueue(), list[Job]()

    async def place(job: Job) -> Route:
        requests.append(job)
        raise Delayed("later", retry_after_s=3600.0)

    queue.shares.came("", 0.0)
    waits = asyncio.create_task(queue.place(make_job(PROMPT, 5)[0], place, 60.0))
    await until(lambda: queue.is_waiting("default"))
    for _ in range(5):  # a turn would take one or two passes of the loop
        await asyncio.sleep(0)
    assert len(requests) == 1
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)
    assert queue.waiting("default") == 0


# Admission


def test_the_time_to_retry_after_follows_the_measured_drain() -> None:
    now = 0.0
    counts = Counts(LocalTable(), Kind.OTHERS, lambda: now)
    now = 1.0
    assert retry_after_s(1, counts.left_per_s()) == MAX_RETRY_S
    for number in range(200):
        now = number / 10
        counts.job_left()
    now = 20.0
    assert retry_after_s(50, counts.left_per_s()) == pytest.approx(5.0, rel=0.2)
    assert retry_after_s(1, counts.left_per_s()) == MIN_RETRY_S
    now = 60.0
    assert retry_after_s(50, counts.left_per_s()) > 20.0, "no job has left since"


def test_jobs_that_can_be_delayed_leave_the_others_their_room() -> None:
    admissions = Admissions(settings_of(max_queued_jobs=2, max_delayed_jobs=3), ("a",))
    requests = [admissions.for_class("batch").admit("a") for _ in range(3)]
    with pytest.raises(Busy):
        admissions.for_class("batch").admit("a")
    assert admissions.for_class("default").admit("a")
    assert admissions.jobs == len(requests) + 1


def test_a_key_that_is_added_changes_the_shares() -> None:
    callers = {"a": 1.0}
    admission = Admissions(settings_of(max_queued_jobs=10), callers).for_class("default")
    assert admission.jobs_a_body == 10
    callers["b"] = 1.0
    assert admission.jobs_a_body == 5
    for _ in range(5):
        admission.admit("a")
    with pytest.raises(Busy, match="5 jobs of 'a' are waiting and this request adds 1; its share is 5"):
        admission.admit("a")


def test_no_caller_takes_all_the_room_for_tokens() -> None:
    admission = Admissions(settings_of(max_queued_tokens=1000), ("greedy", "modest")).for_class("default")
    seats = [admission.admit("greedy").start_job(120) for _ in range(4)]
    message = "480 prompt tokens of 'greedy' are waiting and this job adds 120; its share is 500"
    with pytest.raises(Busy, match=message) as refused:
        admission.admit("greedy").start_job(120)
    assert refused.value.retry_after_s
    big = admission.admit("modest").start_job(515)  # its first one may be over the share
    with pytest.raises(Busy, match="995 prompt tokens are waiting"):
        admission.admit("modest").start_job(6)
    for seat in (*seats, big):
        seat.leave()
    counts = admission.counts
    assert (counts.tokens, counts.tokens_of("greedy"), counts.tokens_of("modest")) == (0, 0, 0)


def test_no_caller_holds_all_the_bytes() -> None:
    held = Admissions(settings_of(max_held_bytes=1000), ("greedy", "modest")).held_bytes
    with held.charged("greedy") as first, held.charged("greedy") as second, held.charged("modest") as other:
        first(400)
        with pytest.raises(Busy, match="400 bytes of 'greedy' are held and this one has 101; its share is 500"):
            second(101)
        other(550)  # its first one
        with (
            pytest.raises(Busy, match="950 bytes are held and this one has 51; the limit is 1000"),
            held.charged("third") as third,
        ):
            third(51)
    assert held.total == 0
    with held.charged("greedy") as alone:
        alone(5000)  # no request is before it
    assert held.total == 0


# The table that processes share


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "gateways.table"
    make_table(path, 2, 2)
    return path


@pytest.fixture
def tables(path: Path) -> Iterator[list[SharedTable]]:
    tables = [SharedTable(path, number) for number in (0, 1)]
    yield tables
    for table in tables:
        with suppress(OSError):  # closed already
            table.close()


def test_limits_hold_for_all_processes_together_and_a_killed_one_leaves_nothing(path: Path) -> None:
    with processes(use_table, (path, 0, 10), (path, 1, 10)) as (zero, one):
        for number in range(5):  # the share of a caller is half of ten
            assert (zero, one)[number % 2].ask("admit", "a") == (number + 1, 0)
        message, retry_s = one.ask("admit", "a")
        assert message.startswith("5 jobs of 'a' are waiting")
        assert retry_s == 60.0
        assert zero.ask("admit", "b") == (6, 0)
        assert zero.ask("start_job", 900) == (6, 900)
        message = "900 prompt tokens are waiting and this job adds 200; the limit is 1000"
        assert one.ask("start_job", 200)[0] == message
        assert Process(use_table, path, 1, 10).ready == f"shared_table: {path}: another process is number 1 already"
        zero.kill()
        with processes(use_table, (path, 0, 10)) as (successor,):
            assert successor.ask("admit", "b") == (3, 0)
            assert one.ask("admit", "a") == (4, 0)
            assert successor.ask("lock") == "locked"
            assert one.ask("use_rate") == ("another gateway process does not respond; try again", 1.0)
            successor.kill()
            assert one.ask("use_rate") == (4, 0)


def test_processes_that_admit_at_once_keep_the_limits(path: Path) -> None:
    """Of two requests for the last place at once both may be refused; so it may be one fewer."""
    with processes(use_table, (path, 0, 2000), (path, 1, 2000)) as both:
        for each in both:
            each.connection.send(("repeat", 1000, "admit", "a"))
        assert 999 <= sum(each.receive() for each in both) <= 1000
        for each in both:
            each.connection.send(("repeat", 500, "use_rate"))
        assert sum(each.receive() for each in both) == 40


def test_kinds_of_jobs_are_counted_apart_and_jobs_that_leave_are_one_rate(tables: list[SharedTable]) -> None:
    counts = [Counts(each, Kind.OTHERS, lambda: 100.0) for each in tables]
    delayed = Counts(tables[0], Kind.DELAYED, lambda: 100.0)
    counts[0].add_jobs("a", 2)
    counts[1].add_jobs("a", 3)
    delayed.add_jobs("a", 1)
    assert [(each.jobs, each.own_jobs) for each in (*counts, delayed)] == [(5, 2), (5, 3), (1, 1)]
    assert counts[0].jobs_of("a") == 5
    counts[0].add_tokens("a", 20)
    counts[1].add_tokens("a", 30)
    delayed.add_tokens("a", 7)
    assert [(each.tokens, each.tokens_of("a")) for each in (*counts, delayed)] == [(50, 50), (50, 50), (7, 7)]
    counts[0].job_left()
    alone = counts[1].left_per_s()
    counts[1].job_left()
    assert alone > 0
    assert counts[0].left_per_s() == pytest.approx(2 * alone, rel=0.1)
    assert delayed.left_per_s() == 0.0
    tables[0].close()
    assert (counts[1].jobs, counts[1].jobs_of("a"), counts[1].tokens_of("a")) == (3, 3, 30)


def test_processes_share_rates_served_tokens_and_the_limit_without_keys(tables: list[SharedTable]) -> None:
    first, second = (ServedTokens(table) for table in tables)
    first.note("a", 3.0)
    first.note("a", 4.5)
    second.note("b", 1.0)
    assert [(second.elsewhere(name), first.elsewhere(name)) for name in "ab"] == [(7.5, 0.0), (0.0, 1.0)]
    rates, key = [KeyRates(table, lambda: 100.0) for table in tables], ApiKey("a", "", requests_per_s=0.5, burst=2)
    rates[0].check(key)
    rates[1].check(key)
    with pytest.raises(Busy, match=r"'a' is over its limit of 0\.5 requests/s") as refused:
        rates[0].check(key)
    assert refused.value.retry_after_s == pytest.approx(2.0)
    rates[0].check(ApiKey("free", ""))
    one, other = (Admissions(settings_of(max_queued_jobs=2), (), table).for_class("default") for table in tables)
    with one.admit(""), other.admit(""), pytest.raises(Busy):
        one.admit("")
    assert (one.counts.jobs, other.counts.own_jobs) == (0, 0)
    tables[0].close()
    assert second.elsewhere("a") == 0.0


def test_more_callers_than_rows_are_an_error(tables: list[SharedTable]) -> None:
    assert len({tables[0].row(str(number)) for number in range(68)}) == 68
    assert tables[0].row("7") == tables[1].row("7")
    with pytest.raises(InvalidRequest, match="all 68 rows of callers are taken"):
        tables[0].row("one more")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory; `polyphase up` makes it at its start"),
        (b"", "it is damaged, or no table"),
        (b"x" * 4096, "it is damaged, or no table"),
        (lambda good: good[:-8], "it is damaged: its size is not the one that its head states"),
        (lambda good: good[:8] + b"\x09" + good[9:], "it has version 9"),
    ],
)
def test_a_file_that_is_no_table_is_named(path: Path, content: Any, message: str) -> None:
    good = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content(good) if callable(content) else content)
    with pytest.raises(InvalidRequest, match=f"^shared_table: {path}: {message}"):
        SharedTable(path, 0)


def test_a_table_is_its_owners_and_for_a_number_of_processes(path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == [path.name]
    with pytest.raises(InvalidRequest, match="it is for 2 processes, and this is number 2 from 0"):
        SharedTable(path, 2)
    settings = settings_of(processes=3, process=1, own_port=1, shared_table=path)
    with pytest.raises(InvalidRequest, match="it is for 2 processes, not 3"), shared_table(settings):
        pass
    with pytest.raises(InvalidRequest, match="cannot be made: Not a directory"):
        make_table(path / "none" / "such", 2, 0)
