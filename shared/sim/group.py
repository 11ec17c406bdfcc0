"""The requests of one engine that decode: advanced together, without touching each one."""

from heapq import heappop, heappush

from shared.sim.pauses import Pauses
from shared.sim.request import Leg


class DecodeGroup:
    """All decodes of an engine. A step adds one token to each; joining and leaving cost O(log n), a step O(1).

    The group counts its steps; a member's context is its `base` plus that count. A member needs a new block when its
    context is a multiple of the block size, so a histogram of `base` by block offset says how many blocks a step takes.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._offsets = [0] * block_tokens
        self._finish: list[tuple[int, int, Leg]] = []
        self._joined = 0
        self.count = 0
        self.context_tokens = 0
        self.steps = 0
        self.pauses = Pauses()

    def join(self, leg: Leg) -> None:
        """From the next step on it decodes."""
        leg.base = leg.computed - self.steps
        leg.finish_step = self.steps + leg.left
        self._offsets[leg.base % self._block] += 1
        self.count += 1
        self.context_tokens += leg.computed
        self._joined += 1
        heappush(self._finish, (leg.finish_step, self._joined, leg))
        self.pauses.join(leg)

    def leave(self, leg: Leg) -> None:
        """Take a member out; its own counts are brought up to date."""
        leg.computed = leg.base + self.steps
        leg.left = leg.finish_step - self.steps
        leg.tokens = leg.computed + 1
        leg.finish_step = -1
        self._offsets[leg.base % self._block] -= 1
        self.count -= 1
        self.context_tokens -= leg.computed
        if not leg.cancelled:
            self.pauses.leave(leg)
        if not self.count:
            self.pauses.clear()

    def advance(self, steps: int) -> list[Leg]:
        """Take steps, at most `steps_to_finish`; who is done leaves, in order of joining."""
        self.steps += steps
        self.context_tokens += steps * self.count
        done = []
        while self._finish and self._finish[0][0] <= self.steps:
            _, _, leg = heappop(self._finish)
            if leg.finish_step == self.steps:  # else it left earlier, or joined again
                self.leave(leg)
                done.append(leg)
        return done

    def steps_to_finish(self) -> int:
        """Steps until the next member is done."""
        while True:
            finish_step, _, leg = self._finish[0]
            if leg.finish_step == finish_step:
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
