"""Latencies of the services out of made requests whose every part is known."""

from collections import defaultdict
from itertools import pairwise
from random import Random

import pytest

from shared.cost.library import Library
from shared.cost.step import Batch
from shared.domain.instance import Compatibility, InstanceInfo, KvGeometry, Role
from shared.domain.kv import TransferOutcome, TransferReport
from shared.domain.rates import StepSource
from shared.errors import InvalidRequest, Unavailable
from shared.sim.measured import LiveInstance
from shared.timeline import RequestTimeline, Span, SpanRecord
from shared.wire.messages import StepRecord
from tools.calibrate.live import _moderate, _moderate_rate, control_plane, fit_kinds
from tools.calibrate.target import Sample, Shot

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


LIBRARY = Library.built_in()


def live(name: str, accelerator: str, threads: int = 1) -> LiveInstance:
    compatibility = Compatibility("abc", "vllm", "1", 2, KvGeometry(32, 8, 128))
    info = InstanceInfo(
        instance_id=name,
        generation=1,
        model="Llama-3-8B",
        compatibility=compatibility,
        accelerator=accelerator,
        dtype="bfloat16",
        tensor_parallel=1,
        block_size=16,
        total_blocks=5000,
        max_model_len=4096,
        chunk_size=512,
        rpc="tcp://h:1",
        http="http://h:2",
        kv_endpoints=(),
    )
    return LiveInstance(info, Role.DECODE, "h", threads)


def steps(accelerator: str, slower: float, seed: int) -> list[StepRecord]:
    """Steps of the catalogue's accelerator, all times `slower`."""
    model, rng, now, found = LIBRARY.step_model(accelerator, "Llama-3-8B", dtype="bfloat16"), Random(seed), 1000.0, []
    for number in range(400):
        decodes = rng.randint(0, 12)
        chunks = ((rng.randint(8, 512), 0),) if rng.random() < 0.4 or not decodes else ()
        batch = Batch(chunks, decodes, decodes * rng.randint(50, 800))
        seconds = slower * model.step_time_s(batch)
        now += seconds + 0.001
        found.append(StepRecord(number, now, seconds, 0.0, chunks, decodes, batch.decode_context_tokens))
    return found


def test_each_kind_is_fitted_from_all_of_its_instances() -> None:
    instances = (live("a0", "A100-SXM-80"), live("b0", "A10"), live("a1", "A100-SXM-80"), live("a2", "A100-SXM-80", 2))
    recorded = {
        "a0": steps("A100-SXM-80", 2.0, 1),
        "a1": steps("A100-SXM-80", 2.0, 2),
        "a2": steps("A100-SXM-80", 4.0, 3),
        "b0": steps("A10", 1.5, 4),
    }
    found = {one.kind: one for one in fit_kinds(instances, recorded, LIBRARY)}
    assert {one.instances for one in found.values()} == {("a0", "a1"), ("b0",), ("a2",)}
    fast = found[instances[0].kind]
    assert fast.samples == 800
    assert fast.mape_percent < 15 < fast.naive_mape_percent
    assert fast.rates.step is not None
    assert fast.rates.step.source is StepSource.FIT
    slow = found[instances[3].kind]
    batch = Batch(((256, 0),), 4, 1600)
    ratio = slow.step_times(LIBRARY).step_time_s(batch) / fast.step_times(LIBRARY).step_time_s(batch)
    assert ratio == pytest.approx(2.0, rel=0.2)
    assert 64 <= fast.saturation_tokens <= 4096


def test_an_instance_that_did_nothing() -> None:
    with pytest.raises(InvalidRequest, match="0 timed steps are too few"):
        fit_kinds((live("a0", "A10"),), {}, LIBRARY)


def alone(ttft_s: float, tpot_s: float) -> list[Sample]:
    return [Sample("r", Shot(100, 11), 0.0, ttft_s, ttft_s + 10 * tpot_s)]


def test_a_fast_cluster_gets_more_but_not_endlessly() -> None:
    slow = _moderate_rate(alone(0.4, 0.05), 2, 2, 1000)
    assert slow == pytest.approx(0.4 * 2 / 1.5)  # decodes bind: 30 tokens of 50 ms
    assert _moderate_rate(alone(4.0, 0.01), 1, 4, 1000) == pytest.approx(0.4 / 2.0)  # prefills do
    assert _moderate_rate(alone(0.4, 0.05), 2, 2, 1) == pytest.approx(0.3 / 1.7)  # the cores do
    assert _moderate_rate(alone(1e-4, 1e-5), 8, 8, 1000) == 20.0


def test_arrivals_are_in_order_and_bounded() -> None:
    for rate in (0.1, 3.0, 20.0):
        shots = _moderate(Random(1), rate, [8, 16, 32, 64, 128, 256, 512])
        assert 24 <= len(shots) <= 400
        assert all(before.at_s <= after.at_s for before, after in pairwise(shots))
        assert max(shot.prompt_tokens for shot in shots) <= 512
