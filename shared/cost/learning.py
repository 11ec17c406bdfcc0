"""Step and link rates that an instance learns from what it measures while it serves. Pure: time is an argument."""

from collections import OrderedDict, deque
from collections.abc import Iterable
from math import exp, log
from statistics import median

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.cost.step import Batch
from shared.cost.step_rates import NAMES, TERMS, kind_of, profile_batches, step_form, terms_of
from shared.domain.kv import Codec
from shared.domain.rates import LinkRate, StepForm, StepRates, StepSource

HALF_LIFE_S = 60.0  # of a step's weight in the shape of its kind
RECENT_S = 4.0  # steps at most so old show how fast the instance is now
RECENT = 64  # steps of each kind that are kept for that
FEW = 5  # a kind with fewer recent steps uses the recent steps of all kinds
PRIOR_STEPS = 30.0  # weight of the prior, in steps
OUTLIER = log(1.5)  # a step that is off by more counts less, the more it is off
TRUSTED = 3  # steps before outliers are recognised

Array = NDArray[np.float64]


class _Kind:
    """Steps of one kind: weighted sums for least squares, and the last measured steps."""

    def __init__(self, name: str, prior: StepForm, profile: list[Batch]) -> None:
        self.terms = list(TERMS[name])
        self.prior = np.array([getattr(prior, NAMES[term]) for term in self.terms])
        rows = np.array([[terms_of(batch)[term] for term in self.terms] for batch in profile])
        rows = rows / np.maximum(rows @ self.prior, 1e-9)[:, None]
        self.before: Array = rows.T @ rows * (PRIOR_STEPS / len(rows))
        self.square: Array = np.zeros_like(self.before)
        self.target: Array = np.zeros(len(self.terms))
        self.steps = 0
        self.level = 1.0  # measured times over the prior's, lately
        self.added_s = 0.0
        self.recent: deque[tuple[float, Array, float]] = deque(maxlen=RECENT)

    def add(self, row: Array, seconds: float, now: float) -> None:
        expected = max(float(row @ self.prior), 1e-9)
        ratio, scaled = seconds / expected, row / expected
        off = abs(log(max(ratio, 1e-9) / self.level)) if self.steps >= TRUSTED else 0.0
        weight = 1.0 if off <= OUTLIER else OUTLIER / off
        fade = exp(-max(0.0, now - self.added_s) * log(2.0) / HALF_LIFE_S) if self.steps else 1.0
        self.square = self.square * fade + weight * np.outer(scaled, scaled)
        self.target = self.target * fade + weight * ratio * scaled
        self.added_s = now
        self.steps += 1
        self.recent.append((now, row, seconds))
        if self.steps <= TRUSTED or self.steps % 8 == 0:
            self.level = median(took / max(float(one @ self.prior), 1e-9) for _, one, took in self.recent)

    def solved(self, level: float) -> Array:
        """The terms' seconds, none negative: from the steps measured, and the prior scaled to `level`."""
        scale = np.sqrt(np.maximum(np.diag(self.square + self.before), 1e-18))
        matrix = (self.square + self.before) / np.outer(scale, scale)
        target = (self.target + self.before @ (self.prior * level)) / scale
        free = np.ones(len(scale), dtype=bool)
        found: Array = np.zeros(len(scale))
        for _ in range(len(scale)):  # the active set of a few terms: drop the negative ones and solve again
            found[:] = 0.0
            found[free] = np.linalg.solve(matrix[np.ix_(free, free)], target[free])
            if not (found < 0.0).any():
                break
            free &= found >= 0.0
        solution: Array = np.maximum(found, 0.0) / scale
        return solution


class _Gain:
    """Tokens that a decode gains in a step: a mean, in which a step's weight halves in a minute."""

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._decodes = self._tokens = self._added_s = 0.0

    def add(self, decodes: float, tokens: float, now: float) -> None:
        fade = exp(-max(0.0, now - self._added_s) * log(2.0) / HALF_LIFE_S) if self._decodes else 1.0
        self._decodes = self._decodes * fade + decodes
        self._tokens = self._tokens * fade + tokens
        self._added_s = now

    @property
    def mean(self) -> float:
        return (self._tokens + PRIOR_STEPS * self._prior) / (self._decodes + PRIOR_STEPS)


class StepLearner:
    """Starts with `prior`, the forms of the catalogue or of a calibration, and corrects them by each step added.

    It learns the shape of each kind of step (prefill, decode, mixed) by least squares of relative errors, in which a
    step's weight halves in a minute; and, by a median, how much longer than that the steps of the last seconds took, so
    that a slowdown shows within seconds. Single outliers hardly count in either. `budget`, `decodes`: the most prompt
    tokens and decodes of a step.
    """

    def __init__(self, prior: StepRates, budget: int, decodes: int) -> None:
        self._start_source = prior.source
        profile = profile_batches(budget, decodes)
        self._kinds = {name: _Kind(name, getattr(prior, name), profile[name]) for name in TERMS}
        self._gain = _Gain(prior.gain)

    def add(self, batch: Batch, seconds: float, now: float) -> None:
        """A step of `batch` took `seconds` and ended at `now`, which must not decrease."""
        if not seconds > 0.0:
            return
        kind, terms = self._kinds[kind_of(batch)], terms_of(batch)
        kind.add(np.array([terms[term] for term in kind.terms]), seconds, now)

    def gained(self, decodes: int, tokens: int, now: float) -> None:
        """The decodes of some steps, counted in each step, gained so many tokens until `now`."""
        if decodes > 0:
            self._gain.add(decodes, tokens, now)

    def rates(self, now: float) -> StepRates:
        seen = [kind for kind in self._kinds.values() if kind.steps]
        level = median(kind.level for kind in seen) if seen else 1.0
        solved = {name: kind.solved(kind.level if kind.steps else level) for name, kind in self._kinds.items()}
        ratios = {
            name: [took / max(float(row @ solved[name]), 1e-9) for at, row, took in kind.recent if now - at <= RECENT_S]
            for name, kind in self._kinds.items()
        }
        every = [ratio for some in ratios.values() for ratio in some]
        common = median(every) if len(every) >= FEW else 1.0
        forms = {name: self._form(name, solved[name], ratios[name], common) for name in TERMS}
        source = StepSource.LEARNED if seen else self._start_source
        return StepRates(**forms, source=source, gain=self._gain.mean)

    def _form(self, name: str, solved: Array, ratios: list[float], common: float) -> StepForm:
        kind = self._kinds[name]
        pace = median(ratios) if len(ratios) >= FEW else common
        error = median(abs(ratio / pace - 1.0) for ratio in ratios) if ratios else 0.0
        return step_form(kind.terms, solved * pace, error, kind.steps)


LARGE_BYTES = 1 << 20  # imports of at least so many bytes show the bandwidth, smaller ones the latency
KEPT = 32  # imports kept of one exporter
PEERS = 64  # exporters kept, the latest
MAX_SLOW = 16  # exporters whose own bandwidth is published
APART = 1.5  # factor by which it must be lower to be published


class _Peer:
    __slots__ = ("coded", "large", "small")

    def __init__(self) -> None:
        self.large: deque[float] = deque(maxlen=KEPT)  # bytes a second
        self.small: deque[float] = deque(maxlen=KEPT)  # seconds
        self.coded: dict[Codec, deque[float]] = {}  # bytes of KV as it is stored, a second

    @property
    def bytes_s(self) -> float:
        return _typical(self.large)


class LinkLearner:
    """The link rate that follows from an instance's KV imports, by exporter and codec.

    start: the rate until the first large import.
    """

    def __init__(self, start: LinkRate | None) -> None:
        self._start = start
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self.rate = start

    def add(self, exporter: str, codec: Codec, kv_bytes: float, wire_bytes: int, seconds: float) -> None:
        """An import of `kv_bytes` of KV as it is stored, `wire_bytes` on the wire, took `seconds`."""
        if seconds <= 0.0 or wire_bytes <= 0:
            return
        peer = self._peers.setdefault(exporter, _Peer())
        self._peers.move_to_end(exporter)
        if len(self._peers) > PEERS:
            self._peers.popitem(last=False)
        if wire_bytes < LARGE_BYTES:
            peer.small.append(seconds)
        elif codec.lossy:  # coding may have taken most of the time: the link is at least so fast
            peer.coded.setdefault(codec, deque(maxlen=KEPT)).append(kv_bytes / seconds)
            if peer.large and wire_bytes / seconds > peer.bytes_s:
                peer.large.append(wire_bytes / seconds)
        else:
            peer.large.append(wire_bytes / seconds)
        self.rate = self._learned()

    def _learned(self) -> LinkRate | None:
        known = {name: peer.bytes_s for name, peer in self._peers.items() if peer.large}
        coded = self._coded()
        if not known:
            start = self._start
            return msgspec.structs.replace(start, coded=coded) if start is not None else None
        usual = max(known.values())
        short = [seconds for peer in self._peers.values() for seconds in peer.small]
        slow = {name: bytes_s for name, bytes_s in known.items() if bytes_s * APART < usual}
        latency_s = min(short) if short else self._start.latency_s if self._start else 0.0
        return LinkRate(usual, latency_s, dict(sorted(slow.items(), key=lambda item: item[1])[:MAX_SLOW]), coded)

    def _coded(self) -> dict[str, float]:
        """Bytes a second by codec, and by codec and exporter where that is much slower."""
        rates: dict[str, float] = {}
        for codec in Codec:
            known = {name: _typical(peer.coded[codec]) for name, peer in self._peers.items() if codec in peer.coded}
            if not known:
                continue
            rates[codec.value] = usual = max(known.values())
            slow = sorted((rate, name) for name, rate in known.items() if rate * APART < usual)
            rates.update({f"{codec.value} {name}": rate for rate, name in slow[:MAX_SLOW]})
        return rates


def _typical(rates: Iterable[float]) -> float:
    """The median of the upper half: slower imports shared the link with others."""
    ordered = sorted(rates)
    return median(ordered[len(ordered) // 2 :])
