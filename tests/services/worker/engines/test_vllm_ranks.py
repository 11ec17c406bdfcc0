"""Data-parallel ranks that compute every forward pass together: no order of events leaves one waiting for another."""

import queue
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import pytest

from services.worker.engines.vllm_ranks import CoupledRanks, Passes
from shared.errors import EngineFailed
from tests.ports import free_port

PATIENCE_S = 30.0


@dataclass(frozen=True)
class State:
    """Of all ranks: passes begun, announced, whether it is within one, and requests left, each of one pass; and what is
    under way from one to another.
    """

    ranks: tuple[tuple[int, int, bool, int], ...]
    under_way: tuple[tuple[tuple[int, int], tuple[int, ...]], ...] = ()

    def after(self, rank: int, passes: Passes, within: bool, work: int, sent: dict[tuple[int, int], int]) -> "State":
        ranks = list(self.ranks)
        ranks[rank] = (passes.begun, passes.announced, within, work)
        under_way = dict(self.under_way)
        for path, number in sent.items():
            under_way[path] = (*under_way.get(path, ()), number)
        return State(tuple(ranks), tuple(sorted(under_way.items())))


def successors(state: State) -> Iterator[State]:
    """As the engine's thread and the thread that listens act, each between any two acts of others."""
    size = len(state.ranks)
    for rank, (begun, announced, within, work) in enumerate(state.ranks):
        passes = Passes(begun, announced)
        if within:
            if all(each[0] >= begun for each in state.ranks):  # the pass needs all of them
                yield state.after(rank, passes, False, work, {})
        elif work or passes.behind:
            announces = passes.begin()
            to = ([other for other in range(size) if other != rank] if rank == 0 else [0]) if announces else []
            yield state.after(rank, passes, True, max(0, work - 1), {(rank, other): passes.begun for other in to})
            if work and begun < announced:  # its requests wait for KV: it joins with a dummy batch
                passes = Passes(begun, announced)
                assert not passes.begin()
                yield state.after(rank, passes, True, work, {})
    for path, numbers in state.under_way:
        if numbers:
            sender, rank = path
            begun, announced, within, work = state.ranks[rank]
            passes = Passes(begun, announced)
            news = passes.hear(numbers[0])
            others = [other for other in range(1, size) if other != sender] if rank == 0 and news else []
            left = replace(state, under_way=tuple((p, n[1:] if p == path else n) for p, n in state.under_way))
            yield left.after(rank, passes, within, work, {(0, other): numbers[0] for other in others})


@pytest.mark.parametrize("work", [(1, 0), (2, 3), (1, 0, 1), (2, 1, 1)])
def test_no_interleaving_leaves_a_rank_waiting(work: tuple[int, ...]) -> None:
    first = State(tuple((0, 0, False, each) for each in work))
    seen, left, ends = {first}, [first], 0
    while left:
        state = left.pop()
        found = list(successors(state))
        if not found:
            ends += 1
            assert len({each[:2] for each in state.ranks}) == 1, state  # all have executed all passes
            assert all(not within and not requests for _, _, within, requests in state.ranks), state
            assert max(work) <= state.ranks[0][0] <= sum(work)
        new = [each for each in found if each not in seen]
        seen.update(new)
        left.extend(new)
    assert ends


class Rank:
    """One rank in a thread that does what an engine's thread does; a pass is a barrier of all ranks."""

    def __init__(self, number: int, size: int, port: int, barrier: threading.Barrier) -> None:
        self.news = threading.Event()
        self.lost: queue.Queue[str] = queue.Queue()
        self.ranks = CoupledRanks(number, size, port, self.news.set, self.lost.put)
        self.requests: queue.Queue[int] = queue.Queue()  # passes of each
        self.own = 0
        self._barrier = barrier
        self._stopping = False

    def submit(self, passes: int) -> None:
        self.requests.put(passes)
        self.news.set()

    def stop(self) -> None:
        self._stopping = True
        self.news.set()

    def run(self) -> int:
        """Returns how many passes it has executed."""
        self.ranks.meet(PATIENCE_S)
        left = 0
        while not self._stopping or left or not self.requests.empty():
            self.news.clear()
            while not self.requests.empty():
                left += self.requests.get()
            if left:
                self._execute()
                left, self.own = left - 1, self.own + 1
            elif self.ranks.passes.behind:
                self._execute()
            elif not self._stopping:
                assert self.news.wait(PATIENCE_S)
        self.ranks.leave()
        while not self.ranks.may_end:
            self.news.clear()
            if self.ranks.passes.behind:
                self._execute()
            elif not self.ranks.may_end:
                assert self.news.wait(PATIENCE_S)
        self.ranks.done()
        while not self.ranks.all_done:
            self.news.clear()
            if not self.ranks.all_done:
                assert self.news.wait(PATIENCE_S)
        self.ranks.close()
        return self.ranks.passes.begun

    def _execute(self) -> None:
        self.ranks.begin_pass()
        self._barrier.wait(PATIENCE_S)


@contextmanager
def started(size: int) -> Iterator[tuple[list[Rank], list["Future[int]"]]]:
    port, barrier = free_port(), threading.Barrier(size)
    ranks = [Rank(number, size, port, barrier) for number in range(size)]
    with ThreadPoolExecutor(size) as pool:
        try:
            yield ranks, [pool.submit(rank.run) for rank in ranks]
        finally:
            for rank in ranks:
                rank.stop()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_execute_the_same_passes_whoever_has_requests(size: int) -> None:
    rng = random.Random(size)
    with started(size) as (ranks, ends):
        for _ in range(100):
            rng.choice(ranks).submit(rng.choice((1, 2, 20)))
            if rng.random() < 0.3:  # at times all have become idle, or are about to
                threading.Event().wait(rng.random() * 0.003)
    passes = {each.result() for each in ends}
    assert len(passes) == 1
    assert max(rank.own for rank in ranks) <= passes.pop() <= sum(rank.own for rank in ranks)
    assert all(rank.lost.empty() for rank in ranks)


@pytest.mark.parametrize("dead", [0, 2])
def test_all_hear_of_a_rank_that_dies(dead: int) -> None:
    size, port, news = 3, free_port(), threading.Event()
    lost: list[queue.Queue[str]] = [queue.Queue() for _ in range(size)]
    ranks = [CoupledRanks(number, size, port, news.set, lost[number].put) for number in range(size)]
    with ThreadPoolExecutor(size) as pool:
        for met in [pool.submit(rank.meet, PATIENCE_S) for rank in ranks]:
            met.result()
    ranks[dead].close()
    for number in {0, 1, 2} - {dead}:
        assert f"rank {dead} " in lost[number].get(timeout=PATIENCE_S)
        ranks[number].close()
    assert lost[dead].empty()


def test_a_rank_that_ends_before_all_have_come_is_awaited_again() -> None:
    port = free_port()
    later = CoupledRanks(0, 2, port, lambda: None, print)
    with ThreadPoolExecutor(2) as pool:
        early = CoupledRanks(1, 2, port, lambda: None, print)
        found = pool.submit(early.meet, PATIENCE_S)
        with socket.create_server(("127.0.0.1", port)) as former:  # a rank 0 that ends
            former.accept()[0].close()
        met = pool.submit(later.meet, PATIENCE_S)
        for each in (found, met):
            each.result()
    for rank in (later, early):
        rank.close()


def test_ranks_that_do_not_come_are_named() -> None:
    port = free_port()
    with pytest.raises(EngineFailed, match=r"4 data-parallel ranks, .* within 0 s: 1, 2, 3: see their logs"):
        CoupledRanks(0, 4, port, lambda: None, print).meet(0.2)
    with pytest.raises(EngineFailed, match=f"rank 1 of 2 data-parallel ranks waited 0 s at port {port} for rank 0"):
        CoupledRanks(1, 2, port, lambda: None, print).meet(0.2)


def test_something_else_that_connects_is_no_rank() -> None:
    port = free_port()
    ranks = [CoupledRanks(number, 2, port, lambda: None, print) for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        met = [pool.submit(ranks[0].meet, PATIENCE_S)]
        while True:
            with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), PATIENCE_S) as other:
                other.sendall(b"GET / HTTP/1")
                assert not other.recv(1)
                break
        met.append(pool.submit(ranks[1].meet, PATIENCE_S))
        for each in met:
            each.result()
    for rank in ranks:
        rank.close()
