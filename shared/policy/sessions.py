"""Sessions: where the last turn of a chat or of an agent was computed, so that its next turn can go where its KV lies.

A turn's KV shows in the prefix index once its instances have reported it, a moment after its end. Until then, and for
instances whose prefix caches are not known, the prompt and the answer of the last turn count as held where they were
computed, if the next prompt begins with the last one. Free of clocks: the caller passes times in.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from shared.domain.job import JobView
from shared.domain.kv import Codec
from shared.domain.prompt import BLOCK_TOKENS
from shared.domain.route import Route
from shared.policy.prefix_index import PrefixIndex

KEPT = 50_000  # sessions, and jobs under way: the oldest are forgotten
UNREPORTED_S = 2.0  # after its end, a turn is in the reports of its instances
UNKNOWN_S = 30.0  # for so long it counts where an instance does not report what it holds


@dataclass(frozen=True, slots=True)
class Turn:
    """The last turn of a session.

    held: by instance, the tokens whose KV the turn left there, in whole blocks, the most first. blocks: of the prompt,
    with the hash of the last one; 0: not known. ended_s: on the caller's clock.
    """

    held: Mapping[str, int]
    blocks: int = 0
    last_hash: int = 0
    ended_s: float = 0.0

    def goes_on_in(self, job: JobView) -> bool:
        """Whether the job's prompt begins with the turn's prompt, in whole blocks."""
        return 0 < self.blocks <= len(job.prefix) and job.prefix[self.blocks - 1] == self.last_hash


@dataclass(slots=True)
class _Open:
    """A job under way: tokens of its prompt that each of its instances computes or receives."""

    session: str
    prefill: str
    prefill_tokens: int
    decode: str
    prompt_tokens: int
    blocks: int
    last_hash: int
    reusable: bool = True  # the KV that the decode instance has, by later prompts


class Sessions:
    """The last turns, by session. The jobs of one session may overlap: the one that ends last is its last turn.

    block_tokens: of the blocks of prompts.
    """

    def __init__(self, kept: int = KEPT, block_tokens: int = BLOCK_TOKENS) -> None:
        self._kept = kept
        self._block_tokens = block_tokens
        self._turns: OrderedDict[str, Turn] = OrderedDict()
        self.under_way: OrderedDict[str, _Open] = OrderedDict()  # by job

    def __len__(self) -> int:
        return len(self._turns)

    def placed(self, job: JobView, route: Route) -> None:
        """A job with a session was placed, perhaps again. A place for its decode alone leaves its prefill as it was."""
        known = self.under_way.pop(job.job_id, None)
        blocks = min(len(job.prefix), job.prompt_tokens // self._block_tokens)  # a trace may name a last part of one
        found = _Open(job.session, "", 0, "", job.prompt_tokens, blocks, job.prefix[blocks - 1] if blocks else 0)
        if known is not None:
            found.prefill, found.prefill_tokens = known.prefill, known.prefill_tokens
            found.prompt_tokens = known.prompt_tokens  # later, the answer so far may count as prompt
        if route.prefill is not None:
            found.prefill, found.prefill_tokens = route.prefill.instance_id, route.split
        if route.decode is not None:
            found.decode = route.decode.instance_id
            found.reusable = _joins_cache(job, route)
        self.under_way[job.job_id] = found
        if len(self.under_way) > self._kept:
            self.under_way.popitem(last=False)

    def ended(self, job_id: str, output_tokens: int, now: float) -> None:
        """A job that is under way has ended. output_tokens: of a whole answer; 0: its session's last turn stays."""
        job = self.under_way.pop(job_id)
        if not output_tokens:
            return
        held: dict[str, int] = {}
        if job.decode:
            computed = job.prompt_tokens + output_tokens - 1  # all but the last token
            held[job.decode] = self._whole(computed) if job.reusable else 0
        if job.prefill:
            held[job.prefill] = max(held.get(job.prefill, 0), self._whole(job.prefill_tokens))
        self._turns.pop(job.session, None)
        self._turns[job.session] = Turn(held, job.blocks, job.last_hash, now)
        if len(self._turns) > self._kept:
            self._turns.popitem(last=False)

    def _whole(self, tokens: int) -> int:
        return max(0, tokens - tokens % self._block_tokens)

    def last(self, job: JobView) -> Turn | None:
        """The last turn of the job's session."""
        return self._turns.get(job.session) if job.session else None

    def held(self, job: JobView, prefixes: PrefixIndex, now: float) -> dict[str, int]:
        """The instances of the session's last turn, with the tokens of the job's prompt that count as held there beside
        what the instances report.
        """
        turn = self.last(job)
        if turn is None:
            return {}
        if not turn.goes_on_in(job):
            return dict.fromkeys(turn.held, 0)
        age_s = now - turn.ended_s
        return {
            instance_id: tokens if age_s <= (UNREPORTED_S if prefixes.reports(instance_id) else UNKNOWN_S) else 0
            for instance_id, tokens in turn.held.items()
        }


def _joins_cache(job: JobView, route: Route) -> bool:
    """Whether later prompts find the KV at the decode instance: not where it may have come in a lossy codec, or from an
    instance of another precision.
    """
    if route.prefill is None or route.decode is None:
        return True
    return job.slo.lossy_kv is Codec.RAW and route.prefill.precision == route.decode.precision
