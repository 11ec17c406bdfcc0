"""Transfers between endpoints: any ranges, ranks, stages and precisions, how they end, and exports of a device."""

import asyncio
import threading
from types import SimpleNamespace

import msgspec
import pytest
import torch

from services.worker.kv import KvError, KvFault
from services.worker.kv.device import DeviceCopies
from services.worker.kv.rank_messages import StagingFailed
from services.worker.kv.shards import RankShape, Shards, Source
from services.worker.kv.staging import Piece, PinnedMemory, Rows
from services.worker.kv.wire.endpoint import Faults, KvEndpoint
from services.worker.kv.wire.importing import Import, Load, Part, PullLimits
from services.worker.kv.wire.protocol import FRAME_BYTES, Frame
from shared.domain.kv import Codec
from tests.services.worker.kv.late_device import LateDevice
from tests.services.worker.kv.rig import (
    DIM,
    KV_HEADS,
    LAYERS,
    TOKEN_BYTES,
    WAIT_S,
    Capture,
    Rig,
    model_kv,
    stage,
    wait_until,
)


def test_everything_arrives_and_the_exporter_frees_it(rig: Rig) -> None:
    exporter = rig.endpoint()
    result = rig.transfer(exporter, tokens=100)
    assert (result.tokens, result.wire_bytes) == (100, 100 * TOKEN_BYTES)
    wait_until(lambda: exporter.staged_bytes == 0)


def test_a_pull_may_come_before_the_first_chunk_and_follows_the_chunks(rig: Rig) -> None:
    exporter, importer, kv = rig.endpoint(), rig.endpoint(), model_kv(96)
    got = rig.load(importer, rig.handle([exporter], 96))
    for start in (0, 32, 64):
        assert rig.results.empty()
        stage(exporter, kv, start=start, end=start + 32)
        wait_until(lambda start=start: any(token >= start for _, token in got.writes) or start == 64)
    assert rig.result().ok
    assert torch.equal(got.kv, kv)
    assert [token for _, token in got.writes] == sorted(token for _, token in got.writes)


@pytest.mark.parametrize(("start", "end"), [(0, 1), (17, 100), (10, 90)])
def test_any_range_of_tokens(rig: Rig, start: int, end: int) -> None:
    exporter, importer, kv = rig.endpoint(), rig.endpoint(), model_kv(100)
    stage(exporter, kv, each=40)
    got = rig.load(importer, rig.handle([exporter], 100), start, end)
    assert rig.result().ok
    assert torch.equal(got.kv, kv[:, :, start:end])


def test_layers_larger_than_a_frame_are_split_by_tokens(rig: Rig) -> None:
    tokens = 3 * FRAME_BYTES // (2 * KV_HEADS * DIM * 4) // 2
    exporter, importer, kv = rig.endpoint(), rig.endpoint(), model_kv(tokens)
    stage(exporter, kv)
    got = rig.load(importer, rig.handle([exporter], tokens))
    assert rig.result().ok
    assert torch.equal(got.kv, kv)
    assert len({token for _, token in got.writes}) == 2


def begins(importer: KvEndpoint, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that begin its loads, as they do."""
    imports, names = importer.puller.imports, list[str]()
    begin = imports.begin

    def noted(load: Load) -> KvError | None:
        names.append(threading.current_thread().name)
        return begin(load)

    monkeypatch.setattr(imports, "begin", noted)
    return names


@pytest.mark.parametrize("rig", ["kv"], indirect=True)
def test_a_load_over_a_known_connection_is_begun_by_its_own_thread(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, importer = rig.endpoint(), rig.endpoint()
    names, ours = begins(importer, monkeypatch), threading.current_thread().name
    rig.transfer(exporter, importer, "first")
    assert names == ["kv-puller"]  # there was no connection
    for turn in range(200):  # the puller may be busy with what comes after a transfer
        rig.transfer(exporter, importer, f"t{turn}")
        if names[-1] == ours:
            break
    assert names[-1] == ours
    with importer.puller._turn:
        stage(exporter, model_kv(64), "busy")
        got = rig.load(importer, rig.handle([exporter], 64, "busy"))
        assert not got.writes
    assert rig.result().ok
    assert names[-1] == "kv-puller"
    wait_until(lambda: exporter.staged_bytes == 0)


@pytest.mark.parametrize("rig", ["kv"], indirect=True)
def test_a_load_that_cannot_be_begun_ends_on_the_pullers_thread(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, importer = rig.endpoint(), rig.endpoint()
    rig.transfer(exporter, importer, "first")
    imports, ends = importer.puller.imports, list[str]()
    monkeypatch.setattr(imports, "can_begin", lambda _: True)
    monkeypatch.setattr(imports, "_on_end", lambda *end: (ends.append(threading.current_thread().name), on_end(*end)))
    on_end = importer._ended
    rig.load(importer, rig.handle([exporter], 64, "bad", stages=(99,)))
    assert rig.result().error.startswith("invalid_request")
    assert ends == ["kv-puller"]


def part_of(rig: Rig, tokens: int, codec: Codec = Codec.RAW, window_bytes: int = 1000) -> Part:
    handle = rig.handle([], tokens, endpoints=("kv://127.0.0.1:7",), codec=codec)
    shape = RankShape(Shards((LAYERS,), KV_HEADS), DIM, torch.float32)
    owner = Import(handle, 0, tokens, 0.0, 1e9, False, 1e9, 0.0, 0.0)
    source = Source(0, 0, 0, LAYERS, 0, KV_HEADS, 1)
    return Part(owner, source, shape, SimpleNamespace(losses=0), 1, window_bytes)  # type: ignore[arg-type]


def frame(sequence: int, layers: tuple[int, int], tokens: tuple[int, int], **changes: object) -> Frame:
    wanted = Frame(
        1, sequence, "t", 7, Codec.RAW, "float32", *layers, LAYERS, *tokens, 0, KV_HEADS, DIM, 0, 1, 0, 0, 2, ()
    )
    return msgspec.structs.replace(wanted, **changes)


def test_frames_come_run_by_run_and_layer_by_layer(rig: Rig) -> None:
    part = part_of(rig, 40)
    for sequence, (layers, tokens) in enumerate([((0, 2), (0, 30)), ((2, 3), (0, 30)), ((0, 3), (30, 40))]):
        wrong = [
            frame(sequence, layers, (tokens[0], tokens[1] + 11)),
            frame(sequence, (layers[0] + 1, 3), tokens),
            frame(sequence, (layers[0], 4), tokens),
            frame(sequence, (layers[0], layers[0]), tokens),
            frame(sequence, (-1, 3), tokens),
            frame(sequence, layers, (tokens[0] + 1, tokens[1])),
            frame(sequence, layers, (tokens[0], tokens[0])),
            frame(sequence + 1, layers, tokens),
            frame(sequence, layers, tokens, generation=8),
            *([frame(sequence, layers, (0, 29))] if layers[0] else []),  # not the run's end
            *([frame(sequence, (0, 2), (0, 30))] if sequence else []),  # once more
        ]
        for each in wrong:
            with pytest.raises(KvError) as raised:
                part.check(each)
            assert raised.value.fault is KvFault.PROTOCOL
        right = frame(sequence, layers, tokens)
        part.check(right)
        assert not part.done
        part.admit(right, 10)
    assert part.done
    with pytest.raises(KvError):
        part.check(frame(3, (0, 3), (40, 41)))


def test_an_exporter_that_may_send_everything_gets_no_further_grant(rig: Rig) -> None:
    whole = 40 * TOKEN_BYTES
    for window_bytes, codec, wanted in [
        (whole, Codec.RAW, False),
        (whole - 1, Codec.RAW, True),
        (whole, Codec.INT8, True),  # how much that is depends on its coding
    ]:
        part = part_of(rig, 40, codec, window_bytes)
        part.admit(frame(0, (0, 2), (0, 40)), whole * 2 // 3)
        assert part.wants_grant == wanted


Instance = list[tuple[KvEndpoint, tuple[int, int], tuple[int, int]]]


def instance(rig: Rig, stages: tuple[int, ...], tensor_parallel: int) -> Instance:
    """The ranks of one instance, each with its layers and heads."""
    shards = Shards(stages, KV_HEADS, tensor_parallel)
    return [
        (rig.endpoint(rank, tensor_parallel, stages=stages), shards.layers_of(rank), shards.heads_of(rank))
        for rank in range(shards.ranks)
    ]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (((3,), 1), ((3,), 2)),
        (((3,), 4), ((3,), 2)),
        (((3,), 2), ((3,), 4)),
        (((3,), 1), ((1, 2), 1)),
        (((2, 1), 1), ((3,), 1)),
        (((1, 1, 1), 1), ((2, 1), 1)),
        (((3,), 2), ((2, 1), 1)),
        (((1, 2), 2), ((2, 1), 4)),
        (((2, 1), 4), ((1, 1, 1), 1)),
    ],
)
def test_unlike_stages_and_ranks(
    rig: Rig, theirs: tuple[tuple[int, ...], int], ours: tuple[tuple[int, ...], int]
) -> None:
    kv, got, exporters = model_kv(50), Capture(0, 50), instance(rig, *theirs)
    for exporter, layers, heads in exporters:
        stage(exporter, kv, layers=slice(*layers), heads=slice(*heads))
    handle = rig.handle([exporter for exporter, _, _ in exporters], 50, stages=theirs[0])
    importers = instance(rig, *ours)
    for importer, _, _ in importers:
        rig.load(importer, handle, capture=got)
    assert [rig.result().error for _ in importers] == [""] * len(importers)
    assert torch.equal(got.kv, kv)
    wait_until(lambda: all(exporter.staged_bytes == 0 for exporter, _, _ in exporters))


def test_a_stage_holds_no_more_than_its_layers(rig: Rig) -> None:
    exporter = rig.endpoint(1, stages=(2, 1), staging_bytes=50 * TOKEN_BYTES // LAYERS)
    stage(exporter, model_kv(50), layers=slice(2, 3))
    assert exporter.staged_bytes == exporter.stats().staging_limit_bytes
    assert exporter.stats().rank == 1


@pytest.mark.parametrize("codec", Codec)
def test_codecs_and_precisions_are_decoded_by_the_receiver(rig: Rig, codec: Codec) -> None:
    exporter, importer = rig.endpoint(dtype=torch.bfloat16, lossy=True), rig.endpoint(lossy=True)
    kv = model_kv(100, torch.bfloat16)
    stage(exporter, kv)
    got = rig.load(importer, rig.handle([exporter], 100, codec=codec, dtype="bfloat16"))
    result = rig.result()
    assert result.ok
    assert result.wire_bytes == kv.numel() * 2 if codec is Codec.RAW else result.wire_bytes < kv.numel() * 2 * 0.8
    error = (got.kv - kv.float()).abs().max()
    assert error == 0 if codec is Codec.RAW else error < 0.5


def test_credit_bounds_what_is_under_way(rig: Rig) -> None:
    """A receiver that stands still is sent its window and no more than the frame that crosses it."""
    window, tokens = FRAME_BYTES // 16, 4000
    exporter, importer = rig.endpoint(), rig.endpoint(limits=PullLimits(window_bytes=window))
    kv = model_kv(tokens)
    stage(exporter, kv, each=50)
    go_on, reached = threading.Event(), threading.Event()
    got = Capture(0, tokens)
    got.before = lambda: (reached.set(), go_on.wait(20))
    rig.load(importer, rig.handle([exporter], tokens), capture=got)
    assert reached.wait(20)
    wait_until(lambda: exporter.stats().sent_bytes >= window)
    threading.Event().wait(0.1)  # time to send too much, if it would
    assert exporter.stats().sent_bytes < window + 50 * TOKEN_BYTES
    go_on.set()
    assert rig.result().ok
    assert torch.equal(got.kv, kv)


def test_corruption_on_the_wire_is_found(rig: Rig) -> None:
    exporter = rig.endpoint(faults=Faults(corrupt=True))
    stage(exporter, model_kv(64))
    assert rig.refused(rig.endpoint(), rig.handle([exporter], 64)).startswith("checksum")


def test_values_that_cannot_be_coded_fail_the_pull(rig: Rig) -> None:
    exporter, kv = rig.endpoint(lossy=True), model_kv(64)
    kv[1, 0, 3] = float("nan")
    stage(exporter, kv)
    assert rig.refused(rig.endpoint(), rig.handle([exporter], 64, codec=Codec.INT8)).startswith("codec")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"fingerprint": "another"}, "fingerprint_mismatch"),
        ({"generation": 6}, "stale_generation"),
        ({"dtype": "bfloat16"}, "protocol"),
        ({"tokens": 65}, "invalid_request"),  # more than were exported
        ({"stages": (1, 2)}, "invalid_request"),  # of one rank
        ({"endpoints": ("kv://127.0.0.1:1",) * 3}, "invalid_request"),  # heads do not divide among three ranks
        ({"endpoints": ("tcp://127.0.0.1:7000",)}, "unreachable: tcp://127.0.0.1:7000: KV over ZeroMQ was removed"),
    ],
)
def test_a_handle_that_does_not_match_fails(rig: Rig, change: dict[str, object], code: str) -> None:
    exporter = rig.endpoint()
    stage(exporter, model_kv(64))
    rig.load(rig.endpoint(), msgspec.structs.replace(rig.handle([exporter], 64), **change))
    assert rig.result().error.startswith(code)


def test_a_transfer_that_never_comes_ends_at_the_deadline(rig: Rig) -> None:
    rig.load(rig.endpoint(), rig.handle([rig.endpoint()], 64), timeout_s=0.3)
    result = rig.result()
    assert result.error == "timeout"
    assert 0.2 < result.ended_s - result.started_s < WAIT_S / 2


def test_transfers_that_have_ended_fail_at_once(rig: Rig) -> None:
    exporter, importer = rig.endpoint(staging_bytes=64 * TOKEN_BYTES, lease_s=0.05), rig.endpoint()
    stage(exporter, model_kv(65), "refused")
    exporter.release("released")
    stage(exporter, model_kv(64), "expired_lease")
    wait_until(lambda: exporter.staged_bytes == 0)
    for name in ("refused", "released", "expired_lease"):
        assert rig.refused(importer, rig.handle([exporter], 64, name)).startswith(name)


@pytest.mark.parametrize("end", ["released", "cancelled"])
def test_a_pull_under_way_ends_promptly_and_nothing_is_written_after(rig: Rig, end: str) -> None:
    exporter, importer, kv = rig.endpoint(), rig.endpoint(), model_kv(64)
    got = rig.load(importer, rig.handle([exporter], 64))
    stage(exporter, kv, end=32)
    wait_until(lambda: got.writes)
    (exporter.release if end == "released" else importer.cancel)("t")
    assert rig.result().error.startswith(end)
    writes = len(got.writes)
    stage(exporter, kv, start=32)
    wait_until(lambda: exporter.staged_bytes == 0)  # a cancellation confirms
    assert len(got.writes) == writes


def test_stopping_ends_loads_and_later_ones(rig: Rig) -> None:
    exporter, importer = rig.endpoint(), rig.endpoint()
    rig.load(importer, rig.handle([exporter], 64))
    rig.stop(importer)
    assert rig.result().error == "stopped"
    rig.load(importer, rig.handle([exporter], 64, "later"))
    assert rig.result().error == "stopped"


TOKENS, SEGMENT = 50, 16


def shape(tokens: int) -> tuple[int, ...]:
    return LAYERS, 2, tokens, KV_HEADS, DIM


def copies_of(device: LateDevice, tokens: int = 200) -> DeviceCopies:
    allocate = lambda size: torch.zeros(size, dtype=torch.uint8)  # noqa: E731
    memory = PinnedMemory([Rows(shape, torch.float32, SEGMENT)], tokens * TOKEN_BYTES, allocate)
    return DeviceCopies(device, memory, SEGMENT * TOKEN_BYTES, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
def test_the_importer_gets_what_was_computed_though_the_blocks_are_used_again(rig: Rig, seed: int) -> None:
    device, kv, cache = LateDevice(seed), model_kv(TOKENS), torch.zeros(shape(TOKENS))
    exporter, importer = rig.endpoint(copies=copies_of(device)), rig.endpoint()

    def fill(first: int, until: int, out: torch.Tensor) -> None:
        device.issue(lambda: out.copy_(cache[:, :, first:until]))

    capture = rig.load(importer, rig.handle([exporter], TOKENS))
    for start, end in ((0, 20), (20, TOKENS)):
        device.issue(lambda start=start, end=end: cache[:, :, start:end].copy_(kv[:, :, start:end]))
        exporter.stage("t", (start, end), TOKENS, [Piece(start, end, fill)])
        device.issue(lambda: cache.fill_(-1.0))
    result = rig.result()
    assert result.ok, result.error
    assert torch.equal(capture.kv, kv)
    assert sorted(device.entered) == ["kv-copies", "kv-puller", "kv-server"]
    assert exporter.stats().staged_bytes in (0, TOKENS * TOKEN_BYTES)


async def test_want_of_pinned_memory_fails_the_transfer_and_not_the_engine(rig: Rig) -> None:
    async with rig.events() as events:
        exporter, importer = rig.endpoint(copies=copies_of(LateDevice(), tokens=10)), rig.endpoint()
        unwanted = Piece(0, TOKENS, lambda *_: pytest.fail("nothing is gathered"))
        exporter.stage("t", (0, TOKENS), TOKENS, [unwanted])
        async with asyncio.timeout(WAIT_S):
            while not isinstance(event := await events.get(), StagingFailed):
                pass
        assert "pinned memory has no room" in str(event)
        assert rig.refused(importer, rig.handle([exporter], TOKENS)).startswith("refused")
