"""Streams, requests whose client has tokens, go before prompts: the emulated engine and the simulator, step by step."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engines.base import EnginePolicies, EngineRequest, StepLog
from services.worker.engines.emulated import EmulatedLane
from services.worker.engines.emulated_scheduler import EmulatedScheduler
from shared.domain.job import Generation, JobView, Slo
from shared.domain.kv import KvHandle
from shared.domain.rates import StepForm, StepRates
from shared.policy.decode_admission import Greedy
from shared.policy.prefill_order import Fcfs
from shared.policy.step_budget import FLOOR_TOKENS, MARGIN, gap_target_s
from shared.sim.engine import Engine
from shared.sim.request import Leg, SimRequest
from shared.sim.scheduler import WaitingLegs
from shared.sim.spec import EngineLimits
from tests.services.worker.engines.test_emulated import settings
from tests.shared.sim.clusters import Linear

BLOCK, CHUNK, SEATS = 16, 64, 4
RATES = StepRates(StepForm(0.0), StepForm(0.0), StepForm(0.01, token_s=0.001))
LATER_S = 1e9  # no stream has waited for long yet
FIRST_S = 1.0  # when the first step begins: above all gap targets
USUAL = Slo(tpot_s=0.1)
HEAVY = Slo("heavy", tpot_s=0.1, weight=4.0)
LIGHT = Slo("light", tpot_s=0.1, weight=0.5)
Planned = tuple[list[tuple[str, int]], set[str]]  # chunks, and who decodes


@dataclass(frozen=True)
class Come:
    """A request. stream: its KV comes, and its client has its first token."""

    name: str
    prompt: int
    output: int
    stream: bool = False
    slo: Slo = USUAL
    token_s: float = LATER_S  # when a stream was given its first token


class Live:
    """The scheduler of an emulated engine over a link that takes no time, one step a call."""

    def __init__(self, blocks: int, *, step_budget: bool = False) -> None:
        of_worker = settings(chunk_size=CHUNK, max_seqs=SEATS, block_size=BLOCK)
        policies = EnginePolicies(step_budget=step_budget)
        self.scheduler = EmulatedScheduler(of_worker, blocks, policies, lambda: RATES, lambda handle, held: 0.0)
        self._lane = EmulatedLane(self.scheduler, lambda batch: 0.0, StepLog())
        self._now = 0.0

    def come(self, one: Come) -> None:
        job = JobView(one.name, one.prompt, one.output, one.slo, started=one.stream)
        kv = KvHandle(one.name, "p", 1, "f", (), one.prompt - 1, "bfloat16") if one.stream else None
        asked = EngineRequest(one.name, job, [1] * one.prompt, Generation(b"", 0.0), one.output, import_from=kv)
        self.scheduler.add(asked, lambda step: None, one.token_s)

    def step(self) -> Planned:
        self._now += 1.0
        chunks, decodes = self.scheduler.plan(self._now)
        names = {entry.request.request_id for entry in decodes}
        planned = _planned(
            [(entry.request.request_id, tokens, entry.computed_tokens) for entry, tokens in chunks], names
        )
        self._lane._finish_step(chunks, decodes)
        return planned


@dataclass
class Simulated:
    """An engine of the simulator, whose transfers take no time, one step a call. It is its own driver."""

    blocks: int
    step_budget: bool = False
    engine: Engine = field(init=False)
    coming: list[Leg] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = EngineLimits(CHUNK, SEATS, BLOCK, step_budget=self.step_budget)
        self.engine = Engine(
            Linear(), limits, self.blocks * BLOCK, WaitingLegs(Fcfs()), Greedy(), self, rates=RATES, stepwise=True
        )

    def admitted(self, leg: Leg, now: float) -> None:
        self.coming.append(leg)

    def chunk(self, leg: Leg, now: float) -> None:
        pass

    def token(self, leg: Leg, now: float) -> None:
        pass

    def done(self, leg: Leg, now: float) -> None:
        pass

    def preempted(self, leg: Leg) -> None:
        pass

    def come(self, one: Come) -> None:
        request = SimRequest(0, JobView(one.name, one.prompt, one.output, one.slo), one.output, ())
        request.split = one.prompt - 1
        computed, last_token_s = (one.prompt - 1, one.token_s) if one.stream else (0, -1.0)
        leg = Leg(request, one.prompt, one.output, computed, remote=one.stream, last_token_s=last_token_s)
        request.decode_leg = leg
        self.engine.scheduler.add(leg)

    def step(self) -> Planned:
        engine = self.engine
        arrived, self.coming = self.coming, []
        for leg in arrived:
            engine.scheduler.kv_arrived(leg)
        engine.run(engine.due_s if engine.due_s < float("inf") else FIRST_S)
        scheduler, chunks = engine.scheduler, engine._chunks
        decodes = {leg.request.job.job_id for leg in scheduler.running if leg not in scheduler.prefilling}
        return _planned([(leg.request.job.job_id, tokens, leg.computed) for leg, tokens in chunks], decodes)


def _planned(chunks: list[tuple[str, int, int]], decodes: set[str]) -> Planned:
    """One token after some context is a decode to an engine, the last one of a prompt, too."""
    last = {name for name, tokens, computed in chunks if tokens == 1 and computed}
    return [(name, tokens) for name, tokens, _ in chunks if name not in last], decodes | last


BOTH = pytest.mark.parametrize("kind", [Live, Simulated])
Kind = type[Live] | type[Simulated]


@BOTH
def test_a_stream_enters_beside_a_long_prompt_and_decodes_in_the_next_step(kind: Kind) -> None:
    run = kind(100)
    run.come(Come("long", 300, 5))
    assert run.step() == ([("long", CHUNK)], set())
    run.come(Come("behind", 300, 5, slo=HEAVY))
    run.come(Come("stream", 100, 5, stream=True))
    assert run.step() == ([("long", CHUNK)], set()), "its KV is under way"
    assert run.step() == ([("long", CHUNK - 1)], {"stream"})


@BOTH
def test_no_prompt_takes_the_blocks_that_a_stream_waits_for(kind: Kind) -> None:
    run = kind(20)
    run.come(Come("runs", 200, 2))
    for _ in range(4):
        run.step()  # 13 of 20 blocks
    run.come(Come("prompt", 40, 2, slo=HEAVY))
    run.come(Come("stream", 260, 3, stream=True))  # 17 blocks
    assert run.step() == ([], {"runs"})
    assert run.step() == ([("prompt", 40)], set()), "the stream has its blocks, the prompt takes what is left"
    assert run.step()[1] == {"stream", "prompt"}


@BOTH
def test_nothing_enters_before_all_of_it_fits(kind: Kind) -> None:
    run = kind(12)
    run.come(Come("runs", 97, 10))
    for _ in range(3):
        run.step()  # 7 of 12 blocks
    run.come(Come("prompt", 100, 2))  # 7 blocks, of which the first chunk would take 4
    steps = [run.step() for _ in range(20)]
    ended = next(at for at, (_, decodes) in enumerate(steps) if "runs" not in decodes)
    assert all(not chunks for chunks, _ in steps[:ended])
    assert steps[ended][0] == [("prompt", CHUNK)]


@BOTH
def test_a_stream_that_is_computed_again_goes_before_prompts_under_way(kind: Kind) -> None:
    run = kind(24)
    run.come(Come("a", 150, 220))
    run.come(Come("b", 150, 220))
    preempted: str | None = None
    for _ in range(400):
        chunks, decodes = run.step()
        if preempted is None and len(decodes) == 1 and not chunks:
            preempted = ({"a", "b"} - decodes).pop()
            assert preempted == "b", "the younger one"
            run.come(Come("prompt", 16, 2, slo=HEAVY))
        elif preempted is not None and chunks:
            assert chunks[0][0] == preempted
            return
    raise AssertionError("nothing was preempted and computed again")


@BOTH
def test_a_prompt_gives_its_blocks_up_before_a_stream_of_its_class(kind: Kind) -> None:
    run = kind(20)
    run.come(Come("old", 96, 200))
    run.step()
    run.step()
    run.come(Come("prompt", 220, 2))
    run.step()
    run.come(Come("young", 60, 200, stream=True))
    seen = [run.step() for _ in range(40)]
    for _, decodes in seen[2:]:
        assert {"old", "young"} <= decodes, "neither pauses"


@BOTH
def test_a_prompt_leaves_a_seat_for_a_stream_whose_kv_is_under_way(kind: Kind) -> None:
    run = kind(100)
    for at in range(SEATS - 1):
        run.come(Come(f"runs {at}", 20, 50))
    run.step()
    run.come(Come("stream", 30, 5, stream=True))
    run.come(Come("prompt", 30, 5))
    run.step()
    assert "stream" in run.step()[1]


@BOTH
def test_the_step_is_cut_for_a_stream_that_is_about_to_join(kind: Kind) -> None:
    run = kind(100, step_budget=True)
    run.come(Come("long", 600, 5))
    assert run.step() == ([("long", CHUNK)], set()), "nothing decodes"
    hurry = Slo("hurry", tpot_s=0.16)
    run.come(Come("stream", 30, 50, stream=True, slo=hurry))
    cut = int((MARGIN * gap_target_s(hurry) / 2 - 0.01) / 0.001)
    assert FLOOR_TOKENS < cut < CHUNK
    assert run.step() == ([("long", cut)], set()), "its KV is under way: this step and its own share what is left"
    assert run.step() == ([("long", CHUNK - 1)], {"stream"})


@BOTH
def test_the_first_step_of_a_stream_that_waited_long_is_cut_and_the_next_is_not(kind: Kind) -> None:
    run = kind(100, step_budget=True)
    run.come(Come("long", 600, 5))
    run.step()
    run.come(Come("stream", 30, 50, stream=True, token_s=0.0))
    assert run.step() == ([("long", FLOOR_TOKENS)], set()), "its KV is under way"
    assert run.step() == ([("long", FLOOR_TOKENS)], {"stream"})
    assert run.step() == ([("long", CHUNK - 1)], {"stream"})


COMES = st.lists(
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


@given(COMES, st.sampled_from([15, 24, 200]), st.booleans())
def test_both_take_the_same_steps_with_streams_and_prompts(
    comes: list[tuple[int, int, int, bool, Slo]], blocks: int, step_budget: bool
) -> None:
    live, simulated = Live(blocks, step_budget=step_budget), Simulated(blocks, step_budget=step_budget)
    for number in range(500):
        for at, (step, prompt, output, stream, slo) in enumerate(comes):
            if step == number:
                for run in (live, simulated):
                    run.come(Come(str(at), prompt, output, stream, slo))
        assert live.step() == simulated.step()
        if number > 12 and not live.scheduler.requests:
            return
    raise AssertionError("it does not come to an end")
