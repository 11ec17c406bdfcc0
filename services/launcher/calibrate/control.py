"""What the services add to a request, from client times, timelines and steps of the same requests."""

from collections.abc import Mapping, Sequence
from statistics import fmean, median

import numpy as np

from services.launcher.calibrate.traffic import Sample
from shared.cost.calibration import ControlPlane
from shared.domain.kv import TransferOutcome
from shared.errors import Unavailable
from shared.timeline import RequestTimeline, Span, SpanRecord
from shared.wire.steps import StepRecord

_SLACK_S = 0.002  # between an engine's note of a step and the span that ends with it
Steps = Mapping[str, Sequence[StepRecord]]
Timelines = Mapping[str, RequestTimeline]


def control_plane(
    alone: Sequence[Sample], moderate: Sequence[Sample], timelines: Timelines, steps: Steps
) -> ControlPlane:
    """Hops and transfers from requests that were alone, the rest from a moderate load, where services wait for cores.

    TTFT = gateway_s + hop_s + wait and steps of the prefill instance + token_s, of which the steps are known: so the
    sum of the three is right, and what does not show apart (a worker's own work before and after) is in gateway_s.
    Raises Unavailable when too few requests went the usual way.
    """
    hops, transfers = _handovers(alone, timelines, steps)
    added = _added(moderate, timelines, steps)
    if not hops or not added:
        raise Unavailable("no request went through prefill, transfer and decode undisturbed; is the cluster in use?")
    hop_s = median(hops)
    token_s = fmean(token for _, token in added)
    gateway_s = max(0.0, fmean(before for before, _ in added) - hop_s - token_s)
    latency_s, bytes_s = _link(transfers)
    return ControlPlane(gateway_s, hop_s, token_s, latency_s, bytes_s)


def _handovers(
    samples: Sequence[Sample], timelines: Timelines, steps: Steps
) -> tuple[list[float], list[tuple[int, float]]]:
    """Of requests that had the cluster to themselves: from the prefill's end to the start of the transfer; and of each

    transfer the bytes and the seconds until the step that needed them began.
    """
    hops, transfers = [], []
    for sample in samples:
        timeline = timelines[sample.request_id]
        prefill, decode = _span(timeline, Span.PREFILL), _span(timeline, Span.DECODE)
        pulled = [one for one in timeline.transfers if one.outcome is TransferOutcome.PULLED and one.started_s > 0]
        if prefill is None or decode is None or len(pulled) != 1:
            continue
        transfer = pulled[0]
        hop_s = transfer.started_s - prefill.ended_s
        first = _steps_of(steps, decode.instance_id, 0.0, decode.started_s + _SLACK_S)[-1:]
        if hop_s < 0 or not first:
            continue  # a transfer that began while the prompt was being computed
        hops.append(hop_s)
        transfers.append((transfer.wire_bytes, max(0.0, decode.started_s - transfer.started_s - first[0].seconds)))
    return hops, transfers


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


def _link(transfers: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Latency and bytes/s by least squares; 0 bytes/s where size makes no difference."""
    moved = np.array([size for size, _ in transfers], dtype=np.float64)
    seconds = np.array([taken for _, taken in transfers])
    if len(transfers) >= 3 and np.ptp(moved) > 0:
        slope, latency = np.polyfit(moved, seconds, 1)
        if slope > 0:
            return max(0.0, float(latency)), float(1.0 / slope)
    return float(np.median(seconds)), 0.0


def _steps_of(steps: Steps, instance_id: str, after_s: float, until_s: float) -> list[StepRecord]:
    return [step for step in steps.get(instance_id, ()) if after_s < step.ended_s <= until_s]


def _span(timeline: RequestTimeline, kind: Span) -> SpanRecord | None:
    return next((span for span in timeline.spans if span.span is kind), None)


def _overlap(one: SpanRecord, other: SpanRecord) -> bool:
    return one.instance_id == other.instance_id and one.started_s < other.ended_s and other.started_s < one.ended_s
