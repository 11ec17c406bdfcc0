"""How long KV takes from one instance to another, by link and codec."""

from dataclasses import dataclass

from shared.cost.geometry import ModelGeometry
from shared.domain.kv import Codec
from shared.errors import InvalidRequest

# What the KV connector's codecs carry besides the coded elements (its `payload_bytes`; a test holds the two equal).
# int8, int4: a 16-bit scale and a 16-bit zero for each group, of K 32 tokens of a channel, of V at most 64 channels of
# a token, and a 32-bit unit for each layer's K and V. fp8: a 32-bit scale for each layer's K and V and head.
_TOKEN_GROUP, _CHANNEL_GROUP = 32, 64
_GROUP_BYTES, _UNIT_BYTES = 4.0, 4.0


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


def wire_share(codec: Codec, dtype_bytes: float = 2.0, head_dim: int = 128) -> float:
    """Bytes on the wire for each byte of a long KV as it is stored: 8.75 bits an element in int8, 4.75 in int4."""
    if codec is Codec.RAW:
        return 1.0
    groups = 0.0 if codec is Codec.FP8 else _GROUP_BYTES * (1.0 / _TOKEN_GROUP + 1.0 / _channel_group(head_dim)) / 2.0
    return min(_coded_bytes(codec) + groups, dtype_bytes) / dtype_bytes


def wire_bytes(geometry: ModelGeometry, tokens: int, codec: Codec = Codec.RAW, dtype_bytes: float = 2.0) -> float:
    """Bytes that `tokens` tokens of KV take on the wire. RAW sends elements as they are stored; none sends more."""
    raw = tokens * geometry.kv_bytes_per_token(dtype_bytes)
    if codec is Codec.RAW or tokens <= 0:
        return raw
    kv = geometry.kv_geometry()
    values = float(tokens * kv.kv_heads * kv.head_dim)  # of one layer's K, or V
    coded = 2.0 * values * _coded_bytes(codec)
    if codec is Codec.FP8:
        return min(raw, kv.layers * (coded + 2.0 * _UNIT_BYTES * kv.kv_heads))
    groups = -(-tokens // _TOKEN_GROUP) * kv.kv_heads * kv.head_dim + values / _channel_group(kv.head_dim)
    return min(raw, kv.layers * (coded + _GROUP_BYTES * groups + 2.0 * _UNIT_BYTES))


def _coded_bytes(codec: Codec) -> float:
    return 0.5 if codec is Codec.INT4 else 1.0


def _channel_group(head_dim: int) -> int:
    """Channels of V that share a scale: the most, up to 64, that divide a head evenly."""
    return next(group for group in range(min(_CHANNEL_GROUP, head_dim), 0, -1) if head_dim % group == 0)


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
