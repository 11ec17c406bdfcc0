"""What goes to the disk and comes back, with ranks that carry their copies out or fail."""

from collections.abc import Sequence

import pytest

from services.worker.kv.disk_store import DiskReport
from services.worker.kv.disk_tier import DiskTier
from shared.policy.host_index import Held, SlotIndex

BLOCK, RANKS = 32, 2


class Tier:
    """A tier behind a memory of a few slots, and how many copies of each block it has told of."""

    def __init__(self, memory: int, disk: int, queued: int = 100) -> None:
        self.now = 0.0
        self.memory = SlotIndex(memory, 1000)
        self.disk = DiskTier(SlotIndex(disk, 1000), self.memory, RANKS, 10, queued, clock=lambda: self.now)
        self.copies: dict[bytes, int] = {}
        self.disk.stored, self.disk.removed, self.disk.left = self._stored, self._removed, self.left

    def _stored(self, key: bytes) -> None:
        self.copies[key] = self.copies.get(key, 0) + 1

    def _removed(self, key: bytes) -> None:
        self.copies[key] -= 1
        assert self.copies[key] >= 0

    def left(self, held: Held) -> None:
        self.disk.store(held, copied=True)
        self._removed(held.key)

    def put(self, *keys: bytes) -> None:
        """Blocks of prompts of one block come to the memory."""
        for key in keys:
            put = self.memory.put(key, None, 0)
            assert put is not None
            if put.dropped is not None:
                self.left(put.dropped)
            self._stored(key)

    def step(self, lost: Sequence[bytes] = (), fault: str = "") -> tuple[list[bytes], list[bytes]]:
        """Both ranks carry a step out, and the second one loses some blocks. Returns what was written and read."""
        copies = self.disk.take()
        slots = [slot for _, slot, _ in copies.reads]
        self.disk.ended(DiskReport(len(copies.writes), slots))
        bad = [slot for _, slot, key in copies.reads if key in lost]
        good = [slot for slot in slots if slot not in bad]
        self.disk.ended(DiskReport(len(copies.writes), good, bad, fault))
        return [key for _, _, key in copies.writes], [key for _, _, key in copies.reads]

    def at(self, *keys: bytes) -> list[int]:
        return [self.copies.get(key, 0) for key in keys]


def test_a_block_goes_to_the_disk_once_and_is_read_back() -> None:
    tier = Tier(memory=2, disk=4)
    tier.put(b"a", b"b", b"c")
    assert tier.at(b"a", b"b", b"c") == [1, 1, 1]
    assert (tier.step(), len(tier.disk)) == (([b"a"], []), 1)
    assert tier.disk.may_read("r")
    assert tier.disk.read("r", [b"a"], [])
    assert tier.disk.is_reading(held_in(tier.memory, b"a"))
    assert tier.disk.waits("r")
    assert tier.step() == ([b"b"], [b"a"])  # which made room for it
    assert not tier.disk.waits("r")
    assert not tier.disk.may_read("r")
    assert not tier.disk.is_reading(held_in(tier.memory, b"a"))
    assert tier.at(b"a", b"b", b"c") == [2, 1, 1]
    tier.disk.forget("r")
    tier.put(b"d", b"e", b"f")  # `a` leaves again, and is there
    assert tier.step() == ([b"c", b"d"], [])
    stats = tier.disk.stats()
    assert (stats.held_bytes, stats.written_blocks, stats.read_blocks) == (40, 4, 1)
    assert (stats.evicted_blocks, stats.dropped_blocks, stats.lost_blocks, stats.fault) == (0, 0, 0, "")


def held_in(index: SlotIndex, key: bytes) -> Held:
    held = index.get(key)
    assert held is not None
    return held


def test_what_is_read_or_present_stays_in_memory_until_the_request_goes_on() -> None:
    tier = Tier(memory=3, disk=4)
    tier.put(b"a", b"b", b"c", b"d")
    tier.step()
    assert tier.disk.read("r", [b"a"], [held_in(tier.memory, b"b")])
    assert tier.disk.read("s", [b"a"], [])  # a second request waits for the same read
    tier.put(b"e", b"f")
    assert {b"a", b"b"} < set(tier.memory)
    assert tier.memory.put(b"g", None, 0) is not None
    assert {b"a", b"b", b"g"} == set(tier.memory)
    assert tier.step()[1] == [b"a"]
    assert (tier.disk.waits("r"), tier.disk.waits("s")) == (False, False)
    for key in (b"h", b"i", b"j"):
        tier.memory.put(key, None, 0)
    assert {b"a", b"b"}.isdisjoint(tier.memory)


def test_a_request_that_ends_gives_its_blocks_back_but_not_those_that_are_read() -> None:
    tier = Tier(memory=1, disk=4)
    tier.put(b"a", b"b")
    tier.step()
    assert tier.disk.read("r", [b"a"], [])
    tier.disk.forget("r")
    assert tier.memory.put(b"c", None, 0) is None
    tier.step()
    assert tier.memory.put(b"c", None, 0) is not None


def test_without_room_nothing_is_read_and_no_request_waits() -> None:
    tier = Tier(memory=1, disk=4)
    tier.put(b"a", b"b")
    tier.step()
    pinned = tier.memory.pin(b"b")
    assert not tier.disk.read("r", [b"a"], [])
    assert not tier.disk.waits("r")
    assert tier.step() == ([], [])
    tier.memory.unpin(pinned)
    assert tier.disk.read("r", [b"a"], [])


def test_a_lost_block_is_neither_in_memory_nor_on_the_disk() -> None:
    tier = Tier(memory=2, disk=4)
    tier.put(b"a", b"b", b"c", b"d")
    tier.step()
    assert tier.disk.read("r", [b"a", b"b"], [])
    tier.step(lost=[b"a"])
    assert not tier.disk.waits("r")
    assert (b"a" in tier.memory, tier.disk.get(b"a")) == (False, None)
    assert (b"b" in tier.memory, tier.at(b"a", b"b")) == (True, [0, 2])
    assert (tier.disk.stats().lost_blocks, tier.disk.stats().read_blocks) == (1, 1)
    tier.disk.forget("r")
    tier.put(b"e", b"f")  # the slot of the lost one, too
    assert len(tier.memory) == 2


def test_what_is_cleared_while_it_is_read_is_not_found_and_its_slots_come_back() -> None:
    tier = Tier(memory=1, disk=1)
    tier.put(b"a", b"b")
    tier.step()
    assert tier.disk.read("r", [b"a"], [])
    tier.memory.clear()
    tier.disk.clear()
    copies = dict(tier.copies)
    assert tier.memory.put(b"c", None, 0) is None
    tier.step()
    assert not tier.disk.waits("r")
    assert (tier.copies, len(tier.disk), tier.disk.get(b"a")) == (copies, 0, None)
    tier.put(b"c", b"d")
    assert tier.step() == ([b"c"], [])


def test_a_full_disk_loses_the_block_of_least_value_and_none_that_is_read() -> None:
    tier = Tier(memory=1, disk=2)
    tier.put(b"a", b"b", b"c")
    tier.step()
    assert tier.disk.read("r", [b"a"], [])  # `c` leaves for it, and `b` for `c`
    assert tier.disk.get(b"b") is None
    assert (tier.disk.stats().evicted_blocks, tier.at(b"a", b"b", b"c")) == (1, [1, 0, 1])


def test_blocks_beyond_what_may_be_queued_are_dropped() -> None:
    tier = Tier(memory=1, disk=9, queued=2)
    tier.put(b"a", b"b", b"c", b"d")
    assert (tier.disk.stats().dropped_blocks, tier.at(b"c")) == (1, [0])
    assert tier.step()[0] == [b"a", b"b"]
    tier.put(b"e", b"f")
    assert tier.step()[0] == [b"d", b"e"]
    tier.disk.store(held_in(tier.memory, b"f"), copied=False)  # its content never came to the memory
    assert tier.disk.stats().dropped_blocks == 2


def test_a_fault_switches_the_tier_off_and_no_request_waits_any_more() -> None:
    tier = Tier(memory=2, disk=4)
    tier.put(b"a", b"b", b"c", b"d")
    tier.step()
    assert tier.disk.read("r", [b"a", b"b"], [])
    tier.step(lost=[b"a", b"b"], fault="the disk is full")
    assert not tier.disk.waits("r")
    assert (len(tier.disk), tier.disk.stats().fault, tier.disk.may_read("s")) == (0, "the disk is full", False)
    assert tier.at(b"a", b"b") == [0, 0]
    tier.put(b"e", b"f", b"g")
    assert tier.step() == ([], [])


@pytest.mark.parametrize("ends", [False, True])
def test_reads_without_progress_switch_the_tier_off(ends: bool) -> None:
    tier = Tier(memory=1, disk=4)
    tier.put(b"a", b"b")
    tier.step()
    tier.now = 50.0
    assert tier.disk.read("r", [b"a"], [])
    tier.now = 59.0
    assert tier.disk.waits("r")
    tier.now = 61.0
    if ends:
        tier.step()
    assert not tier.disk.waits("r")
    assert bool(tier.disk.stats().fault) is not ends
    if not ends:
        assert tier.memory.put(b"c", None, 0) is None  # a rank may still write to the slot
        tier.step()
    tier.disk.forget("r")
    assert tier.memory.put(b"c", None, 0) is not None
