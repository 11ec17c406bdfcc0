"""Where imports are written: into the blocks of their tokens, and never into the engine's null block."""

from typing import Any, cast

import pytest
import torch

from services.worker.kv.device import Blocks, HostCopies
from services.worker.kv.host_memory import HeapMemory
from services.worker.kv.layout import slots_of, strided_layout
from shared.domain.kv import Codec

BLOCK, HEADS, DIM, TOKENS = 4, 2, 8, 10


class Decoder:
    """In the place of a device's codec."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, *_: Any) -> bool:
        self.decoded += 1
        return True


def destination(cache: torch.Tensor, numbers: list[int], decoder: Decoder | None = None) -> Blocks:
    layout = strided_layout(cache, DIM, BLOCK)
    copies = HostCopies(HeapMemory(lambda tokens: (1, 2, tokens, HEADS, DIM), cache.dtype, BLOCK))
    slots = slots_of(torch.tensor(numbers), BLOCK, 0, TOKENS)
    return Blocks([cache], layout, slots, 0, 0, 0, copies, None, False, cast(Any, decoder), null_slots=BLOCK)


@pytest.mark.parametrize(("numbers", "first"), [([3, 1, 2], 0), ([0, 1, 2], 4), ([0, 0, 2], 8), ([0, 0, 0], 10)])
def test_tokens_outside_of_a_window_are_not_written_to_the_null_block(numbers: list[int], first: int) -> None:
    cache, kv = torch.zeros(4, HEADS, BLOCK, 2 * DIM), torch.randn(2, TOKENS, HEADS, DIM)
    blocks = destination(cache, numbers)
    blocks.write(0, 0, 0, kv)
    assert not cache[0].any()
    out = torch.empty_like(kv)
    blocks.layout.gather(cache, torch.tensor(numbers), 0, TOKENS, out)
    assert torch.equal(out[:, first:], kv[:, first:])


@pytest.mark.parametrize(("numbers", "decoded"), [([3, 1, 2], 1), ([0, 1, 2], 0)])
def test_a_kernel_writes_payloads_of_which_all_tokens_have_blocks(numbers: list[int], decoded: int) -> None:
    cache, decoder = torch.zeros(4, HEADS, BLOCK, 2 * DIM), Decoder()
    payload = torch.zeros(1, dtype=torch.uint8)
    taken = destination(cache, numbers, decoder).take(
        (0, 1), (0, TOKENS), (0, HEADS), payload, torch.float32, Codec.RAW
    )
    assert (taken, decoder.decoded) == (bool(decoded), decoded)
