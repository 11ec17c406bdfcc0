"""What steps compute: the scheduler that the simulator and the emulated engine drive, one step a call."""

from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.instance import Role
from shared.domain.job import JobView, Slo
from shared.domain.rates import StepForm, StepRates
from shared.policy.decode_admission import Greedy
from shared.policy.prefill_order import Fcfs, Ljf, PrefillOrder, Sjf
from shared.policy.step_budget import FLOOR_TOKENS, MARGIN, gap_target_s
from shared.sim.cluster import simulate
from shared.sim.group import DecodeGroup
from shared.sim.memory import KvMemory
from shared.sim.outcomes import SimResult
from shared.sim.request import ScheduledRequest, State
from shared.sim.scheduler import Backlog, Scheduler
from shared.sim.spec import EngineLimits, InstanceSpec, RunSpec
from tests.shared.sim.clusters import instance, workload

BLOCK, CHUNK, PLACES = 16, 64, 4
RATES = StepRates(StepForm(0.0), StepForm(0.0), StepForm(0.01, token_s=0.001))
LATER_S = 1e9  # no stream has waited for long yet
USUAL = Slo(tpot_s=0.1)
HEAVY = Slo("heavy", tpot_s=0.1, weight=4.0)
LIGHT = Slo("light", tpot_s=0.1, weight=0.5)
Planned = tuple[list[tuple[str, int]], set[str]]  # chunks, and the requests that decode


@dataclass(slots=True, eq=False)
class Request(ScheduledRequest):
    view: JobView

    @property
    def job(self) -> JobView:
        return self.view

    @property
    def remaining_job(self) -> JobView:
        return msgspec.structs.replace(self.view, prompt_tokens=self.tokens, max_tokens=self.output_left)

    @property
    def is_stream(self) -> bool:
        return self.view.started or self.tokens > self.view.prompt_tokens


class Steps:
    """Drives a scheduler as an engine does. KV that is imported comes before the next step."""

    def __init__(
        self, blocks: int = 100, *, step_budget: bool = False, order: PrefillOrder = Fcfs(), room: int | None = None
    ) -> None:
        self.limits = EngineLimits(CHUNK, PLACES, BLOCK, step_budget=step_budget)
        self.memory = KvMemory(self.limits, blocks * BLOCK)
        self.room, self.staged = room, set[Request]()
        self.scheduler: Scheduler[Request] = Scheduler(
            self.limits,
            self.memory,
            DecodeGroup(BLOCK),
            self,
            order,
            Greedy(),
            rates=lambda: RATES,
            reserve_export=self.reserve if room is not None else None,
        )
        self.now = 0.0
        self.entered: list[str] = []
        self.preempted_names: list[str] = []

    def admitted(self, request: Request, now: float) -> None:
        self.entered.append(request.job.job_id)

    def preempted(self, request: Request, now: float) -> None:
        self.preempted_names.append(request.job.job_id)

    def reserve(self, request: Request) -> bool:
        assert self.room is not None
        if request not in self.staged and sum(each.tokens for each in self.staged) + request.tokens > self.room:
            return False
        self.staged.add(request)
        return True

    def add(
        self,
        name: str,
        prompt: int,
        output: int = 5,
        slo: Slo = USUAL,
        *,
        stream: bool = False,
        export: bool = False,
        handed_over_s: float = LATER_S,
    ) -> Request:
        """Queue a request. stream: it imports its KV, and its client has its first token since `handed_over_s`."""
        sent = prompt - 1 if stream else 0
        request = Request(
            JobView(name, prompt, output, slo, started=stream),
            tokens=prompt,
            output_left=output,
            decodes=not export,
            exports=export,
            computed_tokens=sent,
            import_tokens=sent,
            last_token_s=handed_over_s if stream else -1.0,
        )
        self.scheduler.add(request)
        return request

    def step(self) -> Planned:
        scheduler = self.scheduler
        self.now += 1.0
        for request in list(scheduler.receiving):
            scheduler.kv_arrived(request)
        step = scheduler.plan(self.now)
        decodes = [request for request in scheduler.running if request.state is State.DECODING]
        # One token after some context counts as a decode, the last one of a prompt, too.
        ends = {request.job.job_id for request, tokens in step.chunks if tokens == 1 and request.computed_tokens}
        names = {request.job.job_id for request in decodes} | ends
        chunks = [(request.job.job_id, tokens) for request, tokens in step.chunks if request.job.job_id not in ends]
        assert len(names) + sum(tokens for _, tokens in chunks) <= CHUNK
        assert len(scheduler.running) <= PLACES
        for request in scheduler.end_decodes(1) if decodes else ():
            scheduler.finish(request)
        for request, tokens in step.chunks:
            request.computed_tokens += tokens
            if request.uncomputed_tokens or request.cancelled:
                continue
            request.tokens += 1
            request.output_left -= 1
            if request.output_left:
                scheduler.start_decoding(request)
            else:
                scheduler.finish(request)
        assert 0 <= self.memory.free == self.memory.total - self.held_blocks()
        return chunks, names

    def held_blocks(self) -> int:
        """What the requests hold; no two of them share a block here."""
        scheduler = self.scheduler
        blocks = 0
        for request in (*scheduler.receiving, *scheduler.received, *scheduler.running):
            computed = request.computed_tokens
            if request.state is State.DECODING:
                computed = scheduler.group.tokens_of(request) - 1
            blocks += max(request.blocks, self.memory.blocks_for(computed))
        return blocks


def test_a_prompt_goes_in_chunks_beside_decodes_and_then_token_by_token() -> None:
    run = Steps()
    request = run.add("a", 100, 3)
    assert [run.step() for _ in range(4)] == [([("a", 64)], set()), ([("a", 36)], set()), ([], {"a"}), ([], {"a"})]
    assert request.state is State.FINISHED
    run.add("a", 10, 9)
    run.step()
    run.add("b", 100)
    assert run.step() == ([("b", CHUNK - 1)], {"a"})


def test_a_stream_enters_beside_a_long_prompt_and_decodes_in_the_next_step() -> None:
    run = Steps()
    run.add("long", 300)
    assert run.step() == ([("long", CHUNK)], set())
    run.add("behind", 300, slo=HEAVY)
    run.add("stream", 100, stream=True)
    assert run.step() == ([("long", CHUNK)], set()), "its KV is under way"
    assert run.step() == ([("long", CHUNK - 1)], {"stream"})


def test_no_prompt_takes_the_blocks_that_a_stream_waits_for() -> None:
    run = Steps(20)
    run.add("runs", 200, 2)
    for _ in range(4):
        run.step()  # 13 of 20 blocks
    run.add("prompt", 40, 2, HEAVY)
    run.add("stream", 260, 3, stream=True)  # 17 blocks
    assert run.step() == ([], {"runs"})
    assert run.step() == ([("prompt", 40)], set()), "the stream has its blocks, the prompt takes what is left"
    assert run.step()[1] == {"stream", "prompt"}


def test_nothing_enters_before_all_of_it_fits() -> None:
    run = Steps(12)
    run.add("runs", 97, 10)
    for _ in range(3):
        run.step()  # 7 of 12 blocks
    run.add("prompt", 100, 2)  # 7 blocks, of which the first chunk would take 4
    steps = [run.step() for _ in range(20)]
    ended = next(at for at, (_, decodes) in enumerate(steps) if "runs" not in decodes)
    assert all(not chunks for chunks, _ in steps[:ended])
    assert steps[ended][0] == [("prompt", CHUNK)]


def test_a_stream_that_is_computed_again_goes_before_prompts_under_way() -> None:
    run = Steps(24)
    run.add("a", 150, 220)
    run.add("b", 150, 220)
    while not run.preempted_names:
        run.step()
    assert run.preempted_names == ["b"], "the younger one"
    run.add("prompt", 16, 2, HEAVY)
    while not (chunks := run.step()[0]):
        pass
    assert chunks[0][0] == "b"


def test_a_prompt_gives_its_blocks_up_before_a_stream_of_its_class() -> None:
    run = Steps(20)
    run.add("old", 96, 200)
    run.step()
    run.step()
    run.add("prompt", 220, 2)
    run.step()
    run.add("young", 60, 200, stream=True)
    seen = [run.step() for _ in range(40)]
    assert all({"old", "young"} <= decodes for _, decodes in seen[2:]), "neither pauses"


def test_a_lighter_class_gives_its_blocks_up_first() -> None:
    run = Steps(24)
    run.add("light", 150, 220, LIGHT)
    run.add("heavy", 150, 220, HEAVY)
    while not run.preempted_names:
        run.step()
    assert run.preempted_names == ["light"], "though it is older"


def test_a_prompt_leaves_a_place_for_a_stream_whose_kv_is_under_way() -> None:
    run = Steps()
    for at in range(PLACES - 1):
        run.add(f"runs {at}", 20, 50)
    run.step()
    run.add("stream", 30, stream=True)
    run.add("prompt", 30)
    run.step()
    assert "stream" in run.step()[1]


def test_streams_are_admitted_during_a_step() -> None:
    run = Steps()
    run.add("long", 300)
    run.scheduler.plan(1.0)
    stream, prompt = run.add("stream", 30, stream=True), run.add("prompt", 30)
    run.scheduler.admit_streams(1.5)
    assert (stream.state, prompt.state) == (State.RECEIVING, State.WAITING)


def test_the_step_is_cut_for_a_stream_that_is_about_to_join() -> None:
    run = Steps(step_budget=True)
    run.add("long", 600)
    assert run.step() == ([("long", CHUNK)], set()), "nothing decodes"
    hurry = Slo("hurry", tpot_s=0.16)
    run.add("stream", 30, 50, hurry, stream=True)
    cut = int((MARGIN * gap_target_s(hurry) / 2 - 0.01) / 0.001)
    assert FLOOR_TOKENS < cut < CHUNK
    assert run.step() == ([("long", cut)], set()), "its KV is under way: this step and its own share what is left"
    assert run.step() == ([("long", CHUNK - 1)], {"stream"})


def test_the_first_step_of_a_stream_that_waited_long_is_cut_and_the_next_is_not() -> None:
    run = Steps(step_budget=True)
    run.add("long", 600)
    run.step()
    run.add("stream", 30, 50, stream=True, handed_over_s=0.0)
    assert run.step() == ([("long", FLOOR_TOKENS)], set()), "its KV is under way"
    assert run.step() == ([("long", FLOOR_TOKENS)], {"stream"})
    assert run.step() == ([("long", CHUNK - 1)], {"stream"})


def test_the_order_applies_to_all_that_wait_whatever_they_wait_for() -> None:
    run = Steps(order=Sjf())
    for name, prompt, export in (("a", 60, True), ("b", 50, False), ("c", 55, True), ("d", 10, False)):
        run.add(name, prompt, 1, export=export)
    while len(run.entered) < 4:
        run.step()
    assert run.entered == ["d", "b", "c", "a"]


def test_no_request_overtakes_one_whose_export_has_room() -> None:
    run = Steps(order=Sjf(), room=100)
    long = run.add("long", 90, 1, export=True)
    scheduler = run.scheduler
    assert scheduler.next_waiting() is long  # it has room, and waits for something else
    short = run.add("short", 20, 1, export=True)
    assert scheduler.next_waiting() is long
    assert scheduler.waiting.pop() is long
    assert scheduler.next_waiting() is None
    run.staged.clear()
    assert scheduler.next_waiting() is short


@pytest.mark.parametrize("steps", range(4))
def test_a_cancelled_request_leaves_nothing_behind_in_whatever_state(steps: int) -> None:
    run = Steps(20)
    run.add("other", 200, 9)
    states = set()
    for name, stream in (("prompt", False), ("stream", True)):
        request = run.add(name, 80, 9, stream=stream)
        for _ in range(steps):
            run.step()
        states.add(request.state)
        run.scheduler.cancel(request)
    for _ in range(20):
        run.step()
    backlog = Backlog()
    run.scheduler.count_backlog(backlog)
    assert (run.memory.free, run.scheduler.count, run.scheduler.group.count) == (20, 0, 0)
    assert backlog == Backlog()
    assert states


ADDED = st.lists(
    st.tuples(
        st.integers(0, 12),  # the step in which it comes
        st.integers(2, 150),
        st.integers(1, 60),
        st.booleans(),
        st.sampled_from([HEAVY, LIGHT]),
    ),
    min_size=1,
    max_size=9,
)


@given(ADDED, st.sampled_from([15, 24, 200]), st.booleans(), st.sampled_from([Fcfs(), Sjf(2), Ljf()]))
def test_every_request_gets_its_tokens_once_and_all_blocks_come_back(
    added: list[tuple[int, int, int, bool, Slo]], blocks: int, step_budget: bool, order: PrefillOrder
) -> None:
    run = Steps(blocks, step_budget=step_budget, order=order)
    requests: list[tuple[Request, int, int]] = []
    for number in range(800):
        for at, (step, prompt, output, stream, slo) in enumerate(added):
            if step == number:
                requests.append((run.add(str(at), prompt, output, slo, stream=stream), prompt, output))
        run.step()
        if number > 12 and not run.scheduler.count:
            break
    assert [request.state for request, *_ in requests] == [State.FINISHED] * len(added)
    assert all(request.tokens == prompt + output for request, prompt, output in requests)
    assert run.memory.free == run.memory.total


def of_prompts(order: PrefillOrder, *, role: Role = Role.PREFILL) -> SimResult:
    """Prompts of 200, 200, 150 and 50 tokens, all at once, through chunks of 256."""
    work = workload((0.0, 200, 1), (0.0, 200, 1), (0.0, 150, 1), (0.0, 50, 1))
    specs: list[InstanceSpec] = [instance("i", role), instance("d", Role.DECODE)]
    return simulate(work, specs if role is Role.PREFILL else specs[:1], RunSpec(prefill_order=order))


@pytest.mark.parametrize("role", Role)
def test_prompts_are_computed_in_the_policys_order_on_instances_of_either_role(role: Role) -> None:
    # As many as fit beside what is left of the one before: steps of 200, 256 and 144 tokens.
    assert of_prompts(Fcfs(), role=role).outcomes.ttft_s == pytest.approx([0.21, 0.476, 0.63, 0.63])
    # The first is taken when it comes. Then 50, 150 and 56 of 200 in one step.
    assert of_prompts(Sjf(), role=role).outcomes.ttft_s == pytest.approx([0.21, 0.63, 0.476, 0.476])


def test_a_prompt_waits_for_room_for_its_kv() -> None:
    # KV of 100 tokens takes 10 ms; the second's begins only when the first's is sent, at 120 ms.
    work = workload((0.0, 100, 5), (0.0, 100, 5))
    specs = [instance("p", Role.PREFILL, staging_tokens=150), instance("d", Role.DECODE)]
    assert simulate(work, specs).outcomes.ttft_s == pytest.approx([0.11, 0.23])
    # Longer than all the room there is: it is let in all the same.
    specs = [instance("p", Role.PREFILL, staging_tokens=50), instance("d", Role.DECODE)]
    assert simulate(work, specs).outcomes.ttft_s == pytest.approx([0.11, 0.22])
