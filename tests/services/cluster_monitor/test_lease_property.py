"""No two monitors act at the same time, whatever becomes of the statements of their leases.

The leases and their SQL statements are the real ones. The database is one SQLite connection in memory, and the way to
it is made of faults: statements and answers that are lost, delayed or doubled, and times in which it cannot be reached.
Time is the event loop's and passes only while all tasks wait, so that a run is decided by its faults alone.
"""

import asyncio
import selectors
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Executable, RowMapping, create_engine, delete
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import StaticPool

from services.cluster_monitor.lease import NAME, Lease
from shared.store.lease import LeaseStore
from shared.store.tables import leases

LENGTH_S = 1.0
PATIENCE_S = LENGTH_S / 3
RUN_S = 12.0
RATES = st.floats(1.0, 1.08)  # of clocks: they agree within a tenth


@dataclass(frozen=True)
class Fault:
    """What becomes of one statement. None: it, or its answer, never arrives. twice_s: when it is carried out again."""

    there_s: float | None = 0.001
    back_s: float | None = 0.001
    twice_s: float | None = None
    patient: bool = True  # the statement ends with an error after PATIENCE_S


SOUND, LOST_ANSWER, LOST = Fault(), Fault(back_s=None), Fault(there_s=None)
RENEWED = (
    15  # statements of a monitor that begins alone: it waits for the lease's length, takes the lease, and renews it
)
DELAYS = st.floats(0.0, 2.5 * LENGTH_S)
FAULTS = st.one_of(
    st.just(SOUND),
    st.just(LOST_ANSWER),
    st.just(LOST),
    st.builds(Fault, there_s=DELAYS, back_s=DELAYS, patient=st.booleans()),
    st.builds(Fault, twice_s=DELAYS),
    st.builds(Fault, back_s=st.none(), twice_s=DELAYS),
)


@dataclass(frozen=True)
class Candidate:
    """One monitor. faults: of its statements from the first on; later ones are sound. away: times, by the loop's clock,
    in which it does not reach the database.
    """

    faults: tuple[Fault, ...] = ()
    away: tuple[tuple[float, float], ...] = ()
    rate: float = 1.0


AWAY = st.tuples(st.floats(0.0, RUN_S), st.floats(0.1, 3 * LENGTH_S)).map(lambda at: (at[0], at[0] + at[1]))
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # to make a failing run smaller takes minutes


def candidates_with(faults: st.SearchStrategy[Fault]) -> st.SearchStrategy[Candidate]:
    """Monitors whose statements go wrong from some time on, perhaps until the end."""
    drawn = st.builds(
        lambda sound, some, lost: (*(SOUND,) * sound, *some, *(LOST,) * lost),
        st.integers(0, RENEWED + 3),
        st.lists(faults, max_size=20),
        st.integers(0, 20),
    )
    return st.builds(Candidate, faults=drawn, away=st.lists(AWAY, max_size=3).map(tuple), rate=RATES)


CANDIDATES = candidates_with(FAULTS)
LOSING = candidates_with(st.sampled_from([SOUND, LOST_ANSWER, LOST]))


class Virtual(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer. `on_turn` is called before each jump and after it."""

    def __init__(self) -> None:
        super().__init__(_Jumping(self))
        self.now_s = 1000.0
        self.on_turn: Callable[[], None] = lambda: None

    def time(self) -> float:
        return self.now_s


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: Virtual) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.on_turn()
        if timeout:
            self._loop.now_s += timeout
            self._loop.on_turn()
        return super().select(0)


class Faulty(LeaseStore):
    """A store whose statements reach the database as its candidate's faults say."""

    def __init__(self, connection: Connection, candidate: Candidate, began_s: float) -> None:
        super().__init__("sqlite:///unused.db", NAME, PATIENCE_S)
        self._connection_in_memory, self._candidate, self._began_s = connection, candidate, began_s
        self._faults = iter(candidate.faults)
        self._under_way: set[asyncio.Task[tuple[int, RowMapping | None]]] = set()

    async def _execute(self, statement: Executable) -> tuple[int, RowMapping | None]:
        fault, loop = next(self._faults, SOUND), asyncio.get_running_loop()
        if any(begin <= loop.time() - self._began_s < end for begin, end in self._candidate.away):
            raise OperationalError("", None, OSError("out of reach"))
        if fault.there_s is None:
            await asyncio.sleep(PATIENCE_S)
            raise TimeoutError("the statement was lost")
        if fault.twice_s is not None:
            self._later(fault.twice_s, statement)
        there = self._later(fault.there_s, statement)
        async with asyncio.timeout(PATIENCE_S if fault.patient else None):
            found = await asyncio.shield(there)
            if fault.back_s is None:
                await asyncio.sleep(PATIENCE_S)
                raise TimeoutError("the answer was lost")
            await asyncio.sleep(fault.back_s)
        return found

    def _later(self, delay_s: float, statement: Executable) -> asyncio.Task[tuple[int, RowMapping | None]]:
        async def carry_out() -> tuple[int, RowMapping | None]:
            await asyncio.sleep(delay_s)
            done = self._connection_in_memory.execute(statement)
            return done.rowcount, done.mappings().first() if done.returns_rows else None

        task = asyncio.get_running_loop().create_task(carry_out())
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[tuple[int, RowMapping | None]]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # of a doubled INSERT, perhaps, whose first one was carried out


@pytest.fixture(scope="module")
def connection() -> Iterator[Connection]:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as opened:
        leases.create(opened)
        yield opened
    engine.dispose()


@dataclass
class Seen:
    """What a run has shown: the epochs in the order in which they acted, and whether any monitor acts at its end."""

    epochs: list[int]
    acts: bool


def run(connection: Connection, candidates: list[Candidate], removed_s: float | None = None) -> Seen:
    """Let the candidates run for RUN_S; fails where two act. removed_s: when the row is lost."""
    connection.execute(delete(leases))
    loop = Virtual()
    made: list[Lease] = []
    epochs: list[int] = []

    def look() -> None:
        acting = [lease for lease in made if lease.acting]
        assert len(acting) <= 1, f"two act, {loop.now_s - 1000.0:.3f} s after the beginning"
        if acting and acting[0].epoch not in epochs[-1:]:
            epochs.append(acting[0].epoch)

    def clock(rate: float) -> float:
        return loop.now_s * rate

    async def clusters() -> None:
        for number, one in enumerate(candidates):
            store = Faulty(connection, one, loop.now_s)
            made.append(Lease(store, f"m{number}", "", LENGTH_S, clock=partial(clock, one.rate)))
        tasks = [loop.create_task(lease.run()) for lease in made]
        if removed_s is not None:
            loop.call_later(removed_s, connection.execute, delete(leases))
        await asyncio.sleep(RUN_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    loop.on_turn = look
    failed: list[BaseException] = []
    loop.set_exception_handler(lambda _, context: failed.append(context["exception"]))
    try:
        loop.run_until_complete(clusters())
        assert not failed
        return Seen(epochs, any(lease.acting for lease in made))
    finally:
        loop.on_turn = lambda: None
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def test_a_renewal_whose_answer_was_lost_is_not_repeated_under_its_number(connection: Connection) -> None:
    """The holder's next renewal is confirmed, and then the database is out of its reach: the other one takes over."""
    for renewal in range(RENEWED, RENEWED + 4):
        lossy = Candidate((*(SOUND,) * renewal, LOST_ANSWER, SOUND, *(LOST,) * 100))
        assert run(connection, [lossy, Candidate(away=((0.0, 0.5),))]).epochs[1:]


@settings(max_examples=80, deadline=None, phases=PHASES)
@given(st.lists(CANDIDATES, min_size=2, max_size=3))
@example([Candidate(), Candidate()])
def test_no_two_act_and_epochs_rise(connection: Connection, candidates: list[Candidate]) -> None:
    seen = run(connection, candidates)
    assert seen.epochs == sorted(set(seen.epochs))


@settings(max_examples=30, deadline=None, phases=PHASES)
@given(st.lists(LOSING, min_size=2, max_size=3), st.floats(0.5, RUN_S - 1))
@example([Candidate(), Candidate((SOUND,), rate=1.0596832760908907)], 1.0488974019803654)  # between two reads
def test_no_two_act_where_the_row_is_lost_once(
    connection: Connection, candidates: list[Candidate], removed_s: float
) -> None:
    """Without statements that arrive late: an INSERT from before the loss could write a row of the past again."""
    run(connection, candidates, removed_s)


def test_without_faults_one_acts_and_goes_on(connection: Connection) -> None:
    seen = run(connection, [Candidate(), Candidate(), Candidate()])
    assert seen.acts
    assert len(seen.epochs) == 1
