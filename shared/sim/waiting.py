"""The legs that wait at one engine."""

from collections.abc import Callable

from shared.domain.rates import StepRates
from shared.policy.prefill_order import PrefillOrder, WaitingJob
from shared.policy.waiting_line import WaitingLine
from shared.sim.request import Leg


class WaitingLegs:
    """All legs that wait: streams before prompts without a token, prompts in the policy's order; preempted ones come
    first. `count`: how many.

    A prompt that is only computed here also waits until its KV has room among `staging_tokens`, which it holds until it
    is sent; one that is longer than all of them holds none. Nobody overtakes one that has its room. Live, a worker's
    engine and its export ledger do the same.
    """

    __slots__ = ("_line", "_staged", "_staging", "_staging_free")

    def __init__(
        self,
        order: PrefillOrder,
        staging_tokens: int | None = None,
        rates: Callable[[], StepRates | None] = lambda: None,
    ) -> None:
        self._line: WaitingLine[Leg] = WaitingLine(order, rates)
        self._staging = self._staging_free = staging_tokens
        self._staged: dict[Leg, int] = {}  # until their KV is sent

    @property
    def decode_tokens(self) -> int:
        """Context of those that are to decode here."""
        return sum(leg.tokens for leg in self._line.everyone() if leg.decodes)

    @property
    def count(self) -> int:
        """See above."""
        return len(self._line)

    def push(self, leg: Leg) -> None:
        """Add one that has just come."""
        request = leg.request
        self._line.push(leg, WaitingJob(request.job, leg.missing, leg.computed, request.arrived_s, leg.started))

    def push_front(self, leg: Leg) -> None:
        """Put back at the head of its class, a stream at the head of the streams of its class."""
        self._line.put_back(leg, leg.request.job.slo.weight, started=leg.started)

    @property
    def stream(self) -> Leg | None:
        """The next stream; None where none waits."""
        return self._line.stream

    def started(self, leg: Leg) -> bool:
        """Its client has its first token from elsewhere: it goes before all prompts. Whether it waits here."""
        if not self._line.remove(leg):
            return False
        self.push(leg)
        return True

    def peek(self) -> Leg | None:
        """The next one, whether its KV has room or not."""
        return self._line.peek() if len(self._line) else None

    def next(self) -> Leg | None:
        """The next one for the engine, which stays; None when nobody waits, or there is no room for its KV."""
        leg = self.peek()
        if leg is None or not self._stages(leg):
            return leg
        if not self._stage(leg):
            return None
        return self._line.hold()

    def pop(self) -> Leg:
        """Take the next one."""
        return self._line.pop()

    def remove(self, leg: Leg) -> bool:
        """Take a leg out; False when it is not here."""
        return self._line.remove(leg)

    def sent(self, leg: Leg) -> bool:
        """Nothing of its KV is here any more. Whether somebody may have waited for the room."""
        if self._staging_free is None or leg not in self._staged:
            return False
        self._staging_free += self._staged.pop(leg)
        return len(self._line) > 0

    def _stages(self, leg: Leg) -> bool:
        return self._staging is not None and not leg.decodes and leg.request.decode_tokens > 0

    def _stage(self, leg: Leg) -> bool:
        """Whether its KV has room; from now on it has."""
        assert self._staging is not None
        assert self._staging_free is not None
        if leg in self._staged:
            return True
        tokens = leg.tokens if leg.tokens <= self._staging else 0
        if tokens > self._staging_free:
            return False
        self._staging_free -= tokens
        self._staged[leg] = tokens
        return True
