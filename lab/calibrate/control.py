"""What the services add to a request, from client times, timelines and steps of the same requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from lab.calibrate.traffic import Sample
from shared.cost.rates_file import ControlPlane
from shared.domain.kv import TransferOutcome
from shared.errors import Unavailable
from shared.timeline import RequestTimeline, Span, SpanRecord
from shared.wire.messages import StepRecord

_ENOUGH = 12  # handovers
_SLACK_S = 0.002  # between an engine's note of a step and the span that ends with it
Steps = Mapping[str, Sequence[StepRecord]]
Timelines = Mapping[str, RequestTimeline]


def control_plane(
    alone: Sequence[Sample], moderate: Sequence[Sample], timelines: Timelines, steps: Steps
) -> ControlPlane:
    """From requests of a moderate load that had their instances to themselves; hops and transfers also from lone ones

    while there are few of the others. Services wait for cores under load, so means count.

    TTFT = gateway_s + hop_s + wait and steps of the prefill instance + token_s, of which the steps are known: so the
    sum of the three is right, and what does not show apart (a worker's own work before and after) is in gateway_s.
    Hops are seen between the instances, of other requests: one that waited for a core there must not take more than
    all that TTFT leaves.
    Raises Unavailable when too few requests went the usual way.
    """
    handovers = _handovers(moderate, timelines, steps)
    if len(handovers) < _ENOUGH:
        handovers += _handovers(alone, timelines, steps)
    added = _added(moderate, timelines, steps)
    if not handovers or not added:
        raise Unavailable("no request went through prefill, transfer and decode undisturbed; is the cluster in use?")
    token_s = fmean(token for _, token in added)
    before_s = max(0.0, fmean(before for before, _ in added) - token_s)
    hop_s = min(fmean(one.hop_s for one in handovers), before_s)
    latency_s, bytes_s = _link(handovers)
    return ControlPlane(before_s - hop_s, hop_s, token_s, latency_s, bytes_s)


@dataclass(frozen=True, slots=True)
class _Handover:
    """From the prefill's end to the start of the transfer; the bytes, and from then to the step that needed them."""

    hop_s: float
    wire_bytes: int
    transfer_s: float


def _handovers(samples: Sequence[Sample], timelines: Timelines, steps: Steps) -> list[_Handover]:
    """Of requests whose decode instance had no other to step when they came."""
    stays = {sample.request_id: _stay(timelines[sample.request_id]) for sample in samples}
    found = []
    for name, stay in stays.items():
        prefill, decode = _span(timelines[name], Span.PREFILL), _span(timelines[name], Span.DECODE)
        pulled = [one for one in timelines[name].transfers if one.outcome is TransferOutcome.PULLED and one.started_s]
        if stay is None or prefill is None or decode is None or len(pulled) != 1:
            continue
        coming = SpanRecord(Span.TRANSFER, prefill.ended_s, decode.started_s, decode.instance_id)
        if any(other is not None and _overlap(coming, other) for them, other in stays.items() if them != name):
            continue
        first = _steps_of(steps, decode.instance_id, 0.0, decode.started_s + _SLACK_S)[-1:]
        hop_s = pulled[0].started_s - prefill.ended_s
        if first and hop_s >= 0:  # else the transfer began while the prompt was being computed
            transfer_s = decode.started_s - pulled[0].started_s - first[0].seconds
            found.append(_Handover(hop_s, pulled[0].wire_bytes, max(0.0, transfer_s)))
    return found


def _stay(timeline: RequestTimeline) -> SpanRecord | None:
    """The time that a request keeps a decode instance busy."""
    decode = _span(timeline, Span.DECODE)
    prefill = _span(timeline, Span.PREFILL)
    if decode is None:
        return None
    ended_s = max(span.ended_s for span in timeline.spans if span.span is Span.DECODE)  # pauses may come between
    return SpanRecord(Span.DECODE, prefill.ended_s if prefill else decode.started_s, ended_s, decode.instance_id)


def _added(samples: Sequence[Sample], timelines: Timelines, steps: Steps) -> list[tuple[float, float]]:
    """Of requests that shared no prefill step: TTFT less those steps; and from the prefill's end to the client."""
    spans = {sample.request_id: _span(timelines[sample.request_id], Span.PREFILL) for sample in samples}
    found = []
    for sample in samples:
        mine = spans[sample.request_id]
        others = (span for name, span in spans.items() if name != sample.request_id)
        if mine is None or any(span is not None and _overlap(mine, span) for span in others):
            continue
        taken = _steps_of(steps, mine.instance_id, mine.started_s, mine.ended_s + _SLACK_S)
        first_s = sample.sent_s + sample.ttft_s
        found.append((sample.ttft_s - sum(step.seconds for step in taken), max(0.0, first_s - mine.ended_s)))
    return found


def _link(handovers: Sequence[_Handover]) -> tuple[float, float]:
    """Latency and bytes/s by least squares; 0 bytes/s where size makes no difference."""
    moved = np.array([one.wire_bytes for one in handovers], dtype=np.float64)
    seconds = np.array([one.transfer_s for one in handovers])
    if len(handovers) >= 3 and np.ptp(moved) > 0:
        slope, latency = np.polyfit(moved, seconds, 1)
        if slope > 0 and latency >= 0:
            return float(latency), float(1.0 / slope)
    return float(seconds.mean()), 0.0


def _steps_of(steps: Steps, instance_id: str, after_s: float, until_s: float) -> list[StepRecord]:
    return [step for step in steps.get(instance_id, ()) if after_s < step.ended_s <= until_s]


def _span(timeline: RequestTimeline, kind: Span) -> SpanRecord | None:
    return next((span for span in timeline.spans if span.span is kind), None)


def _overlap(one: SpanRecord, other: SpanRecord) -> bool:
    return one.instance_id == other.instance_id and one.started_s < other.ended_s and other.started_s < one.ended_s
