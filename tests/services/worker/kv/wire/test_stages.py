"""Between instances that divide the model into other pipeline stages, over real sockets, without an engine."""

import pytest
import torch

from services.worker.kv.shards import Shards
from services.worker.kv.wire.endpoint import KvEndpoint
from tests.services.worker.kv.rig import DIM, KV_HEADS, Capture, Rig, model_kv, stage
from tests.services.worker.kv.wire.test_transfer import wait_until


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (((3,), 1), ((1, 2), 1)),
        (((2, 1), 1), ((3,), 1)),
        (((2, 1), 1), ((1, 2), 1)),
        (((1, 1, 1), 1), ((2, 1), 1)),
        (((3,), 2), ((2, 1), 1)),
        (((1, 2), 2), ((2, 1), 4)),
        (((2, 1), 4), ((1, 1, 1), 1)),
    ],
)
def test_unlike_pipeline_stages(
    rig: Rig, theirs: tuple[tuple[int, ...], int], ours: tuple[tuple[int, ...], int]
) -> None:
    kv = model_kv(50)
    exporters = members(rig, *theirs)
    for exporter, layers, heads in exporters:
        stage(exporter, kv, layers=slice(*layers), heads=slice(*heads))
    handle = rig.handle([exporter for exporter, _, _ in exporters], 50, stages=theirs[0])
    got = Capture(0, 50)
    importers = members(rig, *ours)
    for importer, _, _ in importers:
        rig.load(importer, handle, capture=got)
    assert [rig.result().error for _ in importers] == [""] * len(importers)
    assert torch.equal(got.kv, kv)
    wait_until(lambda: all(exporter.staged_bytes == 0 for exporter, _, _ in exporters))


def members(
    rig: Rig, stages: tuple[int, ...], tensor_parallel: int
) -> list[tuple[KvEndpoint, tuple[int, int], tuple[int, int]]]:
    """The ranks of one instance, each with its layers and heads."""
    shards = Shards(stages, KV_HEADS, tensor_parallel)
    return [
        (rig.endpoint(rank, tensor_parallel, stages=stages), shards.layers_of(rank), shards.heads_of(rank))
        for rank in range(shards.ranks)
    ]


@pytest.mark.parametrize("stages", [(1, 2), (2, 2), (1, 1, 1), ()])
def test_a_handle_that_tells_other_stages_fails_closed(rig: Rig, stages: tuple[int, ...]) -> None:
    kv = model_kv(50)
    exporters = members(rig, (2, 1), 1)
    for exporter, layers, _ in exporters:
        stage(exporter, kv, layers=slice(*layers))
    got = rig.load(rig.endpoint(), rig.handle([exporter for exporter, _, _ in exporters], 50, stages=stages))
    assert rig.result().error.startswith("invalid_request")
    assert not {layer for layer, _ in got.writes} & {1, 2}


def test_a_stage_holds_no_more_than_its_layers(rig: Rig) -> None:
    exporter = rig.endpoint(1, stages=(2, 1), staging_bytes=2 * 50 * KV_HEADS * DIM * 4)
    stage(exporter, model_kv(50), layers=slice(2, 3))
    assert exporter.staged_bytes == exporter.stats().staging_limit_bytes
    assert exporter.stats().rank == 1
