"""Linear and integer programmes: rows that are added one by one, solved by HiGHS."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array


class Programme:
    """A programme over `size` variables of at least 0. Each row is a weighted sum with an upper bound."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []
        self._bounds: list[float] = []

    def add(self, weights: Mapping[int, float], bound: float) -> None:
        """weights: by the number of the variable."""
        self._rows += [len(self._bounds)] * len(weights)
        self._columns += weights
        self._values += weights.values()
        self._bounds.append(bound)

    def minimise(
        self,
        cost: NDArray[np.float64],
        upper: NDArray[np.float64],
        integers: int = 0,
        options: Mapping[str, float] | None = None,
    ) -> NDArray[np.float64]:
        """The variables, each at most its `upper`, with the least cost; zeros where there is no solution.

        integers: so many of the first variables are whole numbers. options: of `scipy.optimize.milp`, which takes half
        the time of `linprog` also without integers.
        """
        shape = (len(self._bounds), self.size)
        table = coo_array((self._values, (self._rows, self._columns)), shape=shape).tocsr()
        found = milp(
            cost,
            constraints=LinearConstraint(table, -np.inf, np.array(self._bounds)),
            integrality=np.arange(self.size) < integers,
            bounds=Bounds(0.0, upper),
            options=dict(options or {}),
        )
        return np.maximum(found.x, 0.0) if found.x is not None else np.zeros(self.size)
