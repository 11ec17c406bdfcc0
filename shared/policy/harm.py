"""How bad it is for a request to take a time: likely misses of its target, and slowness."""

SLOWNESS, LATENESS = 0.1, 0.1  # of a miss, for each target's length of time; and more for each beyond the target


def harm(share: float) -> float:
    """How likely a target is missed by a time that is expected to be `share` of it; and a little for being slow at all.

    What is missed for certain is little worse for one more delay, so that harm is not spread over those who can be
    spared; where all miss, what is left to gain is time.
    """
    if share <= 0.0:
        return 0.0
    square = share * share  # `missed`, without a call: a decision asks for harm some fifty times
    power = square * square
    late = LATENESS * (share - 1.0) if share > 1.0 else 0.0
    return power / (1.0 + power) + SLOWNESS * share + late


def missed(share: float) -> float:
    """How likely a target is missed by a time that is expected to be `share` of it, at least 0.

    Ours: log-logistic, x^4 / (1 + x^4), as if estimates were off by a third either way; 0.5 at the target itself.
    """
    square = share * share
    power = square * square
    return power / (1.0 + power)
