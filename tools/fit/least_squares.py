"""Fit of an operator's constants to measured times: bounded least squares of log ratios, with a held-out error.

Measured times are arrays (`Rows`), in seconds; sizes are in bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from shared.cost.operators import Heads
from shared.errors import InvalidRequest

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Measured times of one operator; subclasses add an array for each size."""

    seconds: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    def where(self, chosen: NDArray[np.bool_]) -> Self:
        """The chosen rows."""
        return replace(self, **{name: column[chosen] for name, column in self._columns().items()})

    def followed_by(self, others: Sequence[Self]) -> Self:
        """These rows and those of `others`, which have the same precisions and head sizes."""
        columns = {
            name: np.concatenate([column, *(getattr(other, name) for other in others)])
            for name, column in self._columns().items()
        }
        return replace(self, **columns)

    def _columns(self) -> dict[str, np.ndarray]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


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
        """Shapes of the heads, as arrays over the rows. `Heads` holds numbers elsewhere; the forms accept either."""
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
    """Experts of a mixture layer after routing: their products, the activation, and the movement of tokens.

    rows: tokens times experts per token; active: experts with a token; width: of one expert, divided by the tensor
    parallel degree.
    """

    rows: Floats
    active: Floats
    hidden: Floats
    width: Floats
    precision: str


Operator = TypeVar("Operator")
Table = TypeVar("Table", bound=Rows)

_MIN_ROWS = 8
_MAX_ROWS = 1500  # of the half that is fitted: more rows change nothing but the time
_DESCENTS = 3


@dataclass(frozen=True, slots=True)
class Parameter:
    """A constant to fit: start and bounds, in multiples of `unit`. Equal bounds keep it fixed."""

    start: float
    low: float
    high: float
    unit: float = 1.0

    def only_if(self, determined: bool) -> "Parameter":
        """The parameter, fixed at its start unless the table determines it."""
        return self if determined else Parameter(self.start, self.start, self.start, self.unit)


@dataclass(frozen=True, slots=True)
class Form(Generic[Operator, Table]):
    """A kind of operator that can be fitted. `build` makes an operator of values in SI units, by parameter."""

    name: str
    parameters: Mapping[str, Parameter]
    build: Callable[[Mapping[str, float]], Operator]
    predict: Callable[[Operator, Table], Floats]
    naive: Callable[[Table], Floats]  # the roofline of the data sheet


@dataclass(frozen=True, slots=True)
class Fit(Generic[Operator]):
    """Constants, with the mean absolute percentage errors of the fit and of the naive form on held-out rows."""

    operator: Operator
    rows: int
    held_out: int
    mape: float
    naive_mape: float


def fit(form: Form[Operator, Table], table: Table, seed: int = 0) -> Fit[Operator]:
    """Fit on a random half of the rows, and measure the error on the other half. Repeatable under a seed."""
    if len(table) < _MIN_ROWS:
        raise InvalidRequest(f"{form.name}: {len(table)} rows are too few to fit, {_MIN_ROWS} are needed")
    usable = np.isfinite(table.seconds) & (table.seconds > 0)
    if not np.all(usable):
        bad = int(np.argmin(usable))
        raise InvalidRequest(f"{form.name}: row {bad} has a time of {table.seconds[bad]} s; times must be positive")
    rng = np.random.default_rng(seed)
    fitted = rng.random(len(table)) < 0.5
    used = fitted & (rng.random(len(table)) < _MAX_ROWS / max(1, int(np.sum(fitted))))
    operator = _best_of(form, table.where(used), rng)
    held_out = table.where(~fitted)
    return Fit(
        operator=operator,
        rows=len(table),
        held_out=len(held_out),
        mape=mape(form.predict(operator, held_out), held_out.seconds),
        naive_mape=mape(form.naive(held_out), held_out.seconds),
    )


def mape(predicted: Floats, measured: Floats) -> float:
    """Mean absolute percentage error, as a share (0.1 is 10 %)."""
    return float(np.mean(np.abs(predicted / measured - 1.0)))


def _best_of(form: Form[Operator, Table], table: Table, rng: np.random.Generator) -> Operator:
    """The best of several descents on the fitted rows: the loss has more than one minimum."""
    free = {name: p for name, p in form.parameters.items() if p.high > p.low}
    start, low, high, unit = np.array([(p.start, p.low, p.high, p.unit) for p in free.values()]).T
    fixed = {name: p.start * p.unit for name, p in form.parameters.items() if name not in free}

    def build(point: NDArray[np.float64]) -> Operator:
        return form.build({**fixed, **dict(zip(free, (point * unit).tolist(), strict=True))})

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
