"""How much work may wait for its first token: counted in jobs and prompt tokens, with a fair part for each caller.

A body is admitted before it is read and settles with each job that it becomes: `Admission.admit` at the headers,
`Ticket.claim` when its jobs can be counted, `Ticket.start` for each of them once its tokens are known.
"""

import asyncio
from collections import Counter
from contextlib import suppress
from types import TracebackType
from typing import Self

from gateway.settings import GatewaySettings
from shared.errors import Busy, InvalidRequest

RETRY_S = 2.0


class Admission:
    """Counts what was admitted and has no first token yet.

    With several callers none of them may hold more than its share of the jobs, so that there is room for the others.
    Of one body only some jobs are in the cluster at once without a first token, so that others find short queues there.
    """

    def __init__(self, settings: GatewaySettings, callers: int) -> None:
        share = settings.caller_share if callers > 1 else 1.0
        self._max_jobs = settings.max_queued_jobs
        self._max_tokens = settings.max_queued_tokens
        self._jobs_a_caller = max(1, int(self._max_jobs * share))
        self._by_caller: Counter[str] = Counter()
        self.jobs_a_body = min(settings.max_jobs_a_body, self._jobs_a_caller)
        self.jobs_at_once = settings.jobs_at_once
        self.jobs = 0
        self.tokens = 0

    def admit(self, caller: str) -> "Ticket":
        """Let a request in, for one job as yet. Raises Busy."""
        ticket = Ticket(self, caller)
        ticket.claim(1)
        return ticket

    def take_jobs(self, caller: str, jobs: int) -> None:
        """Raises Busy."""
        held = self._by_caller[caller]
        if self.jobs + jobs > self._max_jobs:
            raise Busy(f"{self.jobs} jobs wait for their first token; {jobs} more are too many", retry_after_s=RETRY_S)
        if held + jobs > self._jobs_a_caller:
            said = f"{held} jobs of {caller!r} wait for their first token; {jobs} more are over its share"
            raise Busy(said, retry_after_s=RETRY_S)
        self.jobs += jobs
        self._by_caller[caller] = held + jobs

    def take_tokens(self, tokens: int) -> None:
        """Raises Busy. A job that nobody is before always passes."""
        if self.tokens and self.tokens + tokens > self._max_tokens:
            said = f"{self.tokens} prompt tokens wait to be computed; {tokens} more are over {self._max_tokens}"
            raise Busy(said, retry_after_s=RETRY_S)
        self.tokens += tokens

    def give_back(self, caller: str, jobs: int, tokens: int = 0) -> None:
        """These wait no longer."""
        self.jobs -= jobs
        self.tokens -= tokens
        self._by_caller[caller] -= jobs
        if not self._by_caller[caller]:
            del self._by_caller[caller]


class Ticket:
    """What one request may start. A context manager: what was claimed and not started goes back at its end."""

    def __init__(self, admission: Admission, caller: str) -> None:
        self.admission = admission
        self.caller = caller
        self.turns = asyncio.Semaphore(admission.jobs_at_once)
        self._claimed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.admission.give_back(self.caller, self._claimed)
        self._claimed = 0

    def claim(self, jobs: int) -> None:
        """Hold a claim for so many jobs. Raises Busy; InvalidRequest when no body may have so many."""
        limit = self.admission.jobs_a_body
        if jobs > limit:
            raise InvalidRequest(f"the body asks for {jobs} answers (prompts times n); the limit is {limit}")
        if jobs > self._claimed:
            self.admission.take_jobs(self.caller, jobs - self._claimed)
            self._claimed = jobs

    def start(self, prompt_tokens: int) -> "Seat":
        """Turn a claim into a job; a job beyond what was claimed is a claim of its own. Raises Busy."""
        self.claim(1)
        self.admission.take_tokens(prompt_tokens)
        self._claimed -= 1
        return Seat(self, prompt_tokens)


class Seat:
    """A job's, until its first token or its end."""

    def __init__(self, ticket: Ticket, tokens: int) -> None:
        self._ticket = ticket
        self._tokens = tokens
        self._waits = True
        self._has_turn = False

    async def turn(self, timeout_s: float) -> None:
        """Wait until few enough jobs of the body are in the cluster without a first token, at most so long."""
        turns = self._ticket.turns
        if not turns.locked():
            await turns.acquire()  # returns at once
            self._has_turn = True
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await turns.acquire()
                self._has_turn = True

    def leave(self) -> None:
        """The job waits no longer. May be said more than once."""
        if self._waits:
            self._waits = False
            self._ticket.admission.give_back(self._ticket.caller, 1, self._tokens)
        if self._has_turn:
            self._has_turn = False
            self._ticket.turns.release()
