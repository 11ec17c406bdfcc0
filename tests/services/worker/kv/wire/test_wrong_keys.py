"""Who has other keys, half of them, or none, gets nothing and disturbs nobody."""

import time

import pytest
import torch
import zmq

from services.worker.kv.wire.importing import PullLimits
from tests.services.worker.kv.rig import Rig, model_kv, stage
from tests.services.worker.kv.wire.hostile import assert_serves

LIMITS = PullLimits(connect_timeout_s=1.0)
SOON_S = 6.0
Pair = tuple[str, str] | None


def pair() -> tuple[str, str]:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return public, secret


OURS, OTHERS = pair(), pair()


@pytest.mark.parametrize(
    ("exporters", "importers", "why"),
    [
        pytest.param(OURS, OTHERS, "CERTIFICATE", id="other keys"),
        pytest.param(OURS, None, "keys", id="an importer without keys"),
        pytest.param(None, OURS, "", id="an exporter without keys"),
    ],
)
def test_wrong_keys_are_refused(rig: Rig, exporters: Pair, importers: Pair, why: str) -> None:
    _refused(rig, exporters, importers, why)


@pytest.mark.parametrize("rig", ["kv"], indirect=True)
def test_the_public_key_alone_is_not_enough(rig: Rig) -> None:
    _refused(rig, OURS, (OURS[0], OTHERS[1]), "CERTIFICATE")


def _refused(rig: Rig, exporters: Pair, importers: Pair, why: str) -> None:
    exporter, importer = rig.endpoint(curve=exporters), rig.endpoint(curve=importers, limits=LIMITS)
    stage(exporter, model_kv(40))
    began = time.monotonic()
    got = rig.load(importer, rig.handle([exporter], 40))
    result = rig.result()
    assert time.monotonic() - began < SOON_S
    assert result.error.startswith("unreachable")
    assert why in result.error
    assert not got.writes
    assert exporter.server_counters.sent_bytes == 0
    assert exporter.stats().serving == 0
    if exporters is None:
        assert_serves(rig, exporter)


def test_wrong_keys_disturb_nobody(rig: Rig) -> None:
    exporter, stranger, friend = rig.endpoint(curve=OURS), rig.endpoint(curve=OTHERS), rig.endpoint(curve=OURS)
    kv = model_kv(40)
    stage(exporter, kv)
    rig.load(stranger, rig.handle([exporter], 40, "never"), timeout_s=1.0)
    got = rig.load(friend, rig.handle([exporter], 40))
    results = {result.transfer_id: result.ok for result in (rig.result(), rig.result())}
    assert results == {"never": False, "t": True}
    assert torch.equal(got.kv, kv)
