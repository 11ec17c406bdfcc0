"""Numbers of structs that are decoded: a decoder refuses NaN and the infinities for them."""

import math
from typing import Annotated, Any

import msgspec

MOST = 1e300
Finite = Annotated[float, msgspec.Meta(ge=-MOST, le=MOST)]


def infinite_in(data: Any, where: str = "") -> str:
    """Where plain data (of YAML or JSON) has the first number that is infinite or NaN; empty: nowhere."""
    if isinstance(data, float):
        return "" if math.isfinite(data) else where or "the value"
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list | tuple) else ()
    for key, value in pairs:
        if found := infinite_in(value, f"{where}.{key}" if where else str(key)):
            return found
    return ""
