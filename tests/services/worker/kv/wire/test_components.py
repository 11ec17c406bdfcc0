"""Transfers of several components: each arrives in its own destination, of a window and a state only what is read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.kv.rank_messages import PullEnded
from services.worker.kv.shards import RankShape, Shards
from services.worker.kv.staging import Piece
from services.worker.kv.wire.endpoint import KvEndpoint, KvSettings, host_copies
from services.worker.kv.wire.importing import Load, PullLimits
from shared.domain.instance import KvKind
from shared.domain.kv import Codec, KvHandle
from tests.services.worker.kv.rig import KEY, WAIT_S, Capture, Rig, prefetch, wait_until

TOKENS, WINDOW, CHUNK = 100, 10, 32
WINDOWED, FULL = (0, 2, 3), (1,)  # layers of a model of four, in two stages or in one


def shapes(stages: tuple[int, ...] = (4,), ranks: int = 1, rank: int = 0) -> tuple[RankShape, ...]:
    """K and V of 4 heads within a window, a latent, and a state in a dtype of its own."""

    def shards(numbers: tuple[int, ...], heads: int) -> Shards:
        ends = [sum(stages[: at + 1]) for at in range(len(stages))]
        counts = tuple(
            sum(end - size <= number < end for number in numbers) for end, size in zip(ends, stages, strict=True)
        )
        return Shards(counts, heads, ranks, numbers)

    return (
        RankShape(shards(WINDOWED, 4), 8, torch.float32, rank, window=WINDOW),
        RankShape(shards(FULL, 1), 16, torch.float32, rank, sides=1, kind=KvKind.LATENT),
        RankShape(shards(WINDOWED, 4), 5, torch.bfloat16, rank, sides=3, kind=KvKind.STATE, window=1),
    )


def model() -> list[torch.Tensor]:
    """Of each component [layers, sides, tokens, heads, dim]; of the state, as it is after each token."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(len(shape.shards.numbers), shape.sides, TOKENS, shape.shards.kv_heads, shape.head_dim,
                    generator=generator).to(shape.dtype)
        for shape in shapes()
    ]  # fmt: skip


KV = model()


class Into(Capture):
    """The destination of a component."""

    def __init__(self, component: int, shape: RankShape, start: int, end: int) -> None:
        self.component = component
        self.shape = shape
        first, last = shape.read(start, end)
        super().__init__(first, last, shape.dtype)
        self.kv = torch.full(shape.chunk_shape(last - first), float("nan"), dtype=shape.dtype)

    def scales(self, layer: int) -> tuple[float, ...]:
        return self.shape.scales[layer] if self.shape.scales else ()

    def write(self, layer: int, token_start: int, head_start: int, kv: torch.Tensor) -> None:
        super().write(layer - self.shape.layers[0], token_start, head_start - self.shape.heads[0], kv)


def endpoint(rig: Rig, which: tuple[RankShape, ...], **settings: Any) -> KvEndpoint:
    addresses = ("kv://127.0.0.1:*",) * which[0].shards.ranks
    made = KvEndpoint(
        KvSettings(addresses, rig.events_address, rig.generation, rig.fingerprint, KEY, **settings),
        which,
        lambda _, ended: rig.results.put(ended),
        64 << 20,
        limits=PullLimits(),
    )
    rig.endpoints.append(made)
    return made


def stage(exporter: KvEndpoint, which: tuple[RankShape, ...]) -> None:
    """In chunks, as an engine computes them."""
    for first in range(0, TOKENS, CHUNK):
        until = min(TOKENS, first + CHUNK)
        pieces = []
        for component, shape in enumerate(which):
            start, end = shape.kept(first, until, TOKENS)
            if start < end and shape.layers[0] < shape.layers[1]:
                part = KV[component][slice(*shape.layers), :, :, slice(*shape.heads)]

                def fill(at: int, to: int, kv: torch.Tensor, part: torch.Tensor = part) -> None:
                    kv.copy_(part[:, :, at:to])

                pieces.append(Piece(start, end, fill, component=component))
        exporter.stage("t", (first, until), TOKENS, pieces)


def load(importer: KvEndpoint, which: tuple[RankShape, ...], handle: KvHandle, start: int, end: int) -> list[Into]:
    into = [Into(component, shape, start, end) for component, shape in enumerate(which)]
    importer.load(Load("r", handle, start, end, tuple(into), WAIT_S))
    return into


def wanted(into: Into) -> torch.Tensor:
    """What a component ought to hold."""
    tokens = slice(into.start, into.start + into.kv.shape[2])
    return KV[into.component][slice(*into.shape.layers), :, tokens, slice(*into.shape.heads)]


def arrived(into: list[Into]) -> bool:
    """Whether each component has all that is read of it, and it is the exporter's."""
    return all(torch.equal(each.kv, wanted(each)) for each in into)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    made.endpoint()  # with it, the rig reads events
    yield made
    made.close()


@pytest.mark.parametrize("start", [0, 50, 95])
@pytest.mark.parametrize("fixed", [False, True], ids=["heap", "arena"])
def test_of_each_component_arrives_what_is_read(rig: Rig, start: int, fixed: bool) -> None:
    exporter, importer = endpoint(rig, shapes()), endpoint(rig, shapes())
    if fixed:
        exporter.copies = host_copies(shapes(), 1 << 20, fixed=True)
        importer.copies = exporter.copies
    stage(exporter, shapes())
    handle = rig.handle([exporter], TOKENS)
    into = load(importer, shapes(), handle, start, TOKENS)
    assert rig.result().ok
    assert arrived(into)
    assert [each.kv.shape[2] for each in into] == [min(WINDOW, TOKENS - start), TOKENS - start, 1]


@pytest.mark.parametrize(
    ("theirs", "ours"), [(((2, 2), 2), ((4,), 1)), (((4,), 1), ((1, 3), 4)), (((1, 3), 2), ((2, 2), 4))]
)
def test_between_ranks_and_stages(rig: Rig, theirs: tuple[Any, int], ours: tuple[Any, int]) -> None:
    """A stage may have no layer of a component, and a rank is confirmed once for all of them."""
    exporting = [shapes(*theirs, rank) for rank in range(len(theirs[0]) * theirs[1])]
    exporters = [endpoint(rig, which) for which in exporting]
    for exporter, which in zip(exporters, exporting, strict=True):
        stage(exporter, which)
    handle = rig.handle(exporters, TOKENS, stages=theirs[0] if len(theirs[0]) > 1 else ())
    captures = []
    for rank in range(len(ours[0]) * ours[1]):
        which = shapes(*ours, rank)
        captures.append(load(endpoint(rig, which), which, handle, 0, TOKENS))
    assert all(rig.result().ok for _ in captures)
    assert all(arrived(into) for into in captures)
    for exporter in exporters:
        wait_until(lambda exporter=exporter: not exporter.staged_bytes)


def test_a_state_of_another_token_is_not_to_be_had(rig: Rig) -> None:
    exporter, importer = endpoint(rig, shapes()), endpoint(rig, shapes())
    stage(exporter, shapes())
    load(importer, shapes(), rig.handle([exporter], TOKENS), 0, TOKENS - 1)
    assert rig.result().error.startswith("invalid_request: token 98 was not exported")


def test_one_token_less_of_a_window_is(rig: Rig) -> None:
    which = shapes()[:2]
    exporter, importer = endpoint(rig, which), endpoint(rig, which)
    stage(exporter, which)
    into = load(importer, which, rig.handle([exporter], TOKENS), 0, TOKENS - 1)
    assert rig.result().ok
    assert arrived(into)


@pytest.mark.parametrize("end", [TOKENS, TOKENS - 1])
def test_a_prefetch_is_joined_by_a_load_of_the_same_end_only(rig: Rig, end: int) -> None:
    which = shapes()[:2]
    exporter, importer = endpoint(rig, which), endpoint(rig, which)
    handle = rig.handle([exporter], TOKENS)
    stage(exporter, which)
    importer.carry_out(prefetch(handle))
    into = load(importer, which, handle, 0, end)
    ended: PullEnded = rig.result()
    assert (ended.ok, ended.prefetched) == (True, end == TOKENS)
    assert arrived(into)


def test_peers_whose_components_differ_fail_by_name(rig: Rig) -> None:
    exporter = endpoint(rig, shapes())
    stage(exporter, shapes())
    other = (shapes()[0], RankShape(shapes()[1].shards, 8, torch.float32, sides=2, kind=KvKind.LATENT), shapes()[2])
    load(endpoint(rig, other), other, rig.handle([exporter], TOKENS), 0, TOKENS)
    assert "its sides is 1, not 2" in rig.result().error


def test_only_k_and_v_are_coded(rig: Rig) -> None:
    exporter, importer = endpoint(rig, shapes(), lossy=True), endpoint(rig, shapes(), lossy=True)
    stage(exporter, shapes())
    into = load(importer, shapes(), rig.handle([exporter], TOKENS, codec=Codec.INT8), 0, TOKENS)
    assert rig.result().ok
    assert arrived(into[1:2])
    assert not torch.equal(into[0].kv, KV[0][:, :, -WINDOW:])
    assert torch.allclose(into[0].kv, KV[0][:, :, -WINDOW:], atol=0.05)


@pytest.mark.parametrize("importer_bits", [8, 16])
def test_eight_bits_carry_their_scales(rig: Rig, importer_bits: int) -> None:
    """Stored values times their scale are what counts: to equal scales as they are, to others converted."""
    shards, scales = Shards((3,), 4, numbers=(0, 1, 2)), ((0.5, 2.0), (0.25, 1.0), (1.0, 4.0))
    stored = torch.randn(3, 2, 40, 4, 8, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    theirs = (RankShape(shards, 8, torch.float8_e4m3fn, scales=scales),)
    ours = theirs if importer_bits == 8 else (RankShape(shards, 8, torch.bfloat16),)
    exporter, importer = endpoint(rig, theirs), endpoint(rig, ours)

    def fill(start: int, end: int, kv: torch.Tensor) -> None:
        kv.view(torch.uint8).copy_(stored[:, :, start:end].view(torch.uint8))

    exporter.stage("t", (0, 40), 40, [Piece(0, 40, fill)])
    into = Into(0, RankShape(shards, 8, torch.bfloat16, scales=ours[0].scales), 0, 40)  # eight bits are written as 16
    importer.load(Load("r", rig.handle([exporter], 40, dtype="float8_e4m3fn"), 0, 40, (into,), WAIT_S))
    assert rig.result().ok
    factors = torch.tensor(scales).view(3, 2, 1, 1, 1) if importer_bits == 16 else torch.ones(1)
    assert torch.equal(into.kv, (stored.float() * factors).to(torch.bfloat16))
