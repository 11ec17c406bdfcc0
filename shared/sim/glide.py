"""Several decode steps of one batch as one event: exact times of every step in between."""

from math import ceil, sqrt

Segment = tuple[int, float, float]  # steps, seconds of the first, seconds of the last: linear in between


class Glide:
    """Decode steps from `start_s` on. Step times grow linearly within a segment, so sums and their inverse are closed.

    Equal to taking the steps one by one, within rounding.
    """

    __slots__ = ("_segments", "first_step_s", "start_s", "steps")

    def __init__(self, start_s: float, segments: tuple[Segment, ...]) -> None:
        self.start_s = start_s
        self._segments = segments
        self.first_step_s = segments[0][1]
        self.steps = segments[0][0] if len(segments) == 1 else sum(segment[0] for segment in segments)

    def end_s(self, steps: int) -> float:
        """When that many of the steps are done."""
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
        """Steps that have ended by `now`."""
        begun = self.steps_begun(now)
        return begun if self.end_s(begun) <= now else begun - 1

    def runs(self, steps: int) -> tuple[Segment, ...]:
        """The first `steps` steps as segments."""
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
