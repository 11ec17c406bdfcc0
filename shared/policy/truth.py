"""How true the estimates of routes are: the relative errors of the last ones, by instance and by kind of request.

Predictions learn from them what the estimate cannot know (`Correction`), and decisions rely less on estimates that are
far off (`EstimateErrors.doubt`).

A scheduler compares what the estimate of a first placement predicted with what came of it. Errors are relative to the
outcome: 0.5 means that 1.5 times the observed time was predicted, -0.5 half of it.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from math import exp, log
from statistics import median
from typing import NamedTuple

import msgspec

from shared.domain.estimated import ErrorFigures, Estimated, PromptSize, RouteKind
from shared.domain.numbers import Finite

WINDOW = 64  # errors that are kept of each instance and kind
INSTANCES = 2048  # with errors; the one without news for longest is forgotten
FEWEST = 8  # outcomes from which something is learned
FEWEST_TOKENS = 4  # of an answer whose time per token counts: the gaps of shorter ones are mostly chance
LATE_MOST_S, LATE_MOST_SHARE = 0.05, 0.3  # with so much of the computed time, all that is learned either way
PACE_MOST = 1.3  # likewise
APART = 1.3  # times as long the longer half of the times has to be, to learn more than a constant from both halves
# Estimates that are off by more than this factor, either way, are doubted. Smaller errors are usual near saturation,
# where goodput fell when decisions relied less on estimates that were off by a half.
DOUBT = 2.0
SURELY = 16  # outcomes from which an estimate is doubted
COMMON = 4 * WINDOW  # outcomes of all instances, from which the factor is learned by which all of them are off
LEAST_S = 1e-4  # a shorter time counts as this long: nothing is predicted as exactly


class What(StrEnum):
    """The predicted time."""

    TTFT = "ttft"  # from the placement on
    TPOT = "tpot"


class Compared(msgspec.Struct, frozen=True):
    """An estimate and its outcome: seconds from the placement to the first token, and for each further one; None for an
    answer of fewer than `FEWEST_TOKENS`.
    """

    estimated: Estimated
    prompt_tokens: int
    ttft_s: Finite
    tpot_s: Finite | None = None

    @property
    def errors(self) -> Iterator[tuple[What, float]]:
        """The relative errors of the times that were observed."""
        pairs = ((What.TTFT, self.estimated.ttft_s, self.ttft_s), (What.TPOT, self.estimated.tpot_s, self.tpot_s))
        for what, predicted_s, observed_s in pairs:
            if observed_s is not None:
                yield what, max(LEAST_S, predicted_s) / max(LEAST_S, observed_s) - 1.0


class Line(NamedTuple):
    """By how many seconds a time comes later than computed: `late_s` for one of `at_s`, and `slope` for each second
    that it is longer. For times below half of `at_s` it is constant.
    """

    at_s: float
    late_s: float
    slope: float = 0.0

    @classmethod
    def through(cls, times: Sequence[tuple[float, float]]) -> "Line":
        """Of pairs of computed and observed seconds. Source: Tukey's resistant line, with two groups: the medians of
        the shorter and of the longer half.
        """
        ordered = sorted(times)
        middle = len(ordered) // 2
        short, long = (
            (median(x for x, _ in half), median(y - x for x, y in half))
            for half in (ordered[:middle], ordered[middle:])
        )
        if long[0] <= APART * short[0]:  # also where all are 0
            return cls(short[0], median(y - x for x, y in ordered))
        slope = (long[1] - short[1]) / (long[0] - short[0])
        return cls(short[0], short[1], max(-LATE_MOST_SHARE, min(LATE_MOST_SHARE, slope)))

    def late(self, computed_s: float) -> float:
        """Seconds to add to a computed time."""
        most_s = LATE_MOST_S + LATE_MOST_SHARE * computed_s
        known_s = max(self.at_s / 2.0, computed_s)
        return max(-computed_s, -most_s, min(most_s, self.late_s + self.slope * (known_s - self.at_s)))


class Correction(NamedTuple):
    """What the predictions for an instance have learned from their outcomes, by kind of route.

    late: of routes that begin there, what comes to the computed time to the first token: what the estimate does not
    know, such as the hops between processes. pace: of routes for whose decode it was estimated, the factor of the
    computed time per token.
    """

    late: Mapping[RouteKind, Line]
    pace: Mapping[RouteKind, float]


NO_CORRECTION = Correction({}, {})


class _Series:
    """The last values, and their figures, computed when first needed."""

    __slots__ = ("_figures", "values")

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=WINDOW)
        self._figures: ErrorFigures | None = None

    def add(self, value: float) -> None:
        self.values.append(value)
        self._figures = None

    @property
    def figures(self) -> ErrorFigures | None:
        """None without values."""
        if self._figures is None and self.values:
            sizes = sorted(map(abs, self.values))
            p90 = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
            self._figures = ErrorFigures(len(sizes), median(self.values), median(sizes), p90)
        return self._figures


class _OfInstance:
    """What is known of one instance. ratios: logarithms of computed over observed times, without corrections. late:
    pairs of computed and observed times. pace: observed over computed times. What is learned of these is renewed with
    each `FEWEST` outcomes.
    """

    __slots__ = ("correction", "errors", "late", "outcomes", "pace", "ratios")

    def __init__(self) -> None:
        self.errors = {what: _Series() for what in What}
        self.ratios = {what: deque[float](maxlen=WINDOW) for what in What}
        self.late: dict[RouteKind, deque[tuple[float, float]]] = {}
        self.pace: dict[RouteKind, deque[float]] = {}
        self.correction = NO_CORRECTION
        self.outcomes = 0

    def learned(self) -> Correction:
        late = {kind: Line.through(times) for kind, times in self.late.items() if len(times) >= FEWEST}
        pace = {
            kind: max(1.0 / PACE_MOST, min(PACE_MOST, median(factors)))
            for kind, factors in self.pace.items()
            if len(factors) >= FEWEST
        }
        return Correction(late, pace)


class KindOfRequest(NamedTuple):
    """By what errors are distinguished, besides instances."""

    route: RouteKind
    prompt: PromptSize


KINDS = tuple(KindOfRequest(route, prompt) for route in RouteKind for prompt in PromptSize)


class EstimateErrors:
    """The rolling errors. Those of TTFT belong to the instance where the prompt began, those of TPOT to the one whose
    decode was estimated.
    """

    def __init__(self) -> None:
        self._instances: OrderedDict[str, _OfInstance] = OrderedDict()
        self._kinds = {(what, kind): _Series() for what in What for kind in KINDS}
        self.doubtful: dict[tuple[What, str], float] = {}  # median factors over `DOUBT`
        self._ratios = {what: deque[float](maxlen=COMMON) for what in What}  # as of an instance, of all

    def add(self, compared: Compared) -> None:
        """Count a request that was served as it was placed first."""
        estimated = compared.estimated
        kind = KindOfRequest(estimated.kind, PromptSize.of(compared.prompt_tokens))
        computes, decodes = self._of(estimated.computes), self._of(estimated.decodes)
        for what, error in compared.errors:
            self._kinds[what, kind].add(error)
            (computes if what is What.TTFT else decodes).errors[what].add(error)
        ttft_s = estimated.ttft_s - estimated.late_s
        computes.late.setdefault(estimated.kind, deque(maxlen=WINDOW)).append((ttft_s, compared.ttft_s))
        self._compare(computes, What.TTFT, ttft_s, compared.ttft_s)
        if compared.tpot_s is not None and estimated.tpot_s > 0.0:
            tpot_s = estimated.tpot_s / estimated.pace
            decodes.pace.setdefault(estimated.kind, deque(maxlen=WINDOW)).append(compared.tpot_s / tpot_s)
            self._compare(decodes, What.TPOT, tpot_s, compared.tpot_s)
        for name, known in {estimated.computes: computes, estimated.decodes: decodes}.items():
            known.outcomes += 1
            if known.outcomes % FEWEST == 0:
                known.correction = known.learned()
                self._doubt(name, known)

    def doubt(self, what: What, instance_id: str) -> float:
        """The factor by which the times that are computed for an instance are off: the median, at least `DOUBT`. A
        factor by which those of all instances are off does not count: it makes no difference between them.
        """
        return self.doubtful.get((what, instance_id), DOUBT)

    def corrected(self, estimated: Estimated) -> Estimated:
        """What is predicted where the estimate computes these times."""
        line = self.correction(estimated.computes).late.get(estimated.kind)
        late_s = line.late(estimated.ttft_s) if line is not None else 0.0
        pace = self.correction(estimated.decodes).pace.get(estimated.kind, 1.0)
        if late_s == 0.0 and pace == 1.0:
            return estimated
        ttft_s, tpot_s = estimated.ttft_s + late_s, estimated.tpot_s * pace
        return msgspec.structs.replace(estimated, ttft_s=ttft_s, tpot_s=tpot_s, late_s=late_s, pace=pace)

    def of_instance(self, what: What, instance_id: str) -> ErrorFigures | None:
        """None before its first request."""
        known = self._instances.get(instance_id)
        return known.errors[what].figures if known is not None else None

    def of_kind(self, what: What, kind: KindOfRequest) -> ErrorFigures | None:
        """None before the first request."""
        return self._kinds[what, kind].figures

    def correction(self, instance_id: str) -> Correction:
        """What its estimates have learned; from fewer than `FEWEST` outcomes nothing."""
        known = self._instances.get(instance_id)
        return known.correction if known is not None else NO_CORRECTION

    def _of(self, instance_id: str) -> _OfInstance:
        known = self._instances.get(instance_id)
        if known is None:
            known = self._instances[instance_id] = _OfInstance()
            if len(self._instances) > INSTANCES:
                forgotten, _ = self._instances.popitem(last=False)
                for what in What:
                    self.doubtful.pop((what, forgotten), None)
        else:
            self._instances.move_to_end(instance_id)
        return known

    def _compare(self, known: _OfInstance, what: What, computed_s: float, observed_s: float) -> None:
        ratio = log(max(LEAST_S, computed_s) / max(LEAST_S, observed_s))
        known.ratios[what].append(ratio)
        self._ratios[what].append(ratio)

    def _doubt(self, instance_id: str, known: _OfInstance) -> None:
        for what, ratios in known.ratios.items():
            self.doubtful.pop((what, instance_id), None)
            if len(ratios) >= SURELY:
                common = median(self._ratios[what])
                factor = exp(median(abs(ratio - common) for ratio in ratios))
                if factor > DOUBT:
                    self.doubtful[what, instance_id] = factor
