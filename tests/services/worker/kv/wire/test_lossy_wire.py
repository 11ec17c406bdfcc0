"""Messages that do not arrive, or cannot be read: an import goes on or ends soon, it does not wait to be given up."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from services.worker.kv.wire.importing import PullLimits
from services.worker.kv.wire.protocol import Credit, Frame, Pull
from tests.services.worker.kv.rig import Rig, model_kv, stage
from tests.services.worker.kv.wire.proxy import Proxy, meant

Lose = Callable[[object], bool]
Garble = Callable[[bytes], bytes] | None
STALL_S = 20.0
SOON_S = 5.0  # of a machine that has little time
LIMITS = PullLimits(stall_s=STALL_S, window_bytes=20_000)
TOKENS = 600
NAME = "transfer"


@contextmanager
def relay(target: str, lose: Lose, garble: Garble = None) -> Iterator[str]:
    """An address before `target` that loses, or garbles, the first message that `lose` picks."""
    lost = threading.Event()

    def edit(importers: bool, parts: list[bytes]) -> list[bytes] | None:
        if not parts or lost.is_set() or not lose(meant(importers, parts[0])):
            return parts
        lost.set()
        return [garble(parts[0]), *parts[1:]] if garble else None

    with Proxy(target, edit) as proxy:
        yield proxy.address
        assert lost.is_set(), "nothing was lost: the test shows nothing"


def unreadable(message: bytes) -> bytes:
    return b"\xff\xff"


def of_another(message: bytes) -> bytes:
    """One flipped bit in the transfer's name: it reads as well as before."""
    assert message.count(NAME.encode()) == 1
    return message.replace(NAME.encode(), NAME.replace("e", "d").encode())


def last_frame(message: object) -> bool:
    return isinstance(message, Frame) and message.token_end == TOKENS and message.layer_end == message.layers


@pytest.mark.parametrize(
    ("lose", "garble", "ok"),
    [
        pytest.param(lambda m: isinstance(m, Credit), None, True, id="a grant"),
        pytest.param(lambda m: isinstance(m, Credit), unreadable, True, id="a garbled grant"),
        pytest.param(lambda m: isinstance(m, Pull), None, False, id="a pull"),
        pytest.param(lambda m: isinstance(m, Pull), unreadable, False, id="a garbled pull"),
        pytest.param(lambda m: isinstance(m, Pull), of_another, False, id="a pull that names another transfer"),
        pytest.param(lambda m: isinstance(m, Frame), None, False, id="a frame"),
        pytest.param(last_frame, None, False, id="the last frame"),
        pytest.param(last_frame, unreadable, False, id="a garbled last frame"),
    ],
)
def test_what_is_lost_holds_nobody_up(rig: Rig, lose: Lose, garble: Garble, ok: bool) -> None:
    exporter, importer, kv = rig.endpoint(), rig.endpoint(limits=LIMITS), model_kv(TOKENS)
    for first in range(0, TOKENS, 60):  # a frame each
        stage(exporter, kv, NAME, start=first, end=first + 60)
    with relay(exporter.address, lose, garble) as address:
        began = time.monotonic()
        got = rig.load(importer, rig.handle([exporter], TOKENS, NAME, endpoints=(address,)), timeout_s=60.0)
        result = rig.result()
        took_s = time.monotonic() - began
    assert result.ok == ok
    assert took_s < SOON_S < STALL_S
    if ok:
        assert torch.equal(got.kv, kv)
