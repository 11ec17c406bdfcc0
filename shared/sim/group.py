"""The requests of one engine that decode: advanced together, without touching each one."""

from heapq import heappop, heappush

from shared.sim.entry import Entry


class DecodeGroup:
    """All decodes of an engine. A step adds one token to each; joining and leaving cost O(log n), a step O(1).

    The group counts its steps; a member's context is its `base` plus that count. A member needs a new block when its
    context is a multiple of the block size, so a histogram of `base` by block offset says how many blocks a step takes.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._offsets = [0] * block_tokens
        self._finish: list[tuple[int, int, Entry]] = []
        self._joined = 0
        self.count = 0
        self.context_tokens = 0
        self.steps = 0

    def join(self, entry: Entry) -> None:
        """From the next step on it decodes."""
        entry.base = entry.computed - self.steps
        entry.finish_step = self.steps + entry.left
        self._offsets[entry.base % self._block] += 1
        self.count += 1
        self.context_tokens += entry.computed
        self._joined += 1
        heappush(self._finish, (entry.finish_step, self._joined, entry))

    def leave(self, entry: Entry) -> None:
        """Take a member out; its own counts are brought up to date."""
        entry.computed = entry.base + self.steps
        entry.left = entry.finish_step - self.steps
        entry.tokens = entry.computed + 1
        entry.finish_step = -1
        self._offsets[entry.base % self._block] -= 1
        self.count -= 1
        self.context_tokens -= entry.computed

    def produced_since(self, entry: Entry, left_before: int) -> int:
        """Output tokens that a member has got since it had `left_before` to go."""
        return left_before - (entry.finish_step - self.steps)

    def advance(self, steps: int) -> list[Entry]:
        """Take steps, at most `steps_to_finish`; who is done leaves, in order of joining."""
        self.steps += steps
        self.context_tokens += steps * self.count
        done = []
        while self._finish and self._finish[0][0] <= self.steps:
            _, _, entry = heappop(self._finish)
            if entry.finish_step == self.steps:  # else it left earlier, or joined again
                self.leave(entry)
                done.append(entry)
        return done

    def steps_to_finish(self) -> int:
        """Steps until the next member is done."""
        while True:
            finish_step, _, entry = self._finish[0]
            if entry.finish_step == finish_step:
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
