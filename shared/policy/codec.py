"""The codec of a KV transfer: raw where the link is fast enough, smaller where raw KV would delay a token, and at most
as coarse as the job's class allows.
"""

from typing import NamedTuple

from shared.domain.instance import InstanceInfo, InstanceView
from shared.domain.job import JobView
from shared.domain.kv import Codec, wire_share
from shared.domain.rates import UNKNOWN_STEPS
from shared.domain.route import Reason

BY_LOSS = (Codec.INT8, Codec.FP8, Codec.INT4)  # the finest first
WORTH = 1.25  # times as fast as raw KV, that a codec has to be
LATE_PART = 0.1  # of the TTFT target


class CodecChoice(NamedTuple):
    """A codec, the duration of the transfer with it, and the reason; no reason where the class allows only raw KV."""

    codec: Codec
    moves_s: float
    reason: Reason | None = None


def moves_s(codec: Codec, kv_bytes: float, sender: InstanceInfo, receiver: InstanceInfo) -> float:
    """Seconds of a transfer of so much KV, without its wait for the link; 0 while the receiver's link is not measured.

    Earlier transfers with the codec on that way say how fast it is. Without any: frames are encoded, sent and decoded
    side by side, so that the slowest of the three counts.
    """
    link, out = receiver.rates.link, sender.rates.link
    if link is None or kv_bytes <= 0.0:
        return 0.0
    if codec.lossy and (seen := link.coded_from_s(codec, sender.instance_id)):
        return kv_bytes / seen + link.latency_s
    bytes_s = link.from_s(sender.instance_id)
    if out is not None:
        bytes_s = min(bytes_s, out.bytes_s)
    geometry = sender.compatibility.geometry
    paces = [wire_share(codec, sender.kv_element_bytes, geometry.head_dim) / bytes_s]
    if (coding := sender.rates.codecs.get(codec)) is not None:
        paces.append(1.0 / coding.encode_bytes_s)
    if (coding := receiver.rates.codecs.get(codec)) is not None:
        paces.append(1.0 / coding.decode_bytes_s)
    return kv_bytes * max(paces) + link.latency_s


def choose_codec(job: JobView, part: int, left: int, sender: InstanceInfo, receiver: InstanceView) -> CodecChoice:
    """The codec for the KV of the first `part` tokens of a prompt, of which `left` are still to be computed.

    KV of a whole prompt may be as late as a token may be, and KV of a part, for which the first token waits, by a tenth
    of the TTFT target. The finest codec that is in time is chosen; if none is, the fastest, unless it is hardly faster
    than raw KV.
    """
    slo, kv_bytes = job.slo, part * sender.kv_bytes_per_token
    raw_s = moves_s(Codec.RAW, kv_bytes, sender, receiver.info)
    if not slo.lossy_kv.lossy or not sender.compatibility.geometry.has_codecs or sender.kv_element_bytes < 2.0:
        return CodecChoice(Codec.RAW, raw_s)
    choices = BY_LOSS[: BY_LOSS.index(slo.lossy_kv) + 1]
    spare_s = (sender.rates.step or UNKNOWN_STEPS).prefill_s(left, part - left) if left > 0 else 0.0
    bearable_s = slo.tpot_s if part >= job.prompt_tokens else LATE_PART * slo.ttft_s
    link = receiver.info.rates.link
    waits_s = receiver.load.inbound_bytes / link.bytes_s if link is not None else 0.0
    left_s = spare_s + bearable_s - waits_s
    chosen, takes_s = Codec.RAW, raw_s
    if raw_s > left_s:
        times = [(moves_s(codec, kv_bytes, sender, receiver.info), at, codec) for at, codec in enumerate(choices)]
        in_time = next((one for one in times if one[0] <= left_s), min(times))
        if in_time[0] * WORTH <= raw_s:
            takes_s, _, chosen = in_time
    figures: dict[str, float | str] = {
        "kv_bytes": round(kv_bytes),
        "raw_s": round(raw_s, 5),
        "takes_s": round(takes_s, 5),
        "link_waits_s": round(waits_s, 5),
        "spare_s": round(spare_s, 5),
        "bearable_s": round(bearable_s, 5),
        "coarsest": slo.lossy_kv.value,
    }
    return CodecChoice(chosen, takes_s, Reason(f"codec:{chosen.value}", figures))
