"""Finite numbers in decoded structs: a decoder refuses NaN and the infinities for them."""

import math
from typing import Annotated, Any

import msgspec

MOST = 1e300
Finite = Annotated[float, msgspec.Meta(ge=-MOST, le=MOST)]


def infinite_in(data: Any, where: str = "") -> str:
    """The place of the first infinite or NaN number in plain data (of YAML or JSON); empty: there is none."""
    if isinstance(data, float):
        return "" if math.isfinite(data) else where or "the value"
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list | tuple) else ()
    for key, value in pairs:
        if found := infinite_in(value, f"{where}.{key}" if where else str(key)):
            return found
    return ""
