"""From the prefill instance to the decode instance: dispatch, reservation, KV transfer."""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shared.cost.transfer import wire_share
from shared.domain.instance import InstanceState
from shared.errors import Busy, Unavailable
from shared.policy.dispatch import choose_decode
from shared.policy.index import Assignment
from shared.policy.lengths import is_heavy
from shared.sim.entry import Entry
from shared.sim.flight import Flight
from shared.sim.network import send
from shared.sim.spec import FirstToken, InstanceSpec

if TYPE_CHECKING:
    from shared.sim.cluster import Simulation


class Handover:
    """Takes a request over when its first chunk or its prefill is done, and brings it to a decode instance."""

    def __init__(self, simulation: "Simulation", instances: Sequence[InstanceSpec]) -> None:
        self._sim = simulation
        self._run = simulation.run
        self._carries = self._run.first_token is FirstToken.PREFILL
        self._wire_bytes = [spec.kv_bytes_per_token * wire_share(self._run.codec) for spec in instances]  # a token
        self._waiting: deque[Flight] = deque()  # no decode instance can take them now
        self.kv_bytes = 0.0

    def retry(self, now: float) -> None:
        """Requests whose prefill is done, and that found no decode instance, may try again."""
        for _ in range(len(self._waiting)):
            self.dispatch(self._waiting.popleft(), now)

    def forget(self, flight: Flight) -> None:
        """The request begins anew."""
        if flight in self._waiting:
            self._waiting.remove(flight)

    def carried(self, flight: Flight) -> bool:
        """Whether the prefill instance gives an output token, from which decode goes on."""
        return self._carries and flight.split == flight.job.prompt_tokens

    def tokens_to_decode(self, flight: Flight) -> int:
        """Output tokens that are left to the decode instance."""
        return flight.output_left - int(self.carried(flight))

    def dispatch(self, flight: Flight, now: float) -> None:
        """Give the request its decode instance, and have that reserve memory."""
        left = self.tokens_to_decode(flight)
        if left == 0 or flight.decode_entry is not None or flight.prefill is None:
            return
        if flight.decode is not None and flight.decode.state is InstanceState.DEAD:
            flight.decode = None  # it was bound at placement and has died since
        if flight.decode is None:
            index = self._sim.fleet.dispatch_index(flight.prefill, now)
            try:
                choice = choose_decode(self._run.policies.dispatch, flight.job, index, (), now, self._sim.rng)
            except (Busy, Unavailable):
                if flight not in self._waiting:
                    self._waiting.append(flight)
                return
            flight.decode = self._sim.fleet.by_id[choice.instance.instance_id]
            tokens, heavy = flight.job.prompt_tokens, is_heavy(flight.job)
            index.book(Assignment(choice.instance.instance_id, now, decode_tokens=tokens, heavy=heavy))
        self._sim.count_decode(flight, flight.decode)
        entry = self._decode_entry(flight, left)
        flight.decode_entry = entry
        self._sim.submit(flight.decode, entry, now)

    def _decode_entry(self, flight: Flight, left: int) -> Entry:
        prompt = flight.job.prompt_tokens
        if self.carried(flight):
            return Entry(flight, prompt + 1, left, prompt, remote=True, last_token_s=flight.last_token_s)
        computed = min(flight.split, prompt - 1)
        return Entry(flight, prompt, left, computed, remote=computed > 0, last_token_s=flight.last_token_s)

    def admitted(self, entry: Entry, now: float) -> None:
        """The decode instance has blocks for the KV (see `EngineEvents`)."""
        flight = entry.flight
        flight.admitted = True
        if flight.prefill_done_s >= 0.0:
            self.send(flight, flight.split, now)
        elif self._run.streaming and flight.prefill_entry is not None:
            self.send(flight, flight.prefill_entry.computed, now)

    def send(self, flight: Flight, computed: int, now: float) -> None:
        """Send what is computed and not sent yet, once there is room for it."""
        tokens = computed - flight.sent_tokens
        if not flight.admitted or tokens <= 0:
            return
        assert flight.prefill is not None
        assert flight.decode is not None
        flight.sent_tokens = computed
        wire_bytes = tokens * self._wire_bytes[flight.prefill.index]
        self.kv_bytes += wire_bytes
        arrives = send(flight.prefill.port, flight.decode.port, wire_bytes, now)
        if computed == flight.split:
            self._sim.at(arrives, self._kv_arrived, flight.decode_entry)

    def _kv_arrived(self, entry: Entry, now: float) -> None:
        flight = entry.flight
        if entry.cancelled or entry is not flight.decode_entry or entry.engine is None:
            return
        self._sim.record.transferred(flight, now)
        assert flight.prefill is not None
        self._sim.leave(flight.prefill, flight, now)
        entry.engine.kv_arrived(entry, now)
        self._sim.wake(entry.engine)
