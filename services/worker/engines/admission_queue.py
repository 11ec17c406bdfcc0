"""The admission queue of an engine: who waits, in which order, and whether the next request may start now."""

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

from services.worker.engines.base import EnginePolicies, EngineRequest
from shared.policy.decode_admission import Blocks, Decoding, Greedy, may_decode
from shared.policy.prefill_order import PrefillQueue

Item = TypeVar("Item", bound=Hashable)


class AdmissionQueue(Generic[Item]):
    """Items are the engine's own objects; `request_of` gives the request of each. Streams, whose clients have tokens,
    start before all prompts: while one does not fit, no prompt takes the room that it waits for.

    `decoding` and `blocks` are called when an admission policy has to decide: the requests that decode here, and KV
    memory. Greedy's rule, that the prompt fits, is the engine's own: that policy is not consulted.
    """

    def __init__(
        self,
        policies: EnginePolicies,
        request_of: Callable[[Item], EngineRequest],
        tokens_of: Callable[[Item], int],
        decoding: Callable[[], Sequence[Decoding]],
        blocks: Callable[[], Blocks],
    ) -> None:
        self._policies = policies
        self._request_of = request_of
        self._tokens_of = tokens_of
        self._decoding = decoding
        self._blocks = blocks
        self._waiting: PrefillQueue[Item] = PrefillQueue(policies.order)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._waiting)

    @property
    def decode_tokens(self) -> int:
        """Context of the requests that are to decode here."""
        return sum(self._tokens_of(item) for item in self._waiting.everyone() if self._request_of(item).decodes)

    def set_policies(self, policies: EnginePolicies) -> None:
        if policies.order != self._policies.order:
            self._waiting.reorder(policies.order)
        self._policies = policies

    def add(self, item: Item) -> None:
        self._waiting.push(item, self._request_of(item).as_waiting())

    @property
    def stream(self) -> Item | None:
        """The next stream that waits; None where none does."""
        return self._waiting.stream

    def started(self, item: Item) -> bool:
        """Whether its client has a token, from this instance or another."""
        request = self._request_of(item)
        return request.job.started or self._tokens_of(item) > len(request.prompt_token_ids)

    def put_back(self, item: Item) -> None:
        """A request that has started before waits again, before all others of its class, or of the streams of its
        class.
        """
        self._waiting.put_back(item, self._request_of(item).job.slo.weight, started=self.started(item))

    def preempted(self, item: Item) -> None:
        """A running request has lost its blocks: it waits as one that is put back, and its worker is notified."""
        self.put_back(item)
        self._request_of(item).preempted()

    def remove(self, item: Item) -> bool:
        """False when it does not wait here."""
        return self._waiting.remove(item)

    def next(self) -> Item | None:
        """The request that may start now; None when none waits, or the next must wait. It stays until it is popped."""
        if not len(self._waiting):
            return None
        item = self._waiting.peek()
        request = self._request_of(item)
        if request.decodes and not self._admits(item, request):
            return None
        if request.export_to:
            if not request.has_room():
                return None
            self._waiting.hold()  # its room is reserved: no later request may come before it
        return item

    def peek(self) -> Item:
        """The next, whether it may start or not. Raises IndexError when empty."""
        return self._waiting.peek()

    def pop(self) -> Item:
        item = self._waiting.pop()
        self._request_of(item).entered()
        return item

    def _admits(self, item: Item, request: EngineRequest) -> bool:
        policy = self._policies.admission
        if isinstance(policy, Greedy):
            return True
        prompt, tokens = len(request.prompt_token_ids), self._tokens_of(item)
        left = request.max_tokens - (tokens - prompt)  # after a preemption, its output so far is computed like prompt
        job = msgspec.structs.replace(request.job, prompt_tokens=tokens, max_tokens=left)
        return may_decode(policy, job, self._decoding(), self._blocks(), time.time())
