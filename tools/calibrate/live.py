"""`polyphase calibrate live`: measures a running suite under a controlled load.

The step cost of each kind of instance, and the latency that the services add, are fitted to the recorded steps and
timelines of the load.
"""

import asyncio
import datetime
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean

import numpy as np

from services.launcher.cli_common import Aim, Result
from shared.cost.library import Library
from shared.cost.rates_file import CalibratedKind, Calibration, ControlPlane, Kind, geometry_name
from shared.cost.slowdown import Floats, others_busy
from shared.cost.step import Batch
from shared.cost.step_rates import NAMES, TERMS, saturation_tokens, step_rates_of
from shared.cost.step_variants import ScaledSteps
from shared.domain.instance import Role
from shared.domain.kv import TransferOutcome
from shared.domain.rates import Rates, StepSource
from shared.errors import Unavailable
from shared.sim.measured import LiveInstance
from shared.timeline import RequestTimeline, Span, SpanRecord
from shared.wire.clients.http import WorkerAdmin
from shared.wire.messages import StepRecord
from tools.calibrate.host_watch import HostWatch
from tools.calibrate.target import Sample, Shot, Target, Traffic
from tools.fit.steps import TimedStep, fit_on_host

_PAGE = 10_000
_MAX_PROMPT = 4096  # tokens: longer prompts add little about steps
# The last phase: a load of some 20 s that keeps instances, and the cores that they share, busy for these shares of it.
_BUSY_SHARE, _CORES_SHARE = 0.4, 0.3
_PERIOD_S, _MAX_RATE = 20.0, 20.0
_MIN_REQUESTS, _MAX_REQUESTS = 24, 200
_MIN_HANDOVERS = 12
_SLACK_S = 0.002  # between an engine's record of a step and the end of its span
_UNLIMITED = 1 << 20
Steps = Mapping[str, Sequence[StepRecord]]
Timelines = Mapping[str, RequestTimeline]


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A calibration, with its instances.

    lost_steps: dropped before they were read. foreign_cores: cores that other processes of this machine used.
    """

    calibration: Calibration
    instances: tuple[LiveInstance, ...]
    lost_steps: int
    foreign_cores: float


def run_live(target: Target, out: Path, seed: int = 0) -> Result:
    """Calibrate and write the file; returns figures, aims and notes."""
    found = asyncio.run(calibrate(target, seed))
    out.write_text(found.calibration.to_yaml(), encoding="utf-8")
    return result_of(found)


async def calibrate(target: Target, seed: int = 0, library: Library | None = None) -> Calibrated:
    """Measure for about a minute, and fit. The cluster should be idle; its split policy is changed for this time.

    Raises Unavailable, NotFound, InvalidRequest or DeadlineExceeded.
    """
    library = library or Library.built_in()
    instances = await target.instances()
    traffic = await Traffic.to(target, seed)
    reader = StepReader(instances)
    async with HostWatch(target.launcher_pid) as watch:
        observed = await run_phases(target, traffic, instances, reader, _cores(instances), seed)
    samples = (*observed.alone, *observed.moderate)
    timelines = await target.timelines({sample.request_id for sample in samples})
    control = control_plane(observed.alone, observed.moderate, timelines, reader.steps)
    kinds = await asyncio.to_thread(fit_kinds, instances, reader.steps, library)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Calibrated(Calibration(date, _words(instances), control, kinds), instances, reader.lost, watch.mean_cores)


def result_of(found: Calibrated) -> Result:
    """Figures, aims and notes. The aim is an error below the roofline's on held-out steps."""
    figures: dict[str, float] = {f"{name}_ms": 1e3 * value for name, value in _latencies(found.calibration.control)}
    figures["foreign_cores"] = found.foreign_cores
    figures["link_mb_per_s"] = found.calibration.control.link_bytes_s / 1e6
    aims: dict[str, Aim] = {}
    notes = [f"{found.lost_steps} steps were dropped before they were read"] if found.lost_steps else []
    for number, one in enumerate(found.calibration.kinds):
        name = f"kind{number}"
        notes.append(f"{name}: {one.kind}: {', '.join(one.instances)}; {one.samples} steps")
        figures |= {
            f"{name}_mape_percent": one.mape_percent,
            f"{name}_naive_mape_percent": one.naive_mape_percent,
            f"{name}_bias_percent": one.bias_percent,
            f"{name}_saturation_tokens": one.saturation_tokens,
        }
        for form, terms in TERMS.items():
            cost = getattr(one.rates.step, form)
            figures |= {f"{name}_{form}_{NAMES[term]}": getattr(cost, NAMES[term]) for term in terms}
        figures |= {f"{name}_slowdown_{k}_others": value for k, value in enumerate(one.slowdown)}
        if one.kind.engine != "emulated":  # its times are the catalogue's
            better = one.mape_percent < one.naive_mape_percent
            want = f"< {one.naive_mape_percent:.3g} (the catalogue's roofline)"
            aims[f"{name}_held_out_mape_percent"] = {"want": want, "got": round(one.mape_percent, 2), "met": better}
    return {"figures": figures, "aims": aims, "notes": notes}


def _latencies(control: ControlPlane) -> list[tuple[str, float]]:
    names = ("gateway", "hop", "token", "link_latency")
    return [(name, getattr(control, f"{name}_s")) for name in names]


def _cores(instances: tuple[LiveInstance, ...]) -> int:
    """Cores that the instances share; unlimited for instances on accelerators."""
    on_cores = any(one.kind.engine == "vllm" and one.kind.accelerator == "cpu" for one in instances)
    return (os.cpu_count() or 1) if on_cores else _UNLIMITED


def _words(instances: tuple[LiveInstance, ...]) -> str:
    counts = Counter(f"{one.role.value} ({one.kind})" for one in instances)
    return "; ".join(f"{count} × {name}" for name, count in counts.items())


class StepReader:
    """Reads the recorded steps of all instances. A worker keeps its last 8,192: `read` must be called before."""

    def __init__(self, instances: Sequence[LiveInstance]) -> None:
        self._http = {one.info.instance_id: one.info.http for one in instances}
        self._next: dict[str, int] = {}
        self.steps: defaultdict[str, list[StepRecord]] = defaultdict(list)
        self.lost = 0  # steps that workers dropped before they were read

    async def skip(self) -> None:
        """Leave out the steps so far."""

        async def skip_one(name: str, url: str) -> None:
            async with WorkerAdmin(url) as worker:
                self._next[name] = (await worker.steps(limit=1)).next

        await asyncio.gather(*(skip_one(name, url) for name, url in self._http.items()))

    async def read(self) -> dict[str, list[StepRecord]]:
        """The steps since the last call, by instance; they are also added to `steps`."""

        async def read_one(name: str, url: str) -> tuple[str, list[StepRecord]]:
            async with WorkerAdmin(url) as worker:
                page = await worker.steps(self._next.get(name, 0), _PAGE)
            self._next[name] = page.next
            self.lost += page.lost
            self.steps[name] += page.steps
            return name, list(page.steps)

        return dict(await asyncio.gather(*(read_one(name, url) for name, url in self._http.items())))


@dataclass(frozen=True, slots=True)
class Observed:
    """The client's times: one request at a time, then a moderate load."""

    alone: tuple[Sample, ...]
    moderate: tuple[Sample, ...]


async def run_phases(
    target: Target, traffic: Traffic, instances: Sequence[LiveInstance], reader: StepReader, cores: int, seed: int
) -> Observed:
    """The controlled load, whose steps contain each sort of batch. Raises Unavailable when a request fails."""
    rng = Random(seed)
    prefills = sum(one.role is Role.PREFILL for one in instances)
    decodes = len(instances) - prefills
    longest = min(_MAX_PROMPT, traffic.max_model_len - 64)
    ladder = [max(8, longest * share // 64) for share in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)]
    await traffic.closed([Shot(64, 4)] * 4 * max(prefills, decodes), 2)  # connections, caches, first kernels
    await reader.skip()
    async with target.policies(split="full"):
        alone = await traffic.closed([Shot(tokens, 12) for tokens in [*ladder, *ladder[::-1]]], 1)
        await reader.read()
        await traffic.closed([Shot(rng.choice(ladder[:6]), 1) for _ in range(12 * prefills)], 3 * prefills)
        for batch in (2, 4, 8, 16):
            shots = [Shot(rng.choice(ladder[:5]), rng.randint(16, 32)) for _ in range(2 * batch * decodes)]
            await traffic.closed(shots, batch * decodes)
        await reader.read()
    async with target.policies(split="none"):
        shots = [Shot(rng.choice(ladder[:8]), rng.randint(8, 24)) for _ in range(16 * decodes)]
        await traffic.closed(shots, 4 * decodes)
        await reader.read()
    async with target.policies(split="full"):
        rate = _moderate_rate(alone, prefills, decodes, cores)
        moderate = await traffic.timed(_moderate(rng, rate, ladder))
        await reader.read()
    return Observed(tuple(alone), tuple(moderate))


def _moderate(rng: Random, rate: float, ladder: Sequence[int]) -> list[Shot]:
    """A Poisson process of about _PERIOD_S."""
    count = min(_MAX_REQUESTS, max(_MIN_REQUESTS, round(rate * _PERIOD_S)))
    at_s, shots = 0.0, []
    for _ in range(count):
        shots.append(Shot(rng.choice(ladder[:7]), rng.randint(12, 48), at_s))
        at_s += rng.expovariate(rate)
    return shots


def _moderate_rate(alone: Sequence[Sample], prefills: int, decodes: int, cores: int) -> float:
    """The rate at which instances are busy for _BUSY_SHARE of the time, and cores for _CORES_SHARE."""
    prefill_s = fmean(sample.ttft_s for sample in alone) / 2.0  # prompts of the last phase are half as long
    decode_s = 30.0 * fmean(sample.tpot_s or 0.0 for sample in alone)
    rates = (
        _BUSY_SHARE * prefills / prefill_s,
        _BUSY_SHARE * decodes / decode_s,
        _CORES_SHARE * cores / (prefill_s + decode_s),
    )
    return min(_MAX_RATE, *rates)


def control_plane(
    alone: Sequence[Sample], moderate: Sequence[Sample], timelines: Timelines, steps: Steps
) -> ControlPlane:
    """The latency that the services add to a request.

    It is the mean over requests of the moderate load that shared no step with another request; where their handovers
    are few, those of `alone` count, too. Under load services wait for cores, so that a mean describes them and a
    minimum does not.

    TTFT = gateway_s + hop_s + wait and steps of the prefill instance + token_s. The steps are known, so that the sum of
    the other parts is right; the worker's own work before and after a step counts as gateway_s. Hops are measured
    between the instances, on other requests, and are limited to the rest of TTFT. Raises Unavailable without a request
    that went undisturbed through prefill, transfer and decode.
    """
    handovers = _handovers(moderate, timelines, steps)
    if len(handovers) < _MIN_HANDOVERS:
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
    """hop_s: from the end of the prefill to the start of the transfer; transfer_s: from there to its first step."""

    hop_s: float
    wire_bytes: int
    transfer_s: float


def _handovers(samples: Sequence[Sample], timelines: Timelines, steps: Steps) -> list[_Handover]:
    """Handovers to decode instances that had no other request."""
    stays = {sample.request_id: _stay(timelines[sample.request_id]) for sample in samples}
    found = []
    for name, stay in stays.items():
        prefill, decode = _span(timelines[name], Span.PREFILL), _span(timelines[name], Span.DECODE)
        pulled = [one for one in timelines[name].transfers if one.outcome is TransferOutcome.PULLED and one.started_s]
        if stay is None or prefill is None or decode is None or len(pulled) != 1:
            continue
        handover = SpanRecord(Span.TRANSFER, prefill.ended_s, decode.started_s, decode.instance_id)
        if any(
            other is not None and _overlap(handover, other) for other_name, other in stays.items() if other_name != name
        ):
            continue
        first = _steps_of(steps, decode.instance_id, 0.0, decode.started_s + _SLACK_S)[-1:]
        hop_s = pulled[0].started_s - prefill.ended_s
        if first and hop_s >= 0:  # a transfer may begin while the prompt is computed
            transfer_s = decode.started_s - pulled[0].started_s - first[0].seconds
            found.append(_Handover(hop_s, pulled[0].wire_bytes, max(0.0, transfer_s)))
    return found


def _stay(timeline: RequestTimeline) -> SpanRecord | None:
    """The time for which a request keeps a decode instance busy."""
    decode = _span(timeline, Span.DECODE)
    prefill = _span(timeline, Span.PREFILL)
    if decode is None:
        return None
    ended_s = max(span.ended_s for span in timeline.spans if span.span is Span.DECODE)  # with pauses there are several
    return SpanRecord(Span.DECODE, prefill.ended_s if prefill else decode.started_s, ended_s, decode.instance_id)


def _added(samples: Sequence[Sample], timelines: Timelines, steps: Steps) -> list[tuple[float, float]]:
    """For requests that shared no prefill step: TTFT without its steps, and the time from the prefill to the client."""
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
    """Latency and bytes/s by least squares; 0 bytes/s when the time does not depend on the size."""
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


def fit_kinds(instances: Sequence[LiveInstance], steps: Steps, library: Library) -> tuple[CalibratedKind, ...]:
    """Fit each kind of instance to the steps of its instances.

    Raises NotFound (model, accelerator) or InvalidRequest (too few steps).
    """
    others = _others(instances, steps)
    groups: defaultdict[Kind, list[LiveInstance]] = defaultdict(list)
    for one in instances:
        groups[one.kind].append(one)
    return tuple(_fit(kind, group, steps, others, library) for kind, group in groups.items())


def _fit(
    kind: Kind, group: Sequence[LiveInstance], steps: Steps, others: Mapping[str, Floats], library: Library
) -> CalibratedKind:
    geometry = geometry_name(group[0].info)
    model = library.step_model(kind.accelerator, geometry, kind.tensor_parallel, kind.pipeline_parallel, kind.dtype)
    names = [one.info.instance_id for one in group]
    timed = [timed_step(step) for name in names for step in steps.get(name, ())]
    beside = np.concatenate([others[name] for name in names])
    fit = fit_on_host(model, timed, beside)
    times = ScaledSteps(model.at_speed(fit.speed), fit.scale, fit.chunk_s)
    chunk = min(one.info.chunk_size for one in group)
    return CalibratedKind(
        kind=kind,
        geometry=geometry,
        instances=tuple(names),
        samples=fit.samples,
        mape_percent=100.0 * fit.mape,
        naive_mape_percent=100.0 * fit.naive_mape,
        bias_percent=100.0 * fit.bias,
        compute_factor=fit.speed.compute,
        bandwidth_factor=fit.speed.bandwidth,
        step_s=fit.speed.step_s,
        sequence_s=fit.speed.sequence_s,
        scale=fit.scale,
        chunk_s=fit.chunk_s,
        slowdown=fit.slowdown,
        saturation_tokens=saturation_tokens(times.prefill_time_s, max_tokens=max(32, group[0].info.max_model_len)),
        rates=Rates(step_rates_of(times.step_time_s, chunk, source=StepSource.FIT)),
    )


def timed_step(step: StepRecord) -> TimedStep:
    return TimedStep(Batch(step.prefill, step.decode_count, step.decode_context_tokens), step.seconds)


def _others(instances: Sequence[LiveInstance], steps: Steps) -> dict[str, Floats]:
    """For each step of each instance, the number of other busy instances of its host."""
    found: dict[str, Floats] = {}
    for host in {one.host for one in instances}:
        names = [one.info.instance_id for one in instances if one.host == host]
        found |= others_busy({name: _interval(steps.get(name, ())) for name in names})
    return found


def _interval(steps: Sequence[StepRecord]) -> tuple[Floats, Floats]:
    ends = np.array([step.ended_s for step in steps], dtype=np.float64)
    return ends - np.array([step.seconds for step in steps], dtype=np.float64), ends
