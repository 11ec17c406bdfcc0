"""How long KV takes from one instance to another, by link and codec."""

from collections.abc import Mapping
from dataclasses import dataclass

from shared.cost.geometry import ModelGeometry
from shared.domain.kv import Codec
from shared.errors import InvalidRequest

# Wire bits of one element. The integer codecs carry a 16-bit scale for each head and token, 128 elements or so.
_BITS: Mapping[Codec, float] = {Codec.RAW: 16.0, Codec.INT8: 8.125, Codec.FP8: 8.125, Codec.INT4: 4.125}


@dataclass(frozen=True, slots=True)
class Link:
    """A path between two instances. `bandwidth_bytes_s` is nominal; `efficiency` is the share that is reached."""

    bandwidth_bytes_s: float
    latency_s: float = 1e-3
    efficiency: float = 0.58  # ThunderServe measured 0.56–0.61 of nominal over TCP (FORMULAS section 1)

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_s <= 0 or not 0 < self.efficiency <= 1 or self.latency_s < 0:
            raise InvalidRequest(
                f"a link needs a positive bandwidth, an efficiency in (0, 1] and a latency >= 0: {self}"
            )


def wire_share(codec: Codec, dtype_bytes: float = 2.0) -> float:
    """Bytes on the wire for each byte of KV as it is stored."""
    if codec is Codec.RAW:
        return 1.0
    return min(_BITS[codec], 8.0 * dtype_bytes) / (8.0 * dtype_bytes)


def wire_bytes(geometry: ModelGeometry, tokens: int, codec: Codec = Codec.RAW, dtype_bytes: float = 2.0) -> float:
    """Bytes that `tokens` tokens of KV take on the wire. RAW sends elements as they are stored."""
    return tokens * geometry.kv_bytes_per_token(dtype_bytes) * wire_share(codec, dtype_bytes)


def transfer_time_s(
    geometry: ModelGeometry, tokens: int, link: Link, codec: Codec = Codec.RAW, dtype_bytes: float = 2.0
) -> float:
    """Seconds to move the KV of `tokens` tokens; 0 for none.

    Source: ThunderServe eq. 1 with the layer count and grouped-query attention put back (F):
    `α + b·s·κ·(bits/16)/(η·β)`.
    """
    if tokens <= 0:
        return 0.0
    moved = wire_bytes(geometry, tokens, codec, dtype_bytes)
    return link.latency_s + moved / (link.efficiency * link.bandwidth_bytes_s)
