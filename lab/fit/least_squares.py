"""Fitting an operator's constants to a table: bounded least squares of log ratios, with an error held out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from shared.cost.operators import Heads
from shared.errors import InvalidRequest

# MERGED rows.py
# Measured operator times as arrays: what reading a table yields and a fit takes. Times in seconds, sizes in bytes.


Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Common to all tables: measured seconds, and the selection of rows."""

    seconds: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    def where(self, chosen: NDArray[np.bool_]) -> Self:
        """Only the chosen rows."""
        picked: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                picked[field.name] = value[chosen]
        return replace(self, **picked)


@dataclass(frozen=True, slots=True)
class GemmRows(Rows):
    """y[m, n] = x[m, k] · W[k, n]."""

    m: Floats
    n: Floats
    k: Floats
    precision: str


@dataclass(frozen=True, slots=True)
class AttentionRows(Rows):
    """Attention of `sequences` prefill chunks of `tokens` after `context`, and `decodes` of `decode_context` each."""

    sequences: Floats
    tokens: Floats
    context: Floats
    decodes: Floats
    decode_context: Floats
    heads: Floats
    kv_heads: Floats
    head_dim: int
    kv_precision: str
    kv_width: float

    def shape(self) -> Heads:
        """Shapes of the heads, row by row. `Heads` holds numbers elsewhere; the forms take either."""
        dim = float(self.head_dim)
        query: Any = self.heads
        kv: Any = self.kv_heads
        return Heads(query, kv, 4.0 * query * dim, 2.0 * kv * dim * self.kv_width, 4.0 * query * dim)


@dataclass(frozen=True, slots=True)
class ElementwiseRows(Rows):
    """Operators that only move bytes."""

    moved: Floats


@dataclass(frozen=True, slots=True)
class AllReduceRows(Rows):
    """All-reduces of `moved` bytes over `ranks`."""

    moved: Floats
    ranks: Floats


@dataclass(frozen=True, slots=True)
class MlpRows(Rows):
    """A whole MLP: two products and the activation between them. `seconds` is their sum."""

    tokens: Floats
    up: Floats  # columns of the first product on one rank
    width: Floats  # rows of the second
    hidden: Floats
    precision: str


@dataclass(frozen=True, slots=True)
class ExpertRows(Rows):
    """Experts of a mixture layer, routing done: their products, the activation, moving tokens there and back.

    rows: tokens times experts of each; active: experts that have any; width: of one expert, cut by tensor parallelism.
    """

    rows: Floats
    active: Floats
    hidden: Floats
    width: Floats
    precision: str


Operator = TypeVar("Operator")
Table = TypeVar("Table", bound=Rows)

_MIN_ROWS = 8
_MOST_ROWS = 1500  # of the half that is fitted; more change nothing but the time
_DESCENTS = 3


@dataclass(frozen=True, slots=True)
class Parameter:
    """One constant to fit: where it starts and its bounds. Equal bounds keep it fixed."""

    start: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Form(Generic[Operator, Table]):
    """A kind of operator that can be fitted."""

    name: str
    parameters: Mapping[str, Parameter]
    build: Callable[[Mapping[str, float]], Operator]
    predict: Callable[[Operator, Table], Floats]
    naive: Callable[[Table], Floats]  # the roofline of the data sheet


@dataclass(frozen=True, slots=True)
class Fit(Generic[Operator]):
    """Constants, and their mean absolute percentage error on rows that the fit has not seen, beside the naive one."""

    operator: Operator
    rows: int
    held_out: int
    mape: float
    naive_mape: float


def fit(form: Form[Operator, Table], table: Table, seed: int = 0) -> Fit[Operator]:
    """Fit on a random half of the rows; measure on the other half. Repeatable under a seed."""
    if len(table) < _MIN_ROWS:
        raise InvalidRequest(f"{form.name}: {len(table)} rows are too few to fit, {_MIN_ROWS} are needed")
    usable = np.isfinite(table.seconds) & (table.seconds > 0)
    if not np.all(usable):
        bad = int(np.argmin(usable))
        raise InvalidRequest(f"{form.name}: row {bad} has a time of {table.seconds[bad]} s; times must be positive")
    rng = np.random.default_rng(seed)
    seen = rng.random(len(table)) < 0.5
    used = seen & (rng.random(len(table)) < _MOST_ROWS / max(1, int(np.sum(seen))))
    operator = _best_of(form, table.where(used), rng)
    unseen = table.where(~seen)
    return Fit(
        operator=operator,
        rows=len(table),
        held_out=len(unseen),
        mape=mape(form.predict(operator, unseen), unseen.seconds),
        naive_mape=mape(form.naive(unseen), unseen.seconds),
    )


def mape(predicted: Floats, measured: Floats) -> float:
    """Mean absolute percentage error, as a share (0.1 is 10 %)."""
    return float(np.mean(np.abs(predicted / measured - 1.0)))


def _best_of(form: Form[Operator, Table], table: Table, rng: np.random.Generator) -> Operator:
    """The best of several descents, by the rows they were fitted on: the loss has more than one valley."""
    free = [name for name, p in form.parameters.items() if p.high > p.low]
    start = np.array([form.parameters[name].start for name in free])
    low = np.array([form.parameters[name].low for name in free])
    high = np.array([form.parameters[name].high for name in free])
    fixed = {name: p.start for name, p in form.parameters.items() if p.high <= p.low}

    def build(point: NDArray[np.float64]) -> Operator:
        return form.build({**fixed, **dict(zip(free, (float(x) for x in point), strict=True))})

    def residuals(point: NDArray[np.float64]) -> Floats:
        return np.log(form.predict(build(point), table) / table.seconds)

    best_cost, best = np.inf, start
    for turn in range(_DESCENTS):
        begin = start if turn == 0 else start * np.exp(rng.normal(0.0, 0.7, len(start)))
        solved = least_squares(
            residuals,
            np.clip(begin, low, high),
            bounds=(low, high),
            x_scale=np.maximum(np.abs(start), 0.1),
            loss="soft_l1",
            f_scale=0.1,
            diff_step=1e-3,
            max_nfev=60,
        )
        if solved.cost < best_cost:
            best_cost, best = float(solved.cost), solved.x
    return build(best)
