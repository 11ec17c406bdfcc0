"""What is sent to the pair: conversations, scaled so that computing dominates; and what clients saw of them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random

import numpy as np

from lab.calibrate.traffic import Sample, Shot
from lab.papers.lengths import CONVERSATION
from lab.simulate.workloads import WorkloadOptions, make_workload
from shared.sim.traces import read_trace
from shared.sim.workload import Workload, poisson

# A 48-million-parameter model on a core is to conversations of a third of the prompt and a quarter of the answer about
# what an accelerator is to whole ones with a model of billions.
PROMPT_PART, OUTPUT_PART = 3, 4
SHORTEST, LONGEST = 40, 2400  # prompt tokens of the trace's requests that are taken
FEWEST_PROMPT, FEWEST_OUTPUT = 16, 4
SEED = 11


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and when they arrive. share: of data-parallel's throughput; 0: all at once."""

    label: str
    share: float
    workload: Workload

    @property
    def shots(self) -> list[Shot]:
        """To be sent."""
        work = self.workload
        rows = zip(work.prompt_tokens, work.output_tokens, work.arrival_s, strict=True)
        return [Shot(int(prompt), int(output), float(at)) for prompt, output, at in rows]


@dataclass(frozen=True, slots=True)
class Seen:
    """Figures of one replay: seconds, and requests a second from the first arrival to the last token."""

    requests_per_s: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tbt_p50_s: float
    tbt_p99_s: float
    tpot_mean_s: float
    jct_mean_s: float
    longest_gap_p90_s: float  # of the requests' longest gaps
    longest_gap_max_s: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Seen":
        """As clients saw it."""
        ttft = [sample.ttft_s for sample in samples]
        gaps = [gap for sample in samples for gap in sample.gaps_s]
        longest = [gap_s for sample in samples if (gap_s := sample.longest_gap_s) is not None]
        tpot = [value for sample in samples if (value := sample.tpot_s) is not None]
        took_s = max(s.sent_s + s.jct_s for s in samples) - min(s.sent_s for s in samples)
        return cls(
            len(samples) / took_s,
            float(np.mean(ttft)),
            *_percentiles(ttft),
            *_percentiles(gaps),
            float(np.mean(tpot)),
            float(np.mean([sample.jct_s for sample in samples])),
            float(np.percentile(longest, 90)) if longest else 0.0,
            max(longest, default=0.0),
        )


METRICS = tuple(field.name for field in fields(Seen))


def conversations(data: Path, seed: int = SEED) -> Workload:
    """Lengths to draw from: of the public trace under `data`, or made like them where it is not there."""
    path = data / CONVERSATION
    table = read_trace(path) if path.is_file() else make_workload(WorkloadOptions("azure-conv", 5000, seed=seed))
    taken = (table.prompt_tokens > SHORTEST) & (table.prompt_tokens < LONGEST)
    prompts = np.maximum(FEWEST_PROMPT, table.prompt_tokens[taken] // PROMPT_PART)
    outputs = np.maximum(FEWEST_OUTPUT, table.output_tokens[taken] // OUTPUT_PART)
    return Workload(table.name, np.zeros(len(prompts)), prompts, outputs)


def drawn(lengths: Workload, requests: int, seed: int) -> Workload:
    """So many of them, all at once."""
    rows = Random(seed).sample(range(len(lengths)), min(requests, len(lengths)))
    prompts, outputs = lengths.prompt_tokens[rows], lengths.output_tokens[rows]
    return Workload(lengths.name, np.zeros(len(rows)), prompts, outputs)


def burst(lengths: Workload, requests: int, seed: int) -> Load:
    """All at once."""
    return Load("burst", 0.0, drawn(lengths, requests, seed))


def replay(lengths: Workload, share: float, rate: float, lasts_s: float, seed: int) -> Load:
    """A Poisson process for some `lasts_s`."""
    some = drawn(lengths, max(2, round(rate * lasts_s)), seed)
    found = poisson(some, rate, seed + 1)
    return Load(
        f"at_{round(100 * share)}_percent", share, replace(found, arrival_s=found.arrival_s - found.arrival_s[0])
    )


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    found = np.percentile(values, (50, 99)) if values else (0.0, 0.0)
    return float(found[0]), float(found[1])
