"""Memory that nothing uses goes back to the system."""

import gc

import psutil
import pytest

from shared.runtime.server import trim

BLOCKS, SIZE = 4_000, 32_000  # below the size from which glibc maps each block by itself


def test_memory_between_what_is_in_use_is_given_back() -> None:
    if not psutil.LINUX:
        pytest.skip("the C library of this system gives memory back by itself, or not at all")
    process = psutil.Process()
    blocks = [bytearray(SIZE) for _ in range(BLOCKS)]
    held = process.memory_info().rss
    kept = blocks[::50]  # spread over the heap, so that its end does not become free
    del blocks
    gc.collect()
    trim()
    assert held - process.memory_info().rss > BLOCKS * SIZE / 2
    assert len(kept) == BLOCKS // 50
