"""The codec of a transfer: raw unless that delays a token, then the finest that does not, of those that are allowed."""

from typing import Any

import msgspec
import pytest

from shared.domain.instance import InstanceInfo, InstanceLoad, InstanceState, InstanceView, KvComponent, KvKind, Role
from shared.domain.job import JobView, Slo
from shared.domain.kv import Codec
from shared.domain.rates import CodecRate, LinkRate, Rates, StepForm, StepRates
from shared.policy.codec import choose_codec, moves_s
from tests.services.fake_worker import make_info

TOKENS = 1000
KV = TOKENS * make_info("p", "").kv_bytes_per_token
STEPS = StepRates(StepForm(0.0, 0.001), StepForm(0.01), StepForm(0.01))
RAW, INT8, FP8, INT4 = Codec.RAW, Codec.INT8, Codec.FP8, Codec.INT4
SLOW_ENCODE, SLOW_DECODE = CodecRate(KV / 0.9, KV / 0.1), CodecRate(KV / 0.1, KV / 0.9)


def sender(**rates: Any) -> InstanceInfo:
    return make_info("p", "", rates=Rates(step=STEPS, **rates))


def receiver(raw_s: float, inbound_s: float = 0.0, codecs: dict[str, Any] | None = None, **link: Any) -> InstanceView:
    """Over whose link all of the KV takes `raw_s`, after what is on its way in `inbound_s`."""
    info = make_info("d", "", rates=Rates(link=LinkRate(KV / raw_s, **link), codecs=codecs or {}))
    load = InstanceLoad(inbound_bytes=round(inbound_s * KV / raw_s))
    return InstanceView(info, Role.DECODE, InstanceState.READY, load)


@pytest.mark.parametrize(
    ("coarsest", "to", "how", "want"),
    [
        (RAW, receiver(100.0), {}, RAW),  # an exact class
        (INT4, receiver(0.09), {}, RAW),  # within one token's time
        (INT4, receiver(0.15), {}, INT8),  # 8.75 of 16 bits: 0.082 s
        (INT4, receiver(0.19), {}, FP8),  # int8 0.104, fp8 0.095 s
        (INT4, receiver(0.30), {}, INT4),  # 0.089 s
        (INT8, receiver(0.30), {}, INT8),  # late, and less so than raw
        (FP8, receiver(9.00), {}, FP8),  # the quickest where all are late
        (INT8, receiver(0.4), {}, INT8),
        (INT8, receiver(0.4), {"left": 500}, RAW),  # 0.5 s are still to be computed
        (INT8, receiver(0.08), {}, RAW),
        (INT8, receiver(0.08, inbound_s=1.0), {}, INT8),  # behind other transfers
        (INT8, receiver(0.38), {"part": 500}, RAW),  # a part may be late by a tenth of the TTFT target: 0.19 of 0.2 s
        (INT8, receiver(0.42), {"part": 500}, INT8),
        (INT8, receiver(1.0), {"codecs": {"int8": SLOW_ENCODE}}, RAW),  # it costs more than it saves
        (INT8, receiver(1.0, codecs={"int8": SLOW_DECODE}), {}, RAW),
        (INT8, receiver(1.0, coded={"int8": KV / 0.95}), {}, RAW),  # measured transfers count more than bits
        (INT8, receiver(1.0, coded={"int8": KV / 0.3, "int8 p": KV / 0.95}), {}, RAW),
        (INT8, receiver(0.01), {}, RAW),
        (INT8, receiver(0.01), {"link": LinkRate(KV / 1.0)}, INT8),  # the slower of both ports
        (INT8, receiver(0.01, slow={"p": KV / 1.0}), {}, INT8),  # a slow sender
        (INT4, InstanceView(make_info("d", ""), Role.DECODE, InstanceState.READY), {}, RAW),  # no link was measured
    ],
)
def test_the_finest_that_is_in_time(coarsest: Codec, to: InstanceView, how: dict[str, Any], want: Codec) -> None:
    part, left = how.pop("part", TOKENS), how.pop("left", 0)
    job = JobView("j", TOKENS, 100, Slo("c", 2.0, 0.1, lossy_kv=coarsest))
    choice = choose_codec(job, part, left, sender(**how), to)
    assert choice.codec is want
    assert choice.moves_s == pytest.approx(moves_s(want, KV * part / TOKENS, sender(**how), to.info))


def test_the_reason_names_its_figures_and_there_is_none_without_a_choice() -> None:
    job = JobView("j", TOKENS, 100, Slo("c", 2.0, 0.1, lossy_kv=INT8))
    reason = choose_codec(job, TOKENS, 0, sender(), receiver(1.0)).reason
    assert reason is not None
    assert (reason.what, reason.figures["raw_s"]) == ("codec:int8", pytest.approx(1.0))
    assert reason.figures["takes_s"] == pytest.approx(8.75 / 16, abs=1e-5)
    assert choose_codec(msgspec.structs.replace(job, slo=Slo()), TOKENS, 0, sender(), receiver(1.0)).reason is None


def test_kv_that_has_no_codec_is_sent_as_it_is() -> None:
    window = KvComponent(KvKind.HEADS, (0,), 2, 8, 64, window=127)
    latent = KvComponent(KvKind.LATENT, (1,), 1, 1, 576)
    job = JobView("j", TOKENS, 100, slo=Slo(lossy_kv=INT4))
    for components, want in (((window,), INT4), ((window, latent), RAW)):
        fits = sender().compatibility
        geometry = msgspec.structs.replace(fits.geometry, components=components)
        info = msgspec.structs.replace(sender(), compatibility=msgspec.structs.replace(fits, geometry=geometry))
        slow = InstanceView(
            make_info("d", "", rates=Rates(link=LinkRate(TOKENS * info.kv_bytes_per_token / 9.0))),
            Role.DECODE,
            InstanceState.READY,
        )
        assert choose_codec(job, TOKENS, 0, info, slow).codec is want
