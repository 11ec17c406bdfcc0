"""How long KV takes from one instance to another, by link and codec."""

from dataclasses import dataclass

from shared.cost.geometry import ModelGeometry
from shared.domain.kv import GROUP_BYTES, TOKEN_GROUP, UNIT_BYTES, Codec, channel_group, coded_bytes
from shared.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Link:
    """A path between two instances. `bandwidth_bytes_s` is nominal; `efficiency` is the share that is reached."""

    bandwidth_bytes_s: float
    latency_s: float = 1e-3
    efficiency: float = 0.58  # ours: what two transfer times of ThunderServe (Table 8) come to, 0.56 and 0.61

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_s <= 0 or not 0 < self.efficiency <= 1 or self.latency_s < 0:
            raise InvalidRequest(
                f"a link needs a positive bandwidth, an efficiency in (0, 1] and a latency >= 0: {self}"
            )


def wire_bytes(geometry: ModelGeometry, tokens: int, codec: Codec = Codec.RAW, dtype_bytes: float = 2.0) -> float:
    """Bytes that `tokens` tokens of KV take on the wire. RAW sends elements as they are stored; none sends more."""
    raw = tokens * geometry.kv_bytes_per_token(dtype_bytes)
    if codec is Codec.RAW or tokens <= 0:
        return raw
    kv = geometry.kv_geometry()
    values = float(tokens * kv.kv_heads * kv.head_dim)  # of one layer's K, or V
    coded = 2.0 * values * coded_bytes(codec)
    if codec is Codec.FP8:
        return min(raw, kv.layers * (coded + 2.0 * UNIT_BYTES * kv.kv_heads))
    groups = -(-tokens // TOKEN_GROUP) * kv.kv_heads * kv.head_dim + values / channel_group(kv.head_dim)
    return min(raw, kv.layers * (coded + GROUP_BYTES * groups + 2.0 * UNIT_BYTES))


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
