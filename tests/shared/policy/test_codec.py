"""The codec of a transfer: raw unless that delays a token, then the finest that does not, of those that are allowed."""

import msgspec
import pytest

from shared.domain.instance import InstanceInfo, InstanceLoad, InstanceState, InstanceView, Role
from shared.domain.job import JobView, Slo
from shared.domain.kv import Codec
from shared.domain.rates import CodecRate, LinkRate, Rates, StepForm, StepRates
from shared.policy.codec import allowed, choose_codec, moves_s
from tests.services.fake_worker import make_info

TOKENS = 1000
KV = TOKENS * make_info("p", "").kv_bytes_per_token
STEPS = StepRates(StepForm(0.0, 0.001), StepForm(0.01), StepForm(0.01))


def sender(**rates: object) -> InstanceInfo:
    return make_info("p", "", rates=Rates(step=STEPS, **rates))  # type: ignore[arg-type]


def receiver(raw_s: float, inbound_s: float = 0.0, **link: object) -> InstanceView:
    """Over whose link all of the KV takes `raw_s`, after what is on its way in `inbound_s`."""
    rate = LinkRate(KV / raw_s, **link)  # type: ignore[arg-type]
    info = make_info("d", "", rates=Rates(link=rate))
    return InstanceView(
        info, Role.DECODE, InstanceState.READY, InstanceLoad(inbound_bytes=round(inbound_s * KV / raw_s))
    )


def chosen(coarsest: Codec, to: InstanceView, left: int = 0, part: int = TOKENS, **rates: object) -> Codec:
    job = JobView("j", TOKENS, 100, Slo("c", 2.0, 0.1, lossy_kv=coarsest))
    choice = choose_codec(job, part, left, sender(**rates), to)
    assert choice.moves_s == pytest.approx(moves_s(choice.codec, KV * part / TOKENS, sender(**rates), to.info))
    return choice.codec


def test_exact_classes_get_raw_kv_however_slow_the_link() -> None:
    assert chosen(Codec.RAW, receiver(100.0)) is Codec.RAW
    assert allowed(Codec.RAW) == ()


@pytest.mark.parametrize(
    ("raw_s", "coarsest", "want"),
    [
        (0.09, Codec.INT4, Codec.RAW),  # within one token's time
        (0.15, Codec.INT4, Codec.INT8),  # 8.75 of 16 bits: 0.082 s
        (0.19, Codec.INT4, Codec.FP8),  # int8 0.104, fp8 0.095 s
        (0.30, Codec.INT4, Codec.INT4),  # 0.089 s
        (0.30, Codec.INT8, Codec.INT8),  # late, and less so than raw
        (9.00, Codec.FP8, Codec.FP8),  # the quickest where all are late
    ],
)
def test_the_finest_that_is_in_time(raw_s: float, coarsest: Codec, want: Codec) -> None:
    assert chosen(coarsest, receiver(raw_s)) is want


def test_what_is_still_to_be_computed_is_time_to_spare() -> None:
    assert chosen(Codec.INT8, receiver(0.4)) is Codec.INT8
    assert chosen(Codec.INT8, receiver(0.4), left=500) is Codec.RAW  # 0.5 s


def test_what_is_on_its_way_already_is_in_the_way() -> None:
    assert chosen(Codec.INT8, receiver(0.08)) is Codec.RAW
    assert chosen(Codec.INT8, receiver(0.08, inbound_s=1.0)) is Codec.INT8


def test_a_part_of_a_prompt_may_be_late_by_a_tenth_of_the_first_token_s_target() -> None:
    assert chosen(Codec.INT8, receiver(0.38), part=500) is Codec.RAW  # 0.19 of 0.2 s
    assert chosen(Codec.INT8, receiver(0.42), part=500) is Codec.INT8


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_codec_that_costs_more_than_it_saves_is_not_taken(side: str) -> None:
    slow = CodecRate(KV / 0.9, KV / 0.1) if side == "sender" else CodecRate(KV / 0.1, KV / 0.9)
    to = receiver(1.0)
    if side == "sender":
        assert chosen(Codec.INT8, to, codecs={"int8": slow}) is Codec.RAW
    else:
        info = msgspec.structs.replace(to.info, rates=msgspec.structs.replace(to.info.rates, codecs={"int8": slow}))
        assert chosen(Codec.INT8, msgspec.structs.replace(to, info=info)) is Codec.RAW


def test_what_was_seen_on_the_way_counts_more_than_what_was_computed() -> None:
    assert chosen(Codec.INT8, receiver(1.0)) is Codec.INT8
    assert chosen(Codec.INT8, receiver(1.0, coded={"int8": KV / 0.95})) is Codec.RAW
    assert chosen(Codec.INT8, receiver(1.0, coded={"int8": KV / 0.3, "int8 p": KV / 0.95})) is Codec.RAW


def test_the_slower_of_both_ports_counts_and_slow_senders_are_known() -> None:
    fast = receiver(0.01)
    assert chosen(Codec.INT8, fast) is Codec.RAW
    assert chosen(Codec.INT8, fast, link=LinkRate(KV / 1.0)) is Codec.INT8
    assert chosen(Codec.INT8, receiver(0.01, slow={"p": KV / 1.0})) is Codec.INT8


def test_a_link_that_nobody_measured_is_taken_to_be_fast() -> None:
    view = InstanceView(make_info("d", ""), Role.DECODE, InstanceState.READY)
    assert chosen(Codec.INT4, view) is Codec.RAW


def test_the_reason_names_its_figures_and_there_is_none_without_a_choice() -> None:
    job = JobView("j", TOKENS, 100, Slo("c", 2.0, 0.1, lossy_kv=Codec.INT8))
    reason = choose_codec(job, TOKENS, 0, sender(), receiver(1.0)).reason
    assert reason is not None
    assert reason.what == "codec:int8"
    assert reason.figures["raw_s"] == pytest.approx(1.0)
    assert reason.figures["takes_s"] == pytest.approx(8.75 / 16, abs=1e-5)
    exact = msgspec.structs.replace(job, slo=Slo())
    assert choose_codec(exact, TOKENS, 0, sender(), receiver(1.0)).reason is None
