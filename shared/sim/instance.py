"""One simulated instance: its engines, its role, its counts, and what the monitor broadcasts about it."""

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from shared.domain.instance import (
    Compatibility,
    InstanceInfo,
    InstanceLoad,
    InstanceState,
    InstanceView,
    KvGeometry,
    Role,
)
from shared.domain.rates import LinkRate
from shared.policy.decode_admission import ahead_of, own_part, remaining_tokens
from shared.policy.overload import Beside, pause_s
from shared.sim.engine import Engine, EngineEvents
from shared.sim.events import EventLoop
from shared.sim.outcomes import Gaps, InstanceUse
from shared.sim.request import Leg, SimRequest
from shared.sim.scheduler import Backlog
from shared.sim.spec import InstanceSpec, RunSpec
from shared.sim.wires import Wires


class SimInstance:
    """An instance while a run lasts. A loss replaces its engines by empty ones."""

    def __init__(
        self,
        index: int,
        spec: InstanceSpec,
        run: RunSpec,
        loop: EventLoop,
        events: EngineEvents,
        prefix_tokens: int,
        wires: Wires,
    ) -> None:
        self.index = index
        self._loop = loop
        self.spec = spec
        self.role = spec.role
        self.state = InstanceState.READY
        self._wires = wires
        self._link = wires.known[index]
        self.requests: dict[SimRequest, None] = {}  # all that have a leg here
        self.prefills = 0  # prompts that came here and are not computed yet
        self.decoding = 0
        self.heavy = 0
        self.flips = 0
        self.drains = 0
        self.generation = 0
        self._run = run
        self._events = events
        self._prefix_tokens = prefix_tokens
        self._gone: list[Engine] = []
        self._role_since_s = 0.0
        self._role_s = dict.fromkeys(Role, 0.0)
        self._idle: InstanceView | None = None
        self.info = _info(spec, self.generation, self._link)
        self.engines = self._make_engines()

    @property
    def full(self) -> bool:
        most = self.spec.max_prefills
        return most is not None and self.prefills >= most

    def next_lane(self) -> int:
        """The engine with the fewest requests."""
        return min(range(len(self.engines)), key=lambda lane: self.engines[lane].scheduler.count)

    def view(self, now: float) -> InstanceView:
        busy_share = round(sum(engine.busy_share(now) for engine in self.engines) / max(1, len(self.engines)), 1)
        if not self.requests:
            return self._idle_view(busy_share)
        steps = [engine.steps_done(now) for engine in self.engines]
        context = free = used = running = waiting = 0
        share, backlog = 0.0, Backlog()
        for engine, done in zip(self.engines, steps, strict=True):
            context += engine.context_after(done)
            free += engine.free_after(done)
            used += engine.memory.total
            share += engine.prefill_share_after(done)
            running += len(engine.scheduler.running)
            waiting += engine.scheduler.blocked
            engine.scheduler.count_backlog(backlog)
        used -= free
        load = InstanceLoad(
            time_s=now,
            queued_prefill=backlog.prompts,
            queued_prefill_tokens=backlog.prompt_tokens,
            running=running,
            waiting=waiting,
            decoding=self.decoding,
            heavy_decodes=self.heavy,
            context_tokens=context,
            waiting_tokens=backlog.waiting_tokens,
            free_blocks=free,
            staged_bytes=self._wires.out_bytes(self.index, now),
            inbound_bytes=self._wires.in_bytes(self.index, now),
            inflight=len(self.requests),
            prefill_share=share / len(self.engines),
            kv_ahead=ahead_of(
                (self.held_and_left(leg, steps[leg.lane or 0]) for leg in self.decodes()),
                self.spec.limits.block_tokens,
                own_part(used * self.spec.limits.block_tokens, context + backlog.begun_tokens),
            ),
            busy_share=busy_share,
        )
        return InstanceView(self.info, self.role, self.state, load)

    def decodes(self) -> Iterator[Leg]:
        """Legs that decode here, or are to."""
        for request in self.requests:
            leg = request.decode_leg
            if leg is not None and request.decode == self.index and leg.lane is not None:
                yield leg

    def pause_s(self, leg: Leg, now: float) -> float:
        """Seconds until the next token of a leg that was paused here is expected, as a worker estimates it."""
        others = [other for other in self.decodes() if other is not leg and other.lane == leg.lane]
        steps = [engine.steps_done(now) for engine in self.engines]
        inside = [self.held_and_left(other, steps[other.lane or 0]) for other in others if other.blocks]
        first = sum(other.tokens for other in others if not other.blocks and other.pause > leg.pause)
        limits, block_tokens = self.spec.limits, self.spec.limits.block_tokens
        room = self.engines[leg.lane or 0].memory.total * block_tokens - first
        beside = Beside.from_jobs(inside, block_tokens)
        held, left = self.held_and_left(leg, steps[leg.lane or 0])
        return pause_s(beside, room, held, left, block_tokens, self.spec.rates.step, limits.batched_tokens)

    def held_and_left(self, leg: Leg, steps: int) -> tuple[int, int]:
        """The tokens that the leg holds, and those that its answer is expected to have yet. steps: see `steps_done`, of
        its engine.
        """
        held, given = self.engines[leg.lane or 0].progress_after(steps, leg)
        job = leg.request.job
        given += leg.request.carried
        return held, remaining_tokens(given, job.answer_tokens or job.max_tokens, job.max_tokens)

    def _idle_view(self, busy_share: float) -> InstanceView:
        """An instance that has been without work for a while looks the same until its role or state changes."""
        seen = self._idle
        same = seen is not None and seen.role is self.role and seen.state is self.state and seen.info is self.info
        if seen is None or not same or seen.load.busy_share != busy_share:
            free = sum(engine.memory.total for engine in self.engines)
            load = InstanceLoad(free_blocks=free, busy_share=busy_share)
            seen = self._idle = InstanceView(self.info, self.role, self.state, load)
        return seen

    def take_role(self, role: Role, now: float) -> None:
        self.end_role(now)
        self.role = role
        self.flips += 1

    def end_role(self, now: float) -> None:
        """Count the time in the present role up to `now`; a dead instance has no role."""
        if self.state is not InstanceState.DEAD:
            self._role_s[self.role] += now - self._role_since_s
        self._role_since_s = now

    def die(self, now: float) -> list[SimRequest]:
        """Lose all that is here. Returns the requests that were here."""
        self.end_role(now)
        self.state = InstanceState.DEAD
        for engine in self.engines:
            engine.halt(now)
        lost = list(self.requests)
        self.requests.clear()
        self.prefills = self.decoding = self.heavy = 0
        self._gone += self.engines
        self.engines = []
        return lost

    def revive(self, now: float) -> None:
        self.end_role(now)
        self.state = InstanceState.READY
        self.generation += 1
        self.info = _info(self.spec, self.generation, self._link)
        self._wires.clear(self.index, now)
        self.engines = self._make_engines()

    def use(self) -> InstanceUse:
        tallies = [engine.tally for engine in (*self._gone, *self.engines)]
        return InstanceUse(
            instance_id=self.spec.instance_id,
            accelerator=self.spec.accelerator,
            accelerators=self.spec.accelerators,
            price_per_hour=self.spec.price_per_hour,
            busy_s=sum(t.busy_s for t in tallies) / self.spec.lanes,
            role_s={role.value: seconds for role, seconds in self._role_s.items()},
            prefill_tokens=sum(t.prefill_tokens for t in tallies),
            decode_tokens=sum(t.decode_tokens for t in tallies),
            steps=sum(t.steps for t in tallies),
            preemptions=sum(t.preemptions for t in tallies),
            peak_kv_share=max(t.peak_share for t in tallies),
            flips=self.flips,
        )

    def gaps(self) -> Gaps:
        return Gaps().merge(engine.tally.gaps for engine in (*self._gone, *self.engines))

    def _make_engines(self) -> list[Engine]:
        spec, run = self.spec, self._run
        limits = replace(spec.limits, step_budget=True) if run.step_budget else spec.limits
        return [
            Engine(
                self._loop,
                spec.model,
                limits,
                spec.kv_tokens // spec.lanes,
                run.prefill_order,
                run.decode_admission,
                self._events,
                rates=spec.rates.step,
                staging_tokens=spec.staging_tokens,
                prefix_block_tokens=self._prefix_tokens,
                stepwise=run.stepwise,
            )
            for _ in range(spec.lanes)
        ]


def _info(spec: InstanceSpec, generation: int, link: LinkRate) -> InstanceInfo:
    return InstanceInfo(
        instance_id=spec.instance_id,
        generation=generation,
        model="simulated",
        # One layer of one head that is as large as the whole KV of a token: its bytes are all that counts.
        compatibility=Compatibility(
            "simulated", "simulated", "1", 0, KvGeometry(1, 1, max(1, round(spec.kv_bytes_per_token / 4.0)))
        ),
        accelerator=spec.accelerator,
        dtype="bfloat16",
        tensor_parallel=max(1, spec.accelerators // spec.lanes),
        block_size=spec.limits.block_tokens,
        total_blocks=spec.kv_tokens // spec.limits.block_tokens,
        max_model_len=min(spec.limits.max_model_len, spec.kv_tokens // spec.lanes),
        chunk_size=spec.limits.batched_tokens,
        rpc="",
        http="",
        kv_endpoints=(),
        max_seqs=spec.limits.sequences * spec.lanes,
        rates=msgspec.structs.replace(
            spec.rates,
            link=spec.rates.link or link,
            host_token_s=spec.limits.host.token_s if spec.limits.host is not None else 0.0,
        ),
        precision=spec.precision,
    )
