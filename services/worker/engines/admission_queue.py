"""The door of an engine: who waits before it, in which order, and whether the next one may enter now."""

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

from services.worker.engines.base import CurrentRates, EnginePolicies, EngineRequest
from shared.policy.admission_gate import Blocks, Decoding, may_decode
from shared.policy.decode_admission import Greedy
from shared.policy.waiting_line import WaitingLine

Item = TypeVar("Item", bound=Hashable)


class Entrance(Generic[Item]):
    """Items are the engine's own objects; `request_of` says what was asked for each. Streams, whose clients have
    tokens, enter before all prompts: while one does not fit, no prompt takes the room that it waits for.

    `inside` and `blocks` are asked when an admission policy has to decide: those that decode here, and KV memory.
    Greedy's rule, that the prompt fits, is the engine's own: it is not asked.
    """

    def __init__(
        self,
        policies: EnginePolicies,
        rates: CurrentRates,
        request_of: Callable[[Item], EngineRequest],
        tokens_of: Callable[[Item], int],
        inside: Callable[[], Sequence[Decoding]],
        blocks: Callable[[], Blocks],
    ) -> None:
        self._policies = policies
        self._request_of = request_of
        self._tokens_of = tokens_of
        self._inside = inside
        self._blocks = blocks
        self._line: WaitingLine[Item] = WaitingLine(policies.order, rates)

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._line)

    @property
    def decode_tokens(self) -> int:
        """Context of those that are to decode here."""
        return sum(self._tokens_of(item) for item in self._line.everyone() if self._request_of(item).decodes)

    def follow(self, policies: EnginePolicies) -> None:
        """Go by these from now on."""
        if policies.order != self._policies.order:
            self._line.reorder(policies.order)
        self._policies = policies

    def add(self, item: Item) -> None:
        """One has come."""
        self._line.push(item, self._request_of(item).as_waiting())

    @property
    def stream(self) -> Item | None:
        """The next stream that waits; None where none does."""
        return self._line.stream

    def started(self, item: Item) -> bool:
        """Whether its client has a token, given here or elsewhere."""
        request = self._request_of(item)
        return request.job.started or self._tokens_of(item) > len(request.prompt_token_ids)

    def put_back(self, item: Item) -> None:
        """One that has entered before waits again, before all others of its class, or of the streams of its class."""
        self._line.put_back(item, self._request_of(item).job.slo.weight, started=self.started(item))

    def preempted(self, item: Item) -> None:
        """One that was inside has lost its blocks: it waits as one that is put back, and its worker is notified."""
        self.put_back(item)
        self._request_of(item).preempted()

    def remove(self, item: Item) -> bool:
        """Somebody gives up; False when it is not here."""
        return self._line.remove(item)

    def next(self) -> Item | None:
        """Who may enter now; None when nobody waits, or the next one may not yet. It stays until it is taken."""
        if not len(self._line):
            return None
        item = self._line.peek()
        request = self._request_of(item)
        if request.decodes and not self._admits(item, request):
            return None
        if request.export_to:
            if not request.has_room():
                return None
            self._line.hold()  # it has room that nobody else can have: no later one comes between
        return item

    def peek(self) -> Item:
        """The next, whether it may enter or not. Raises IndexError when empty."""
        return self._line.peek()

    def take(self) -> Item:
        """The next enters."""
        item = self._line.pop()
        self._request_of(item).entered()
        return item

    def _admits(self, item: Item, request: EngineRequest) -> bool:
        policy = self._policies.admission
        if isinstance(policy, Greedy):
            return True
        prompt, tokens = len(request.prompt_token_ids), self._tokens_of(item)
        left = request.max_tokens - (tokens - prompt)  # preempted: what it has given is prompt now
        job = msgspec.structs.replace(request.job, prompt_tokens=tokens, max_tokens=left)
        return may_decode(policy, job, self._inside(), self._blocks(), time.time())
