"""From the prefill instance to the decode instance: dispatch, reservation, KV transfer."""

from random import Random

from shared.domain.instance import InstanceState
from shared.domain.kv import wire_share
from shared.errors import Unavailable
from shared.policy.assignment import Assignment
from shared.policy.codec import choose_codec
from shared.policy.dispatch import choose_decode
from shared.policy.lengths import is_heavy
from shared.sim.events import EventLoop
from shared.sim.fleet import Fleet
from shared.sim.intake import Intake, Patience
from shared.sim.legs import Legs
from shared.sim.outcomes import Status
from shared.sim.record import Record
from shared.sim.request import Leg, SimRequest
from shared.sim.spec import RunSpec


class Handover:
    """Takes a request over when its first chunk or its prefill is done, and brings it to a decode instance."""

    def __init__(
        self,
        run: RunSpec,
        loop: EventLoop,
        fleet: Fleet,
        legs: Legs,
        record: Record,
        intake: Intake,
        patience: Patience,
        rng: Random,
    ) -> None:
        self._run = run
        self._loop = loop
        self._fleet = fleet
        self._legs = legs
        self._record = record
        self._intake = intake
        self._patience = patience
        self._rng = rng
        self._fixed_share = wire_share(run.codec)
        self._waiting: dict[SimRequest, None] = {}  # no decode instance can take them now; in order
        self.kv_bytes = 0.0

    def retry(self, now: float) -> None:
        """Requests that found no decode instance may try again, in order."""
        for request in self.waiting:
            self.dispatch(request, now)

    @property
    def waiting(self) -> list[SimRequest]:
        """Requests that found no decode instance."""
        return [request for request in self._waiting if not request.over]

    def forget(self, request: SimRequest, now: float) -> None:
        """The request waits for no decode instance any more."""
        self._waiting.pop(request, None)
        self._patience.end(request, now)

    def dispatch(self, request: SimRequest, now: float) -> None:
        """Give the request its decode instance, and have that reserve memory."""
        if request.decode_tokens == 0 or request.decode_leg is not None or request.prefill is None:
            return
        request.hear(now)
        if request.decode is not None and self._fleet.instances[request.decode].state is InstanceState.DEAD:
            request.decode = None  # it was bound at placement and has died since
        if request.decode is None:
            index = self._fleet.dispatch_index(request.prefill, now)
            without = (request.moved_from,) if request.moved_from else ()
            try:
                choice = choose_decode(self._run.policies.dispatch, request.job, index, without, now, self._rng)
            except Unavailable:
                self._wait(request, now)
                return
            self.forget(request, now)
            chosen = choice.instance.instance_id
            request.decode = self._fleet.position(chosen)
            tokens, heavy = request.job.prompt_tokens, is_heavy(request.job)
            index.book(Assignment(chosen, now, decode_tokens=tokens, heavy=heavy))
        request.wire_share = self._share(request, now)
        request.decode_leg = _decode_leg(request)
        self._legs.start(self._fleet.instances[request.decode], request.decode_leg, now)

    def _share(self, request: SimRequest, now: float) -> float:
        """Of the KV's bytes, what goes over the wire: by the run's codec, or as live by its class and the link."""
        job, leg = request.job, request.prefill_leg
        if self._run.codec.lossy or not job.slo.lossy_kv.lossy or request.decode is None:
            return self._fixed_share
        source = self._fleet.instance(request.prefill)
        target = self._fleet.instance(request.decode).info.instance_id
        receiver = self._fleet.index(now).decode.get(target)
        if receiver is None:
            return 1.0
        left = leg.tokens - leg.computed if leg is not None and request.prefill_done_s < 0.0 else 0
        return wire_share(choose_codec(job, request.split, left, source.info, receiver).codec)

    def _wait(self, request: SimRequest, now: float) -> None:
        """Without a decode instance: while its prompt is computed nothing is lost, then its patience runs."""
        self._waiting[request] = None
        if request.prefill_done_s >= 0.0:
            self._patience.begin(request, now, self._give_up)

    def _give_up(self, request: SimRequest, now: float) -> None:
        del self._waiting[request]
        self._intake.stop(request, Status.REFUSED, now)

    def admitted(self, leg: Leg, now: float) -> None:
        """The decode instance has blocks for the KV (see `EngineEvents`)."""
        request = leg.request
        request.admitted = True
        request.sent_tokens = min(leg.saved, request.split)
        if request.prefill_done_s >= 0.0:
            self.send(request, request.split, now)
        elif self._run.streaming and request.prefill_leg is not None:
            self.send(request, request.prefill_leg.computed, now)

    def send(self, request: SimRequest, computed: int, now: float) -> None:
        """Send what is computed, and neither sent yet nor held there, once there is room for it."""
        tokens, last = max(0, computed - request.sent_tokens), computed == request.split
        if not request.admitted or request.kv_sent or not (tokens or last):
            return
        source, target = self._fleet.instance(request.prefill), self._fleet.instance(request.decode)
        request.sent_tokens += tokens
        request.kv_sent = last
        wire_bytes = tokens * source.spec.kv_bytes_per_token * request.wire_share
        self.kv_bytes += wire_bytes
        arrives = self._fleet.wires.send(source.index, target.index, wire_bytes, now)
        if last:
            self._loop.at(arrives, self._kv_arrived, request.decode_leg)

    def _kv_arrived(self, leg: Leg, now: float) -> None:
        request = leg.request
        if leg.cancelled or leg is not request.decode_leg or leg.lane is None:
            return
        self._record.transferred(request, now)
        self._legs.leave(self._fleet.instance(request.prefill), request, now)
        self._legs.kv_arrived(leg, now)


def _decode_leg(request: SimRequest) -> Leg:
    prompt, left, last_token_s = request.job.prompt_tokens, request.decode_tokens, request.last_token_s
    if request.carried:
        return Leg(request, prompt + 1, left, prompt, remote=True, prefix=request.prefix, last_token_s=last_token_s)
    computed = min(request.split, prompt - 1)
    return Leg(request, prompt, left, computed, remote=computed > 0, prefix=request.prefix, last_token_s=last_token_s)
