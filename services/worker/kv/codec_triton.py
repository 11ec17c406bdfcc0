"""The lossy codecs for KV in an engine's paged cache on a GPU: gathered and coded, or decoded and scattered, in Triton
kernels. The payloads are those of `codec`, bit for bit.

Kernels read the cache where it is, by slots, and write bytes of the payload; what lies between is in registers.
Divisions are IEEE's and no multiplication is fused with an addition, for else the last bits would differ.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from services.worker.kv import triton_fp8 as fp8
from services.worker.kv import triton_ints as ints
from services.worker.kv import triton_raw as raw
from services.worker.kv.codec import Shape, payload_bytes
from services.worker.kv.errors import KvError, KvFault
from services.worker.kv.triton_bits import tops as tops_of
from shared.domain.kv import TOKEN_GROUP, Codec, channel_group

_INFINITE = 0x7F800000  # magnitudes from here on are not finite
_ALIGNED = 16
_TILE = 1024  # coded values of a program
_EXACT: dict[str, Any] = {"enable_fp_fusion": False}


@dataclass(frozen=True, slots=True)
class Places:
    """Tokens in the caches of some layers.

    views: K and V of each layer, [blocks, offset, heads, head_dim], all with the strides of the first. slots: int64
    [tokens] on the device, block * block size + offset. pointers: as `pointers_of` gives them.
    """

    views: list[torch.Tensor]
    pointers: torch.Tensor
    slots: torch.Tensor

    @property
    def shape(self) -> Shape:
        """Of the KV: [layers, 2, tokens, heads, head_dim]."""
        _, _, heads, dim = self.views[0].shape
        return len(self.views) // 2, 2, self.slots.numel(), heads, dim

    def of(self, start: int, end: int) -> "Places":
        """Those of some of the layers."""
        sides = slice(2 * start, 2 * end)
        return Places(self.views[sides], self.pointers[sides], self.slots)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of every kernel, from `like` to `step_head`."""
        return self.views[0], self.pointers, self.slots, *self.steps

    @property
    def steps(self) -> tuple[int, int, int, int]:
        """Block size, and by how many values blocks, offsets and heads are apart."""
        first = self.views[0]
        return first.shape[1], first.stride(0), first.stride(1), first.stride(2)


def pointers_of(views: list[torch.Tensor]) -> torch.Tensor:
    """Addresses of the views, int64, on the host. Raises ValueError unless kernels can count from them alike."""
    first = views[0]
    if first.stride(3) != 1 or any(view.stride() != first.stride() or view.dtype != first.dtype for view in views):
        raise ValueError("KV caches with unlike strides, or channels that do not lie together")
    return torch.tensor([view.data_ptr() for view in views], dtype=torch.int64)


def encode_places(places: Places, codec: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload, uint8 on the device, and what `require_finite` judges once it has come to the host: int32.

    Issued on the current stream. Raises KvError(CODEC) for an odd head_dim with INT4.
    """
    layers, _, _, heads, _ = places.shape
    first = places.views[0]
    payload = torch.empty(payload_bytes(places.shape, first.dtype, codec), dtype=torch.uint8, device=first.device)
    tops = torch.empty((layers, 2, heads), dtype=torch.int32, device=first.device)
    encode_into(places, codec, layers, payload, tops)
    return payload, tops


def spacing(shape: Shape, dtype: torch.dtype, codec: Codec) -> int:
    """How far apart `encode_into` writes payloads of that shape: scales may be float32."""
    return -(-payload_bytes(shape, dtype, codec) // _ALIGNED) * _ALIGNED


def encode_into(places: Places, codec: Codec, each: int, payloads: torch.Tensor, tops: torch.Tensor) -> None:
    """A payload of every `each` layers, and one of those that are left, `spacing` apart into `payloads` (uint8, aligned
    to 16 bytes); what `require_finite` judges into `tops`, int32 [layers, 2, heads]. So many launches whatever the
    layers. Issued on the current stream. Raises KvError(CODEC) for an odd head_dim with INT4.
    """
    layers, _, tokens, heads, dim = places.shape
    if codec is Codec.INT4 and dim % 2:
        raise KvError(KvFault.CODEC, "int4 needs an even head_dim")
    first, whole = places.views[0], layers // each * each
    tops.zero_()
    grid = (2 * layers, heads, triton.cdiv(tokens, TOKEN_GROUP))
    tops_of[grid](*places.arguments, tokens, heads, dim, tops, triton.next_power_of_2(dim), TOKEN_GROUP, **_EXACT)
    spaced = spacing((each, 2, tokens, heads, dim), first.dtype, codec)
    for start, end, one in ((0, whole, each), (whole, layers, layers - whole)):
        if start < end:
            shape = (one, 2, tokens, heads, dim)
            given = _Payloads(shape, (end - start) // one, spaced, payloads[start // each * spaced :])
            encode = _encode_fp8 if codec is Codec.FP8 else _encode_ints
            encode(places.of(start, end), given, codec, tops[start:end])


@dataclass(frozen=True, slots=True)
class _Payloads:
    """So many of one shape, so many bytes apart, from the first byte on."""

    shape: Shape
    count: int
    spaced: int
    at: torch.Tensor

    @property
    def sides(self) -> int:
        """K and V of the layers of one."""
        return 2 * self.shape[0]


def gather_places(places: Places, out: torch.Tensor) -> None:
    """What lies at the places into `out` [layers, 2, tokens, heads, head_dim] of their dtype, contiguous."""
    layers, _, tokens, heads, dim = places.shape
    values = tokens * heads * dim
    grid = (2 * layers, triton.cdiv(values, _TILE), 1)
    raw.gather_raw[grid](*places.arguments, values, heads, dim, out, _TILE)


def require_finite(tops: torch.Tensor) -> None:
    """Raises KvError(CODEC) when what was coded held values that are not finite. `tops` is on the host."""
    if bool((tops >= _INFINITE).any()):
        raise KvError(KvFault.CODEC, "values that are not finite")


def decode_places(payload: torch.Tensor, places: Places, wire: torch.dtype, codec: Codec) -> None:
    """Write what a payload (uint8, on the device) holds to its places, in the caches' dtype, on the current stream.

    `wire` is the exporter's dtype; for RAW it is the caches'. Raises KvError(PROTOCOL) when the size does not fit.
    """
    layers, _, tokens, heads, dim = places.shape
    if payload.numel() != payload_bytes(places.shape, wire, codec):
        raise KvError(KvFault.PROTOCOL, "payload size does not fit its header")
    target, values = places.arguments, tokens * heads * dim
    grid = (2 * layers, triton.cdiv(values, _TILE), 1)
    if codec is Codec.RAW:
        raw.scatter_raw[grid](*target, values, heads, dim, payload.view(wire), _TILE)
        return
    if codec is Codec.FP8:
        fp8.decode_fp8[grid](*target, values, heads, dim, payload, 8 * layers * heads, _TILE, **_EXACT)
        return
    for section in _sections(places.shape, codec):
        grid = (triton.cdiv(section.values, _TILE), 1, 1)
        ints.decode_section[grid](*target, *section.arguments, payload, _TILE, **_EXACT)


@dataclass(frozen=True, slots=True)
class _Section:
    """A part of an int8 or int4 payload: K's whole groups, K's last group, or V. Offsets are in bytes."""

    side: int
    at: int
    layers: int
    first: int
    tokens: int
    group: int  # of tokens for K, of channels for V
    heads: int
    dim: int
    bits: int

    @property
    def groups(self) -> int:
        """Of one layer."""
        return self.tokens * self.heads * self.dim // self.group

    @property
    def values(self) -> int:
        """Coded, of all layers."""
        return self.layers * self.tokens * self.heads * self.dim

    @property
    def codes(self) -> int:
        """Where they begin: after scales and zeros."""
        return self.at + 4 * self.layers * self.groups

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.codes + self.values * self.bits // 8

    @property
    def arguments(self) -> tuple[int, ...]:
        """What the kernels want to know of it."""
        apart = 2 * self.layers * self.groups
        whole = (self.side, self.at, apart, self.codes, self.values, self.first, self.tokens, self.group)
        return (*whole, self.heads, self.dim, self.bits)


def _sections(shape: Shape, codec: Codec) -> list[_Section]:
    layers, _, tokens, heads, dim = shape
    bits, whole = (8 if codec is Codec.INT8 else 4), tokens // TOKEN_GROUP * TOKEN_GROUP
    cuts = [(0, 0, whole, TOKEN_GROUP), (0, whole, tokens - whole, tokens - whole), (1, 0, tokens, channel_group(dim))]
    sections, at = list[_Section](), 8 * layers
    for side, first, count, group in cuts:
        if count:
            sections.append(_Section(side, at, layers, first, count, group, heads, dim, bits))
            at = sections[-1].end
    return sections


def _encode_fp8(places: Places, given: _Payloads, codec: Codec, tops: torch.Tensor) -> None:
    layers, _, tokens, heads, dim = given.shape
    scales, values = 2 * layers * heads, tokens * heads * dim
    grid = (triton.cdiv(scales, _TILE), given.count, 1)
    fp8.scales_fp8[grid](tops, given.at, scales, given.spaced, _TILE, **_EXACT)
    grid = (given.sides * given.count, triton.cdiv(values, _TILE), 1)
    fp8.encode_fp8[grid](
        *places.arguments, values, heads, dim, given.at, 4 * scales, given.sides, given.spaced, _TILE, **_EXACT
    )


def _encode_ints(places: Places, given: _Payloads, codec: Codec, tops: torch.Tensor) -> None:
    layers, _, _, heads, dim = given.shape
    spread = (given.at, given.sides, given.spaced)
    ints.units[(given.sides * given.count,)](
        tops, given.at, heads, given.sides, given.spaced, triton.next_power_of_2(heads), **_EXACT
    )
    for section in _sections(given.shape, codec):
        key = section.side == 0
        groups = triton.cdiv(section.tokens, section.group) if key else triton.cdiv(section.tokens, TOKEN_GROUP)
        channels = dim if key else section.group
        grid = (layers * given.count, groups, heads * (dim // channels))
        tile = (triton.next_power_of_2(channels), TOKEN_GROUP)
        ints.grids[grid](*places.arguments, *section.arguments, channels, *spread, *tile, **_EXACT)
        grid = (triton.cdiv(section.values * section.bits // 8, _TILE), given.count, 1)
        ints.encode_section[grid](*places.arguments, *section.arguments, *spread, _TILE, **_EXACT)
