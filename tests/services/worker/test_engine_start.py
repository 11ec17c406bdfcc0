"""What a worker reserves for a transfer is what a rank stages."""

from typing import Any

import pytest
import torch

from services.worker.engine_start import staged_bytes
from services.worker.engines.base import EngineInfo
from services.worker.kv.shards import RankShape, Shards, held_bytes
from services.worker.settings import WorkerSettings
from shared.domain.instance import Compatibility, KvComponent, KvGeometry, KvKind
from shared.domain.rates import Rates

DTYPES = {"": torch.bfloat16, "float32": torch.float32}
WINDOWED = KvComponent(KvKind.HEADS, (0, 2, 3), 2, 8, 64, window=127)
FULL = KvComponent(KvKind.HEADS, (1, 4), 2, 2, 128)
LATENT = KvComponent(KvKind.LATENT, (0, 1, 2, 3, 4), 1, 1, 576)
STATE = KvComponent(KvKind.STATE, (0, 2, 3), 1, 8, 4096, window=1, part="state 1", dtype="float32")
PLAIN = KvGeometry(5, 8, 64)


def shape(part: KvComponent, stages: tuple[int, ...], ranks: int, rank: int) -> RankShape:
    ends = [sum(stages[: at + 1]) for at in range(len(stages))]
    counts = tuple(
        sum(end - size <= layer < end for layer in part.layers) for end, size in zip(ends, stages, strict=True)
    )
    shards = Shards(counts, part.heads, ranks, part.layers)
    return RankShape(shards, part.head_dim, DTYPES[part.dtype], rank, part.sides, part.kind, part.window)


@pytest.mark.parametrize("stages", [(5,), (2, 3), (1, 4)], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 100, 1000])
@pytest.mark.parametrize(
    "geometry",
    [
        PLAIN,
        KvGeometry(5, 8, 64, (WINDOWED, FULL)),
        KvGeometry(5, 1, 576, (LATENT,)),
        KvGeometry(5, 2, 64, (STATE, FULL)),
    ],
    ids=["plain", "windows", "latent", "state"],
)
def test_the_rank_that_holds_the_most(geometry: KvGeometry, tokens: int, ranks: int, stages: tuple[int, ...]) -> None:
    compatibility = Compatibility("f", "vllm", "1", 1, geometry)
    engine = EngineInfo(compatibility, 100, 4096, 32, Rates(), stages if len(stages) > 1 else ())
    values: dict[str, Any] = {"tensor_parallel": ranks, "dtype": "bfloat16"}
    held = [
        held_bytes(tuple(shape(part, stages, ranks, rank) for part in geometry.parts), tokens)
        for rank in range(ranks * len(stages))
    ]
    assert staged_bytes(WorkerSettings.model_construct(**values), engine, tokens) == max(held)
