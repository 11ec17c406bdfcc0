"""How fast KV leaves a device, comes to one, and goes from one instance to another, beside a plain copy."""

import queue
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from services.worker.kv.device import Blocks, Copies, DeviceCopies, TorchDevice
from services.worker.kv.layout import slots_of, strided_layout
from services.worker.kv.rank_messages import PullEnded
from services.worker.kv.shards import RankShape, Shards
from services.worker.kv.staging import HeapMemory, Piece, PinnedMemory, Staged
from services.worker.kv.wire.endpoint import KvEndpoint, KvSettings, rows_of
from services.worker.kv.wire.importing import Load
from shared.domain.kv import Codec, KvHandle

BLOCK, HEADS, DIM, LAYERS = 16, 8, 128, 16  # 64 KiB a token in bfloat16
DTYPE = torch.bfloat16
WAIT_S = 120.0
GIGA = 1e9
# Of values that are normally distributed, which span some ten deviations at most: half a step, and what bfloat16 adds.
BOUNDS = {Codec.INT8: 0.05, Codec.INT4: 0.5, Codec.FP8: 0.3}
LOSSY = tuple(BOUNDS)


class Cache:
    """One instance's: random KV of `tokens` tokens in blocks that do not follow each other."""

    def __init__(self, device: str, tokens: int, seed: int) -> None:
        generator = torch.Generator(device=device).manual_seed(seed)
        blocks = -(-tokens // BLOCK) + 1
        shape = (blocks, HEADS, BLOCK, 2 * DIM)
        self.caches = [torch.randn(shape, dtype=DTYPE, device=device, generator=generator) for _ in range(LAYERS)]
        self.device, self.tokens = device, tokens
        self.layout = strided_layout(self.caches[0], DIM, BLOCK)
        self.blocks = 1 + torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(seed))
        self.shape = RankShape(Shards((LAYERS,), HEADS, 1), DIM, DTYPE)
        self.size_bytes = self.shape.chunk_bytes(tokens)
        self.copies = self._copies()
        self.codec: Any = None
        if device != "cpu":
            from services.worker.kv.device_codec import DeviceCodec

            self.codec = DeviceCodec(self.caches, self.layout, self.shape, self.copies.upload)
            self.codec.prepare(lossy=True)

    def _copies(self) -> Copies:
        rows, segment = rows_of([self.shape]), self.shape.segment_tokens()
        if self.device == "cpu":
            return Copies(HeapMemory(rows))
        memory = PinnedMemory(rows, 2 * self.size_bytes + (64 << 20))
        return DeviceCopies(TorchDevice(self.caches[0]), memory, self.shape.chunk_bytes(segment), 8)

    def slots(self, start: int, end: int) -> torch.Tensor:
        return slots_of(self.blocks, BLOCK, start, end)

    def fill(self, start: int, end: int, kv: torch.Tensor) -> None:
        """See Fill."""
        if self.codec is not None:
            self.codec.gather(self.slots(start, end), kv)
            return
        for layer, cache in enumerate(self.caches):
            self.layout.gather(cache, self.blocks, start, end, kv[layer])

    def coding(self, codec: Codec) -> Any:
        """None where KV is coded on the CPU."""
        return self.codec.coding(codec, self.tokens, self.slots) if self.codec is not None and codec.lossy else None

    def destination(self) -> Blocks:
        """Of an import of all tokens."""
        freed, slots = self.copies.freed(), self.slots(0, self.tokens)
        return Blocks(
            caches=self.caches,
            layout=self.layout,
            slots=[slots] * len(self.caches),
            token_start=0,
            layer_start=0,
            head_start=0,
            copies=self.copies,
            freed=freed,
            zero=False,
            codec=self.codec,
        )

    def kv(self) -> torch.Tensor:
        """All of it, on the device."""
        kv = torch.empty(self.shape.chunk_shape(self.tokens), dtype=DTYPE, device=self.device)
        blocks = self.blocks.to(self.device)
        for layer, cache in enumerate(self.caches):
            self.layout.gather(cache, blocks, 0, self.tokens, kv[layer])
        return kv


def measure(device: str, tokens: int, rounds: int = 5) -> dict[str, float]:
    """GB/s of KV, the best of some rounds; what is lossy counts as much KV as it stands for. Raises AssertionError when
    what arrived is not what left.
    """
    source, target = Cache(device, tokens, 1), Cache(device, tokens, 2)
    for cache in (source, target):
        cache.copies.start(lambda *_: None)
    rates = plain_copies(source, rounds)
    rates["export"] = best(source.size_bytes, rounds, partial(export, source, Codec.RAW))
    staged = export(source, Codec.RAW)
    rates["import"] = best(source.size_bytes, rounds, partial(import_again, target, staged))
    assert torch.equal(source.kv(), target.kv())
    del staged  # its pinned memory is what transfers are staged in
    for codec in LOSSY if source.codec is not None else ():
        rates[f"export {codec.value}"] = best(source.size_bytes, rounds, partial(export, source, codec))
    with tempfile.TemporaryDirectory() as folder:
        rates |= end_to_end(Path(folder), source, target, rounds)
    for cache in (source, target):
        cache.copies.close()
    return rates


def best(size_bytes: int, rounds: int, work: Callable[[], object]) -> float:
    """GB/s of the fastest round; the first one warms up."""
    work()
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return size_bytes / min(seconds) / GIGA


def plain_copies(cache: Cache, rounds: int) -> dict[str, float]:
    """One piece of pinned memory and one of the device."""
    there = torch.empty(cache.size_bytes, dtype=torch.uint8, device=cache.device)
    host = torch.empty(cache.size_bytes, dtype=torch.uint8, pin_memory=cache.device != "cpu")

    def copy(to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source, non_blocking=True)
        settle(cache.device)

    return {
        "plain copy to the host": best(cache.size_bytes, rounds, lambda: copy(host, there)),
        "plain copy to the device": best(cache.size_bytes, rounds, lambda: copy(there, host)),
    }


def show(rates: dict[str, float]) -> str:
    """A line each."""
    return "\n".join(f"{name:>26}: {rate:7.2f} GB/s of KV" for name, rate in rates.items())


def settle(device: str) -> None:
    """Wait for all that was issued."""
    if device != "cpu":
        torch.cuda.synchronize()


def export(cache: Cache, codec: Codec) -> Staged:
    """Out of the blocks into pinned memory."""
    results: queue.Queue[Staged | Exception] = queue.Queue()
    cache.copies.stage([Piece(0, cache.tokens, cache.fill, cache.coding(codec))], results.put)
    result = results.get(timeout=WAIT_S)
    assert not isinstance(result, Exception), result
    return result


def import_again(target: Cache, staged: Staged) -> None:
    """Payloads of whole segments, as they come from the wire, into the blocks."""
    destination = target.destination()
    for segment in staged:
        tokens = (segment.token_start, segment.token_end)
        for layer, kv in enumerate(segment.kv):  # type: ignore[union-attr]
            payload = kv.contiguous().view(torch.uint8).reshape(-1)
            if not destination.take((layer, layer + 1), tokens, (0, HEADS), payload, DTYPE, Codec.RAW):
                destination.write(layer, tokens[0], 0, kv)
    destination.finish()
    target.copies.join()
    settle(target.device)


def end_to_end(folder: Path, source: Cache, target: Cache, rounds: int) -> dict[str, float]:
    """From blocks to blocks: through pinned memory, TCP over loopback, and pinned memory, by one process."""
    results: queue.Queue[PullEnded] = queue.Queue()

    def endpoint(name: str, cache: Cache) -> KvEndpoint:
        settings = KvSettings(("kv://127.0.0.1:*",), f"ipc://{folder}/{name}", 1, "model", "", lossy=True)
        copies: Any = Started(cache.copies)
        return KvEndpoint(
            settings, (cache.shape,), lambda _, ended: results.put(ended), 2 * source.size_bytes, None, copies
        )

    exporter, importer = endpoint("exporter", source), endpoint("importer", target)
    count = 0

    def transfer(codec: Codec) -> None:
        nonlocal count
        count += 1
        name, tokens = f"t{count}", source.tokens
        exporter.stage(name, (0, tokens), tokens, [Piece(0, tokens, source.fill, source.coding(codec))])
        handle = KvHandle(name, "e", 1, "model", (exporter.address,), tokens, "bfloat16", codec)
        importer.load(Load(name, handle, 0, tokens, (target.destination(),), WAIT_S))
        result = results.get(timeout=WAIT_S)
        assert result.ok, result.error
        target.copies.join()
        settle(target.device)

    try:
        for cache in target.caches:
            cache.zero_()
        rates = {"end to end": best(source.size_bytes, rounds, partial(transfer, Codec.RAW))}
        assert torch.equal(source.kv(), target.kv())
        for codec in LOSSY:
            rates[f"end to end {codec.value}"] = best(source.size_bytes, rounds, partial(transfer, codec))
            off = (source.kv().float() - target.kv().float()).abs().max().item()
            assert 0 < off < BOUNDS[codec], f"{codec.value}: off by {off}"
        return rates
    finally:
        exporter.stop()
        importer.stop()


class Started:
    """Copies that run already; whoever measures closes them."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copies, name)

    def start(self, *_: Any) -> None:
        """It has been."""

    def close(self) -> None:
        """Later."""
