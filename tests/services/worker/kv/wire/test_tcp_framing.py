"""Messages on a byte stream that comes and goes in pieces of any size."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.kv.wire.protocol import MAX_MESSAGE_BYTES, Buffer, Placement, Received, checksum
from services.worker.kv.wire.tcp_framing import _WRITE_BYTES, HEARTBEAT, Inbound, Outbound, WireError, prefix

LIMIT = 100_000
OWNER = object()
MESSAGES = st.lists(st.tuples(st.binary(min_size=1, max_size=50), st.binary(max_size=9000)), max_size=6)


class Pipe:
    """What is written can be read, in pieces of these sizes, over and over; 0: nothing at the moment."""

    def __init__(self, sizes: list[int], data: bytes = b"") -> None:
        self.data = bytearray(data)
        self._sizes = sizes
        self._turn = 0

    def _size(self) -> int:
        self._turn += 1
        return self._sizes[self._turn % len(self._sizes)]

    def read(self, views: list[memoryview]) -> int:
        left = wanted = min(self._size(), len(self.data))
        for view in views:
            count = min(left, len(view))
            view[:count] = self.data[:count]
            del self.data[:count]
            left -= count
        return wanted - left

    def expect(self, count: int) -> None:
        self.expected = count

    def write(self, views: list[memoryview]) -> int:
        taken = b"".join(views)[: self._size()]
        self.data += taken
        return len(taken)


def sent(messages: list[tuple[bytes, bytes]], sizes: list[int]) -> bytes:
    pipe, outbound = Pipe(sizes), Outbound()
    for header, payload in messages:
        outbound.put(header, payload or None)
        outbound.heartbeat()
    while not outbound.flush(pipe):
        pass
    assert not outbound
    return bytes(pipe.data)


def received(inbound: Inbound, data: bytes, sizes: list[int]) -> list[Received]:
    """All of it, payloads copied."""
    pipe, found = Pipe(sizes, data), []
    while True:
        message = inbound.receive(pipe)
        inbound.readable = True
        if message is None:
            if not pipe.data:
                return found
            continue
        payload = bytes(message.payload) if message.payload is not None else None
        found.append(replace(message, header=bytes(message.header), payload=payload))


SIZES = st.lists(st.integers(0, 5000), min_size=1, max_size=5).filter(any)


@settings(deadline=None, database=None)
@given(MESSAGES, SIZES, SIZES)
def test_messages_arrive_as_they_were_however_the_stream_is_cut(
    messages: list[tuple[bytes, bytes]], sends: list[int], reads: list[int]
) -> None:
    inbound = Inbound(LIMIT)
    got = received(inbound, sent(messages, sends), reads)
    assert [(each.header, each.payload or b"") for each in got] == messages
    assert all(each.checksum == each.sent_checksum == checksum(each.payload) for each in got if each.payload)
    assert inbound.heartbeats == len(messages)


@settings(deadline=None, database=None)
@given(MESSAGES, SIZES, st.integers(1, 7))
def test_payloads_go_where_they_are_wanted(messages: list[tuple[bytes, bytes]], reads: list[int], pieces: int) -> None:
    rooms: list[bytearray] = []

    def place(header: Buffer, size: int) -> Placement:
        rooms.append(bytearray(size))
        step = -(-size // pieces)
        views = [memoryview(rooms[-1])[at : at + step] for at in range(0, size, step)]
        return Placement(OWNER, views)

    got = received(Inbound(LIMIT, place), sent(messages, [1 << 20]), reads)
    assert all(each.payload is None for each in got)
    assert rooms == [payload for _, payload in messages if payload]
    sums = [checksum(room) for room in rooms]
    assert [each.checksum for each in got if each.payload_bytes] == sums
    assert [each.sent_checksum for each in got if each.payload_bytes] == sums


@settings(deadline=None, database=None)
@given(st.integers(1, 3 * _WRITE_BYTES), st.lists(st.integers(0, 600_000), min_size=1, max_size=5).filter(any))
def test_large_payloads_go_piece_by_piece_however_little_is_taken(size: int, sizes: list[int]) -> None:
    payload = bytes(range(251)) * (size // 251 + 1)
    (message,) = received(Inbound(len(payload)), sent([(b"a", payload)], sizes), sizes)
    assert message.payload == payload
    assert message.checksum == message.sent_checksum == checksum(payload)


def test_a_stream_that_gave_less_than_there_was_room_for_is_not_asked_again() -> None:
    inbound, pipe = Inbound(LIMIT), Pipe([1 << 20], sent([(b"a", b"x" * 9000)], [1 << 20]))
    asked = []
    read = pipe.read
    pipe.read = lambda views: asked.append(len(views)) or read(views)  # type: ignore[method-assign, func-returns-value]
    while inbound.receive(pipe) is None:
        pass
    before = len(asked)
    assert inbound.receive(pipe) is None
    assert len(asked) == before


def test_what_is_diverted_goes_nowhere_and_is_not_told() -> None:
    room = bytearray(6000)
    inbound = Inbound(LIMIT, lambda header, _: Placement(OWNER, [memoryview(room)]) if header == b"a" else None)
    data = sent([(b"a", b"x" * 6000), (b"b", b"y" * 10)], [1 << 20])
    pipe = Pipe([0, 3000], data)  # and then nothing for a turn
    while not any(room):
        assert inbound.receive(pipe) is None
        inbound.readable = True
    inbound.divert(object())  # somebody else
    inbound.divert(OWNER)
    before = bytes(room)
    assert 0 in before
    (message,) = received(inbound, bytes(pipe.data), [5000])
    assert (message.header, message.payload) == (b"b", b"y" * 10)
    assert room == before


def test_a_payload_that_is_kept_is_not_overwritten() -> None:
    inbound, pipe = Inbound(LIMIT), Pipe([1 << 20], sent([(b"a", b"x" * 10), (b"b", b"y" * 10)], [1 << 20]))
    first = inbound.receive(pipe)
    assert first is not None
    inbound.keep()
    assert inbound.receive(pipe) is not None
    assert first.payload == b"x" * 10


@pytest.mark.parametrize("bit", range(len(HEARTBEAT) * 8))
def test_no_flipped_bit_of_a_prefix_goes_unnoticed(bit: int) -> None:
    data = bytearray(sent([(b"header", b"payload")], [1 << 20]))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        received(Inbound(LIMIT), bytes(data), [1 << 20])


@pytest.mark.parametrize("sizes", [(MAX_MESSAGE_BYTES + 1, 0), (1, LIMIT + 1), (0, 1)])
def test_what_is_too_large_or_makes_no_sense_is_refused_before_it_comes(sizes: tuple[int, int]) -> None:
    with pytest.raises(WireError):
        received(Inbound(LIMIT), prefix(*sizes), [1 << 20])
