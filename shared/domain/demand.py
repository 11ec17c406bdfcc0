"""What clients ask for, as schedulers tell the monitor: sums over one second, so that those of several add up."""

import msgspec


class DemandSecond(msgspec.Struct, frozen=True):
    """The requests that one scheduler placed for the first time in a whole second of unix time; sums are over them, and
    from `ended` on over the whole answers that ended in it.

    A second without requests is told, too: silence is not a lull. fresh_tokens: of prompts, less what was held of them
    where they were placed; fresh_squares: squares of the prompts less those of what was held, which is what attention
    costs. output_tokens: expected at arrival, from predictions and earlier answers. logs: natural logarithms of
    lengths. per_ttft, per_tpot: 1/s, inverses of the targets. split_least, split_most: the share of the prompt that
    prefill instances must and may compute under the split in force, 0..1 each. ended_expected: what was expected of the
    answers that ended.
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
        """Whether nobody asked for anything in it, and no answer ended."""
        return not self.requests and not self.ended


SUMS = tuple(name for name in DemandSecond.__struct_fields__ if name not in ("source", "second"))


class Shift(msgspec.Struct, frozen=True):
    """What clients ask for has changed. what: arrivals, prompts or outputs; before, after: requests a second, or tokens
    (geometric mean). noticed_s: from the change, as far as it can be told, to its notice. deviations: by how many
    standard errors both differ.
    """

    what: str
    before: float
    after: float
    noticed_s: float
    deviations: float


class AskedSecond(msgspec.Struct, frozen=True):
    """What clients asked for in one second of unix time, over all schedulers; tokens are means, 0 without requests.

    output_tokens: as expected at arrival.
    """

    second: int
    requests: int
    prompt_tokens: float
    output_tokens: float

    @classmethod
    def of(cls, sums: DemandSecond) -> "AskedSecond":
        """That of the sums over one second."""
        each = max(1, sums.requests)
        return cls(sums.second, sums.requests, sums.prompt_tokens / each, sums.output_tokens / each)


class RolesWanted(msgspec.Struct, frozen=True):
    """How many ready instances would best have either role, and the predicted harm (the share of requests that miss a
    target) as it is and then.
    """

    prefill: int
    decode: int
    harm: float
    harm_then: float


class Demand(msgspec.Struct, frozen=True):
    """What clients ask for since the last shift, at most for the last minute. Means are over requests.

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
