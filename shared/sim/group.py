"""The decodes of one engine, advanced together: no step touches a member of the batch."""

from bisect import bisect_left
from heapq import heappop, heappush
from math import ceil, floor, inf, sqrt
from typing import Generic, TypeVar

from shared.cost.step import Segment
from shared.sim.request import Leg, ScheduledRequest, State

R = TypeVar("R", bound=ScheduledRequest)


class DecodeGroup(Generic[R]):
    """All decodes of an engine. A step adds one token to each; joining and leaving cost O(log n), a step O(1).

    The group counts its steps; a member's context is its `base` plus that count. A member needs a new block when its
    context is a multiple of the block size, so a histogram of `base` by block offset says how many blocks a step takes.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._offsets = [0] * block_tokens
        self._finish: list[tuple[int, int, R]] = []
        self._joined = 0
        self.count = 0
        self.context_tokens = 0
        self.steps = 0

    def join(self, request: R) -> None:
        request.base = request.computed_tokens - self.steps
        request.finish_step = self.steps + request.output_left
        self._offsets[request.base % self._block] += 1
        self.count += 1
        self.context_tokens += request.computed_tokens
        self._joined += 1
        heappush(self._finish, (request.finish_step, self._joined, request))

    def leave(self, request: R) -> None:
        """Take a member out, and bring its own counts up to date."""
        request.computed_tokens = request.base + self.steps
        request.output_left = request.finish_step - self.steps
        request.tokens = request.computed_tokens + 1
        request.finish_step = -1
        self._offsets[request.base % self._block] -= 1
        self.count -= 1
        self.context_tokens -= request.computed_tokens

    def advance(self, steps: int) -> list[R]:
        """Take steps, at most `steps_to_finish`. Members that are done leave, and are returned in order of joining."""
        self.steps += steps
        self.context_tokens += steps * self.count
        done = []
        while self._finish and self._finish[0][0] <= self.steps:
            _, _, request = heappop(self._finish)
            if request.finish_step == self.steps:  # else it left earlier, or joined again
                self.leave(request)
                done.append(request)
        return done

    def tokens_of(self, request: R) -> int:
        """Tokens of a request, its newest output token included; it may be a member or not."""
        return request.base + self.steps + 1 if request.state is State.DECODING else request.tokens

    def steps_to_finish(self) -> int:
        while True:
            finish_step, _, request = self._finish[0]
            if request.finish_step == finish_step:
                return finish_step - self.steps
            heappop(self._finish)

    def blocks_for(self, steps: int) -> int:
        """New blocks that the next `steps` steps take."""
        at = -self.steps % self._block  # the offset that needs a block in the next step; then the one below, and so on
        if steps == 1:
            return self._offsets[at]
        rounds, rest = divmod(steps, self._block)
        low = at - rest + 1
        if low >= 0:
            return rounds * self.count + sum(self._offsets[low : at + 1])
        return rounds * self.count + sum(self._offsets[: at + 1]) + sum(self._offsets[low:])

    def affordable(self, free_blocks: int, most: int) -> int:
        """The most steps, up to `most`, whose blocks are free."""
        if most * self.count <= free_blocks or self.blocks_for(most) <= free_blocks:
            return most
        rounds = free_blocks // self.count
        steps, blocks = rounds * self._block, rounds * self.count
        while True:
            blocks += self._offsets[-(self.steps + steps) % self._block]
            if blocks > free_blocks:
                return steps
            steps += 1


class Glide:
    """Several decode steps of one batch as one event, from `start_s` on; equal to single steps within rounding.

    Step times grow linearly within a segment, so sums of them, and their inverse, have closed forms.
    """

    __slots__ = ("_segments", "first_step_s", "start_s", "steps")

    def __init__(self, start_s: float, segments: tuple[Segment, ...]) -> None:
        self.start_s = start_s
        self._segments = segments
        self.first_step_s = segments[0][1]
        self.steps = segments[0][0] if len(segments) == 1 else sum(segment[0] for segment in segments)

    def end_s(self, steps: int) -> float:
        at = self.start_s
        for length, first, last in self._segments:
            if steps <= length:
                growth = (last - first) / (length - 1) if length > 1 else 0.0
                return at + steps * (first + growth * (steps - 1) / 2.0)
            at += length * (first + last) / 2.0
            steps -= length
        return at

    def steps_begun(self, now: float) -> int:
        """Steps done or under way at `now`: the engine schedules anew once they are done. At least 1."""
        left = now - self.start_s
        done = 0
        for length, first, last in self._segments:
            whole = length * (first + last) / 2.0
            if left < whole:
                return max(1, done + _first_reaching(length, first, last, left))
            left -= whole
            done += length
        return self.steps

    def steps_done(self, now: float) -> int:
        begun = self.steps_begun(now)
        return begun if self.end_s(begun) <= now else begun - 1

    def runs(self, steps: int) -> tuple[Segment, ...]:
        if steps == self.steps:
            return self._segments
        found: list[Segment] = []
        for length, first, last in self._segments:
            if steps <= length:
                growth = (last - first) / (length - 1) if length > 1 else 0.0
                found.append((steps, first, first + growth * (steps - 1)))
                break
            found.append((length, first, last))
            steps -= length
        return tuple(found)


def _first_reaching(length: int, first: float, last: float, seconds: float) -> int:
    """The least number of steps of a segment that take at least `seconds`; at most `length`."""
    growth = (last - first) / (length - 1) if length > 1 else 0.0
    half = first - growth / 2.0
    if growth * length > 1e-9 * first:
        guess = ceil((sqrt(half * half + 2.0 * growth * seconds) - half) / growth)
    else:
        guess = ceil(seconds / first)
    guess = min(max(guess, 0), length)
    growth /= 2.0
    # The closed form may be off by one for rounding.
    while guess > 0 and (guess - 1) * (first + growth * (guess - 2)) >= seconds:
        guess -= 1
    while guess < length and guess * (first + growth * (guess - 1)) < seconds:
        guess += 1
    return guess


class Pauses:
    """Longest gap and gaps over the target of each member, from counts of its engine's steps.

    Each member gets a token with each step, so a step is a gap of every member. What happened between a member's
    joining and its leaving is read from what is kept of all steps. Adding steps costs O(targets), joining and leaving
    O(log n).
    """

    __slots__ = ("_added", "_least_s", "_longest", "_over")

    def __init__(self) -> None:
        self._added = 0
        self._over: dict[float, int] = {}  # by target, in seconds: steps that took longer, so far
        self._least_s = inf  # of the targets
        # (when it was added, seconds) of steps that no later one exceeds: the first at or after a moment is the longest
        self._longest: list[tuple[int, float]] = []

    def join(self, leg: Leg) -> None:
        """Steps that are added from now on are gaps of the leg."""
        target_s = leg.request.job.slo.itl_s
        if target_s not in self._over:
            self._over[target_s] = 0
            self._least_s = min(self._least_s, target_s)
        leg.joined_at, leg.joined_over = self._added, self._over[target_s]

    def leave(self, leg: Leg) -> None:
        """Count the steps since the leg joined as gaps of its request."""
        at = bisect_left(self._longest, (leg.joined_at, -1.0))
        if at < len(self._longest):
            over = self._over[leg.request.job.slo.itl_s] - leg.joined_over
            leg.request.add_gaps(self._longest[at][1], over)

    def add(self, runs: tuple[Segment, ...]) -> None:
        longest_s = max(max(first, last) for _, first, last in runs)
        kept = self._longest
        while kept and kept[-1][1] <= longest_s:
            kept.pop()
        kept.append((self._added, longest_s))
        self._added += 1
        if longest_s > self._least_s:
            for target_s in self._over:
                self._over[target_s] += sum(steps_over(run, target_s) for run in runs)

    def clear(self) -> None:
        self._longest.clear()


class MeasuredGroup(DecodeGroup[Leg]):
    """A group that counts the gaps between the tokens of its members."""

    def __init__(self, block_tokens: int) -> None:
        super().__init__(block_tokens)
        self.pauses = Pauses()

    def join(self, request: Leg) -> None:
        super().join(request)
        self.pauses.join(request)

    def leave(self, request: Leg) -> None:
        super().leave(request)
        if not request.cancelled:
            self.pauses.leave(request)
        if not self.count:
            self.pauses.clear()


def steps_over(run: Segment, target_s: float) -> int:
    """How many steps of a segment take longer than `target_s`."""
    length, first, last = run
    if max(first, last) <= target_s:
        return 0
    if min(first, last) > target_s or length == 1:
        return length
    at = (target_s - first) * (length - 1) / (last - first)  # position of the step that takes just so long
    return length - 1 - floor(at) if last > first else ceil(at)


def without_first(runs: tuple[Segment, ...]) -> tuple[Segment, ...]:
    length, first, last = runs[0]
    if length == 1:
        return runs[1:]
    return ((length - 1, first + (last - first) / (length - 1), last), *runs[1:])
