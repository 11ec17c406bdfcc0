"""Migrations of running decodes: they go on at another instance with their KV, for the causes and by the policies that
serve live.

A decode migrates in four steps. A target is chosen and the decode is booked there. While it decodes on, the KV that it
has passes the wires, again for what has come meanwhile as long as that is much. Then it leaves its instance at the end
of a step, and what is missing follows. It joins the next step of the target when all of that has arrived. Until it has
left, it stays where the target is gone or has too few free blocks; later it is computed again elsewhere.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from shared.domain.instance import InstanceState, Role
from shared.errors import PolyphaseError
from shared.policy.leaving import (
    AGAIN_S,
    AHEAD_S,
    COPY_ROUNDS,
    DRAIN_NEWS_S,
    LOOK_S,
    PULLS_AT_ONCE,
    REST_TOKENS,
    SPARE_SHARE,
    Stayer,
    leaves_for_memory,
    leaves_for_speed,
    leaves_kept,
)
from shared.policy.overload import decide
from shared.policy.prefix_pull import gather_s
from shared.sim.engine import Engine
from shared.sim.instance import SimInstance
from shared.sim.intake import Context, Intake, Part
from shared.sim.request import Leg, SimRequest, State


@dataclass(slots=True, eq=False)
class _Migration:
    """One decode on its way. given, answer_tokens: its output tokens, and those that were expected, when it was placed
    there. generation: of the target then.
    """

    leg: Leg
    source: SimInstance
    target: SimInstance
    generation: int
    given: int
    answer_tokens: int
    rounds: int = 0
    copied: int = 0  # tokens of KV that are at the target

    @property
    def is_over(self) -> bool:
        """Whether the decode has ended, or went on elsewhere in another way."""
        leg = self.leg
        return leg.cancelled or leg.request.over or leg.request.decode_leg is not leg

    @property
    def target_is_there(self) -> bool:
        target = self.target
        same = target.state is InstanceState.READY and target.generation == self.generation
        return same and target.role is Role.DECODE

    @property
    def has_room(self) -> bool:
        """Whether the target has blocks for what the decode holds now."""
        engine = self.target.engines[self.target.next_lane()]
        return engine.memory.blocks_for(self.leg.tokens) <= engine.memory.available


@dataclass(slots=True)
class _Pulls:
    """Copies into one instance: how many are under way, and those that wait for their turn."""

    count: int = 0
    waiting: deque[_Migration] = field(default_factory=deque)


class Migrations(Part):
    """count: of decodes that have left their instances. wire_bytes: of their KV. prefix_tokens: of a block of the
    workload's prefixes.
    """

    def __init__(self, context: Context, intake: Intake, prefix_tokens: int) -> None:
        super().__init__(context)
        self._intake = intake
        self._id_tokens = max(1, prefix_tokens)
        self._under_way: dict[SimRequest, _Migration] = {}
        self._coming: dict[Leg, bool] = {}  # legs at their targets, and whether their KV has arrived
        self._pulls: dict[int, _Pulls] = {}  # by the position of the target
        self._looks = False  # whether the next look is planned
        self._least_tpot_s = context.record.least_tpot_s
        self.count = 0
        self.wire_bytes = 0.0

    def look_on(self) -> None:
        """Decodes run: look from time to time, as long as any do."""
        if self._run.migration and not self._looks:
            self._looks = True
            self._loop.at(self._loop.now_s + LOOK_S, self._look, None)

    def drain(self, instance: SimInstance, now: float) -> None:
        """A drain has begun: all decodes are to leave. Those that have found no place try again while it lasts."""
        if self._run.migration and instance.requests:
            self._drain((instance, instance.drains), now)

    def _drain(self, subject: tuple[SimInstance, int], now: float) -> None:
        instance, drain = subject
        if instance.state is not InstanceState.DRAINING or instance.drains != drain or not instance.requests:
            return
        for leg in self._decoding(instance):
            self._begin(leg, now)
        self._loop.at(now + DRAIN_NEWS_S, self._drain, subject)

    def admitted(self, leg: Leg, now: float) -> bool:
        """Blocks are reserved for a leg. False where it has not come by a migration."""
        if leg not in self._coming:
            return False
        if self._coming[leg]:
            self._loop.at(now, self._join, leg)
        return True

    def left(self, leg: Leg, now: float) -> None:
        """A decode has left its instance with the step that has ended: it goes on at its target."""
        request, migration = leg.request, self._under_way.pop(leg.request)
        source, target = migration.source, migration.target
        self._legs.leave(source, request, now)
        given = int(request.carried) + leg.given_tokens
        job, prefill, split = request.job, request.prefill, request.split
        request.last_token_s = leg.last_token_s
        expected = max(1, migration.answer_tokens - (given - migration.given)) if migration.answer_tokens else 0
        job = msgspec.structs.replace(
            job,
            prompt_tokens=job.prompt_tokens + given,
            max_tokens=max(0, job.max_tokens - given),
            answer_tokens=expected,
            started=True,
        )
        request.begin(job, leg.output_left)
        if not migration.target_is_there:
            request.attempt += 1
            self._intake.admit(request, now)
            return
        self.count += 1
        request.prefill, request.split = (source.index, split) if prefill is None else (prefill, split)
        request.decode = target.index
        moved = request.decode_leg = Leg(
            request,
            tokens=leg.tokens,
            output_left=leg.output_left,
            computed_tokens=leg.computed_tokens,
            import_tokens=leg.computed_tokens,
            prefix=leg.prefix[: request.first_prompt_tokens // self._id_tokens],
            last_token_s=leg.last_token_s,
        )
        self._coming[moved] = False
        arrives_s = self._send(migration, leg.computed_tokens, now)
        self._legs.start(target, moved, now)
        self._loop.at(arrives_s, self._arrived, moved)

    def _begin(self, leg: Leg, now: float, tpot_s: float = 0.0, spare_share: float = 0.0) -> None:
        """Choose a target for a decode that is to leave, and begin to copy its KV. tpot_s: its time per token, where it
        leaves for that.
        """
        request, job = leg.request, leg.request.job
        leg.asked_s = now
        if (other := self._under_way.get(request)) is not None and not other.is_over:
            return
        source = self._fleet.instance(request.decode)
        here, index = source.spec.instance_id, self._fleet.index(now)
        given = int(request.carried) + self._progress(leg, now)[1]
        view = msgspec.structs.replace(
            job,
            prompt_tokens=job.prompt_tokens + given,
            max_tokens=max(0, job.max_tokens - given),
            local_only=True,
            started=True,
            leaves=True,
            tpot_s=tpot_s,
            spare_share=spare_share,
        )
        try:
            route = decide(view, index, self._run.policies, now, self._rng, self._fleet.full_ids() | {here})
        except PolyphaseError:
            return
        if route.decode is None:
            return
        for assignment in self._fleet.ledger.add(view, route, now):
            index.book(assignment)
        target = self._fleet.instance(self._fleet.position(route.decode.instance_id))
        migration = _Migration(leg, source, target, target.generation, given, route.answer_tokens)
        self._under_way[request] = migration
        request.migrated_s = now
        self._loop.at(now + self._run.hop_s, self._ask, migration)

    def _ask(self, migration: _Migration, now: float) -> None:
        """A copy waits for its turn at the target, and follows the present step of the source."""
        pulls = self._pulls.setdefault(migration.target.index, _Pulls())
        if pulls.count < PULLS_AT_ONCE:
            pulls.count += 1
            self._at_step_end(migration, self._copy, now)
        else:
            pulls.waiting.append(migration)

    def _pulled(self, migration: _Migration, now: float) -> None:
        """A copy has arrived, or does not come: it is the turn of another."""
        pulls = self._pulls[migration.target.index]
        pulls.count -= 1
        if pulls.waiting:
            self._ask(pulls.waiting.popleft(), now)

    def _copy(self, migration: _Migration, now: float) -> None:
        if not self._goes_on(migration, now):
            self._pulled(migration, now)
        else:
            migration.rounds += 1
            computed = self._progress(migration.leg, now)[0]
            arrives_s = self._send(migration, computed, now)
            self._loop.at(arrives_s + self._run.hop_s, self._copied, migration)

    def _copied(self, migration: _Migration, now: float) -> None:
        """What was computed is at the target: copy what has come meanwhile, if it is much, or have the decode leave."""
        self._pulled(migration, now)
        if not self._goes_on(migration, now):
            return
        leg = migration.leg
        if self._progress(leg, now)[0] - migration.copied > REST_TOKENS and migration.rounds < COPY_ROUNDS:
            self._ask(migration, now)
        elif not migration.has_room:
            self._stay(migration)
        else:
            self._fleet.engine(leg).leave(leg, now)

    def _arrived(self, leg: Leg, now: float) -> None:
        """All KV of a leg is at its target."""
        if leg.cancelled:
            del self._coming[leg]
        elif leg.state is State.RECEIVING:
            self._join(leg, now)
        else:
            self._coming[leg] = True  # it waits for blocks

    def _join(self, leg: Leg, now: float) -> None:
        del self._coming[leg]
        if not leg.cancelled and leg.state is State.RECEIVING:
            self._fleet.engine(leg).kv_arrived(leg, now)

    def _goes_on(self, migration: _Migration, now: float) -> bool:
        """Whether the decode still migrates. If not, nothing of the migration is left."""
        if migration.is_over:
            self._under_way.pop(migration.leg.request, None)
            return False
        if migration.leg.state is not State.DECODING or not migration.target_is_there:
            self._stay(migration)
            return False
        return True

    def _stay(self, migration: _Migration) -> None:
        del self._under_way[migration.leg.request]
        self._fleet.ledger.arrived(migration.leg.request.job.job_id)

    def _send(self, migration: _Migration, computed: int, now: float) -> float:
        """Send the KV up to there that the target lacks, at the end of a step; returns when it has arrived."""
        source, target = migration.source, migration.target
        held = target.engines[target.next_lane()].memory.matched_tokens(migration.leg.prefix)
        tokens, migration.copied = max(0, computed - max(migration.copied, held)), computed
        wire_bytes = tokens * source.spec.kv_bytes_per_token
        self.wire_bytes += wire_bytes
        engine = source.engines[migration.leg.lane or 0]
        gathered_s = engine.export(gather_s(wire_bytes, source.info.tensor_parallel), now)
        return max(gathered_s, self._fleet.wires.send(source.index, target.index, wire_bytes, now))

    def _at_step_end(self, migration: _Migration, then: Callable[[_Migration, float], None], now: float) -> None:
        """Go on when the step under way at the source has ended, behind all else that is planned for that moment."""
        ends_s = now if migration.is_over else self._fleet.engine(migration.leg).step_end_s(now)
        self._loop.at(ends_s, lambda _, at: self._loop.at(at, then, migration), None)

    def _progress(self, leg: Leg, now: float) -> tuple[int, int]:
        """The tokens of a decode whose KV is computed by now, and the output tokens that it has given here."""
        engine = self._fleet.engine(leg)
        return engine.progress_after(engine.steps_done(now), leg)

    # Looks: for decodes that an instance wants to have elsewhere

    def _look(self, _: None, now: float) -> None:
        self._looks = False
        for instance in self._fleet.instances:
            for lane, engine in enumerate(instance.engines):
                if engine.decoding:
                    self.look_on()
                    self._look_at(instance, lane, engine, now)

    def _look_at(self, instance: SimInstance, lane: int, engine: Engine, now: float) -> None:
        """As a worker does. What is known of all decodes is worked out only where one of them could leave."""
        token_s, done = engine.recent_token_s(now), engine.steps_done(now)
        size = instance.spec.limits.block_tokens
        free = engine.free_after(done) * size
        if instance.role is Role.PREFILL:
            busy_share = engine.busy_share(now)
            for leg in [one for one in self._decoding(instance) if one.lane == lane]:
                given = engine.progress_after(done, leg)[1]
                if leaves_kept(given, leg.request.keep_tokens, busy_share, leg.asked_s, now):
                    self._begin(leg, now)
        filling = token_s > 0.0 and free < engine.decoding * AHEAD_S / token_s
        if not filling and token_s <= self._least_tpot_s:
            return
        legs = {leg.request.job.job_id: leg for leg in self._decoding(instance) if leg.lane == lane}
        stayers = [
            Stayer(name, *instance.held_and_left(leg, done), leg.job.slo.weight, leg.job.slo.tpot_s, leg.asked_s)
            for name, leg in legs.items()
        ]
        leavers = leaves_for_memory(stayers, engine.memory.total * size, free, token_s, size, now)
        for name in leavers:
            self._wish(legs[name], now)
        slow = leaves_for_speed(stayers, token_s, now) if not leavers else None
        if slow is not None:
            self._wish(legs[slow], now, token_s)

    def _wish(self, leg: Leg, now: float, tpot_s: float = 0.0) -> None:
        """The instance wants a decode to leave; as live, once in a while at most."""
        if now - leg.request.migrated_s > AGAIN_S:
            self._begin(leg, now, tpot_s, SPARE_SHARE)
        else:
            leg.asked_s = now

    def _decoding(self, instance: SimInstance) -> list[Leg]:
        return [leg for leg in instance.decodes() if leg.state is State.DECODING]
