"""Targets of an SLO class: what stands where none is named, what meets the one for gaps, what settings refuse."""

import msgspec
import pytest
from pydantic import ValidationError

from gateway.settings import GatewaySettings, SloClass
from shared.domain.job import Slo, itl_met, job_name


@pytest.mark.parametrize(("tpot_s", "itl_s"), [(0.02, 0.25), (0.2, 0.25), (0.4, 0.5), (2.0, 2.5)])
def test_without_a_target_for_gaps_it_follows_from_the_mean(tpot_s: float, itl_s: float) -> None:
    assert Slo(tpot_s=tpot_s).itl_s == SloClass(tpot_s=tpot_s).as_slo("c").itl_s == itl_s


def test_a_class_of_an_earlier_release_has_the_default() -> None:
    old = msgspec.msgpack.encode({"name": "chat", "ttft_s": 1.0, "tpot_s": 0.8})
    assert msgspec.msgpack.decode(old, type=Slo).itl_s == 1.0
    own = Slo("chat", tpot_s=0.1, itl_s=0.4)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(own), type=Slo) == own


def test_a_slower_class_has_all_targets_slower() -> None:
    assert Slo("c", 1.0, 0.1, 2.0, itl_s=0.5).slower(4.0) == Slo("c", 4.0, 0.4, 2.0, itl_s=2.0)


@pytest.mark.parametrize(
    ("gaps", "over", "met"),
    [(0, 0, True), (1, 1, False), (99, 1, False), (100, 1, True), (199, 2, False), (200, 2, True), (1000, 11, False)],
)
def test_one_gap_in_a_hundred_may_be_longer(gaps: int, over: int, met: bool) -> None:
    assert itl_met(gaps, over) is met


def test_settings() -> None:
    named = GatewaySettings(schedulers=("a",), model="m", slo={"chat": {"tpot_s": 0.05, "itl_s": 0.1}})
    assert named.slo["chat"].as_slo("chat").itl_s == 0.1
    assert named.slo["batch"].as_slo("batch").itl_s == 1.25
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValidationError, match="itl_s"):
            SloClass(itl_s=bad)
    with pytest.raises(ValidationError, match=r"itl_s must be at least tpot_s \(0.2\), got 0.1"):
        SloClass(tpot_s=0.2, itl_s=0.1)


@pytest.mark.parametrize(
    ("request_id", "name"),
    [
        ("team-7:42", "team-7:42"),
        ("4257d51f/g6hr", "4257d51f=2Fg6hr"),
        ("a, b#17", "a=2C=20b=2317"),
        ("a\r\n\x1b[31m", "a=0D=0A=1B=5B31m"),
        ("\u00fc", "=C3=BC"),
        ("\u00fc".encode().decode("latin-1"), "=C3=BC"),
        ("\u0437", "=D0=B7"),
        ("\ud800", "=ED=A0=80"),
        ("", ""),
    ],
)
def test_a_request_id_in_the_id_of_a_job(request_id: str, name: str) -> None:
    assert job_name(request_id) == name
    assert job_name(name) == name
    assert job_name(f"x{request_id}") == f"x{name}"
