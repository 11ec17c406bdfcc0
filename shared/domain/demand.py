"""The demand of the clients: sums over one second, which schedulers report to the monitor, and the profile of them."""

import msgspec


class DemandSecond(msgspec.Struct, frozen=True):
    """The requests that one scheduler placed for the first time in a whole second of unix time; sums are over them, and
    from `ended` on over the whole answers that ended in it.

    A second without requests is reported, too: a missing report is not a lull. fresh_tokens: of prompts, less the
    cached tokens where they were placed; fresh_squares: squares of the prompts' lengths less those of the cached
    parts, for the cost of attention. output_tokens: expected at arrival, from predictions and earlier answers. logs:
    natural logarithms of lengths. per_ttft, per_tpot: 1/s, inverses of the targets. split_least, split_most: the
    share of the prompt that prefill instances must and may compute under the split policy in force, 0..1 each.
    ended_expected: expected tokens of the answers that ended.
    """

    source: str
    second: int
    requests: int = 0
    prompt_tokens: float = 0.0
    fresh_tokens: float = 0.0
    fresh_squares: float = 0.0
    prompt_logs: float = 0.0
    prompt_log_squares: float = 0.0
    output_tokens: float = 0.0
    per_ttft: float = 0.0
    per_tpot: float = 0.0
    split_least: float = 0.0
    split_most: float = 0.0
    ended: int = 0
    ended_tokens: float = 0.0
    ended_expected: float = 0.0
    ended_logs: float = 0.0
    ended_log_squares: float = 0.0

    @property
    def quiet(self) -> bool:
        """Whether it has neither requests nor ended answers."""
        return not self.requests and not self.ended


SUMS = tuple(name for name in DemandSecond.__struct_fields__ if name not in ("source", "second"))


class Shift(msgspec.Struct, frozen=True):
    """A change of the demand. what: arrivals, prompts or outputs; before, after: requests a second, or tokens
    (geometric mean). noticed_s: from the estimated time of the change to its detection. deviations: standard errors
    by which both differ.
    """

    what: str
    before: float
    after: float
    noticed_s: float
    deviations: float


class AskedSecond(msgspec.Struct, frozen=True):
    """The requests of one second of unix time, over all schedulers; tokens are means, 0 without requests.

    output_tokens: as expected at arrival.
    """

    second: int
    requests: int
    prompt_tokens: float
    output_tokens: float

    @classmethod
    def of(cls, sums: DemandSecond) -> "AskedSecond":
        each = max(1, sums.requests)
        return cls(sums.second, sums.requests, sums.prompt_tokens / each, sums.output_tokens / each)


class RolesWanted(msgspec.Struct, frozen=True):
    """The best number of ready instances of either role, and the predicted harm (the share of requests that miss a
    target) with the present roles and with those.
    """

    prefill: int
    decode: int
    harm: float
    harm_then: float


class Demand(msgspec.Struct, frozen=True):
    """The profile of the demand since the last shift, at most of the last minute. Means are over requests.

    rate: requests a second. burstiness: variance of the arrivals over their mean, 1 for Poisson arrivals. fresh_tokens,
    fresh_squares, split_least, split_most: see `DemandSecond`. output_tokens: as expected, corrected by how long
    answers turned out. prompt_spread, output_spread: standard deviations of the lengths' natural logarithms, 0 where
    they are not known. ttft_s, tpot_s: harmonic means of the targets. age_s: for how long it has been like this, also
    beyond the last minute. shift: the last one, if any was noticed.
    """

    rate: float
    burstiness: float
    prompt_tokens: float
    fresh_tokens: float
    fresh_squares: float
    output_tokens: float
    ttft_s: float
    tpot_s: float
    split_least: float = 0.0
    split_most: float = 1.0
    requests: int = 0
    age_s: float = 0.0
    prompt_spread: float = 0.0
    output_spread: float = 0.0
    shift: Shift | None = None
