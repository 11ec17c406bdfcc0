"""Measured operator times as arrays: what reading a table yields and a fit takes. Times in seconds, sizes in bytes."""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from shared.cost.operators import Heads

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
