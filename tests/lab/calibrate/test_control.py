"""Latencies of the services out of made requests whose every part is known."""

from collections import defaultdict

import pytest

from lab.calibrate.live import control_plane
from lab.calibrate.target import Sample, Shot
from shared.domain.kv import TransferOutcome, TransferReport
from shared.errors import Unavailable
from shared.timeline import RequestTimeline, Span, SpanRecord
from shared.wire.messages import StepRecord

GATEWAY, HOP, TOKEN, LATENCY, BYTES_S = 0.006, 0.002, 0.001, 0.003, 1e6
PREFILL_S, DECODE_S = 0.050, 0.010


class Made:
    """Requests that each have the cluster to themselves, and what the cluster recorded of them."""

    def __init__(self) -> None:
        self.timelines: dict[str, RequestTimeline] = {}
        self.steps: defaultdict[str, list[StepRecord]] = defaultdict(list)
        self.now = 1000.0

    def request(self, moved: int, outcome: TransferOutcome = TransferOutcome.PULLED, handover_s: float = HOP) -> Sample:
        name = f"r{len(self.timelines)}"
        sent = self.now = self.now + 1.0
        queued = sent + GATEWAY + HOP
        prefilled = self.step("p0", queued, PREFILL_S, ((100, 0),))
        pulled = prefilled + handover_s
        ready = pulled + LATENCY + moved / BYTES_S
        first = self.step("d0", ready, DECODE_S)
        last = self.step("d0", first, DECODE_S)
        self.timelines[name] = RequestTimeline(
            name,
            sent,
            100,
            3,
            prefilled,
            last,
            last,
            spans=[
                SpanRecord(Span.QUEUE, queued, queued, "p0"),
                SpanRecord(Span.PREFILL, queued, prefilled, "p0"),
                SpanRecord(Span.DECODE, first, last, "d0"),
            ],
            transfers=[TransferReport(outcome, 100, moved, pulled, ready)],
        )
        return Sample(name, Shot(100, 3), sent, prefilled + TOKEN - sent, last + TOKEN - sent)

    def step(self, where: str, began: float, seconds: float, prefill: tuple[tuple[int, int], ...] = ()) -> float:
        decodes = 0 if prefill else 1
        record = StepRecord(len(self.steps[where]), began + seconds, seconds, 0.0, prefill, decodes, 100 * decodes)
        self.steps[where].append(record)
        return began + seconds


def test_every_part_is_found() -> None:
    made = Made()
    samples = [made.request(moved) for moved in (1000, 5000, 9000, 13000)]
    found = control_plane(samples, samples, made.timelines, made.steps)
    assert found.hop_s == pytest.approx(HOP, rel=0.01)
    assert found.token_s == pytest.approx(TOKEN, rel=0.01)
    assert found.gateway_s == pytest.approx(GATEWAY, rel=0.01)
    assert found.link_latency_s == pytest.approx(LATENCY, rel=0.01)
    assert found.link_bytes_s == pytest.approx(BYTES_S, rel=0.01)


def test_a_handover_that_waited_for_a_core_takes_no_more_than_ttft_leaves() -> None:
    made = Made()
    samples = [made.request(moved) for moved in (1000, 5000, 9000)]
    samples.append(made.request(13000, handover_s=0.1))
    found = control_plane(samples, samples, made.timelines, made.steps)
    assert found.gateway_s + found.hop_s == pytest.approx(GATEWAY + HOP, rel=0.01)
    assert found.token_s == pytest.approx(TOKEN, rel=0.01)


def test_a_link_whose_speed_does_not_show() -> None:
    made = Made()
    samples = [made.request(4000) for _ in range(4)]
    found = control_plane(samples, samples, made.timelines, made.steps)
    assert found.link_bytes_s == 0.0
    assert found.link_latency_s == pytest.approx(LATENCY + 4000 / BYTES_S, rel=0.01)


def test_requests_that_shared_a_prefill_instance_say_nothing() -> None:
    made = Made()
    alone = [made.request(moved) for moved in (1000, 9000)]
    made.now = 2000.0
    first = made.request(1000)
    made.now = 2000.0 + PREFILL_S / 2  # overlaps
    second = made.request(1000)
    with pytest.raises(Unavailable, match="undisturbed"):
        control_plane(alone, [first, second], made.timelines, made.steps)


def test_requests_that_were_computed_again_say_nothing_of_the_link() -> None:
    made = Made()
    samples = [made.request(1000, TransferOutcome.RECOMPUTED) for _ in range(3)]
    with pytest.raises(Unavailable, match="undisturbed"):
        control_plane(samples, samples, made.timelines, made.steps)
