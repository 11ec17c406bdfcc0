"""TetriInfer, Figs 16, 18 and 19: its prefill order, decode admission and dispatch, each against the alternatives."""

from dataclasses import replace
from statistics import fmean

import numpy as np

from lab.papers.clusters import change, mean_jct_s, mean_ttft_s
from lab.papers.rows import Row, gain, order, points
from lab.papers.testbed import Testbed
from lab.papers.tetriinfer_testbed import INSTANT, PREFILL, SEEDS, TETRI, coupled, disaggregated
from lab.papers.watermark import AtopWatermark, Watermark
from shared.policy.decode_admission import DecodeAdmission, ReserveDynamic, ReserveStatic
from shared.policy.dispatch import DispatchPolicy, PowerOfTwo, RandomDispatch, Spread, WorstCase
from shared.policy.placement import LeastLoad, Policies
from shared.policy.prefill_order import Fcfs, PrefillOrder, Sjf
from shared.policy.split import FullSplit
from shared.sim.outcomes import SimResult
from shared.sim.prediction import Prediction
from shared.sim.workload import tetri

_SURE = Prediction(width_tokens=200, buckets=10, accuracy=1.0)


def scheduler_rows(testbed: Testbed) -> tuple[Row, ...]:
    """All three figures."""
    return (*_prefill_order(testbed), *_admission(testbed), *_dispatch(testbed))


def _prefill_order(testbed: Testbed) -> tuple[Row, ...]:
    """Fig 16: 128 requests of the mixed workload, all at once."""

    def ttft(policy: PrefillOrder) -> float:
        run = replace(TETRI, prefill_order=policy)
        return fmean(mean_ttft_s(disaggregated(testbed, tetri("Mixed", 128, seed), run)) for seed in SEEDS)

    def waiting(policy: PrefillOrder) -> float:
        run = replace(TETRI, prefill_order=policy)
        return fmean(_mean_wait_s(testbed, disaggregated(testbed, tetri("Mixed", 128, seed), run)) for seed in SEEDS)

    fixed = fmean(mean_ttft_s(coupled(testbed, tetri("Mixed", 128, seed))) for seed in SEEDS)
    return (
        gain(
            "chunked",
            "Fig 16",
            "chunked prefill, FCFS, against a fixed batch: mean prefill latency",
            -86.4,
            change(ttft(Fcfs()), fixed),
        ),
        gain(
            "sjf",
            "Fig 16",
            "SJF against FCFS: mean prefill waiting, window of 16",
            -7.8,
            change(waiting(Sjf(16)), waiting(Fcfs())),
        ),
        gain(
            "sjf_window",
            "Fig 16",
            "SJF: mean TTFT, window of 128 against 16",
            -46.5,
            change(ttft(Sjf(128)), ttft(Sjf(16))),
        ),
    )


def _mean_wait_s(testbed: Testbed, result: SimResult) -> float:
    """Mean time to the first token less what each prompt takes by itself."""
    model = testbed.model(PREFILL.accelerator, PREFILL.model, PREFILL.tensor_parallel)
    own = [PREFILL.slowed * model.prefill_time_s(int(tokens)) for tokens in result.outcomes.prompt_tokens]
    return mean_ttft_s(result) - fmean(own)


def _admission(testbed: Testbed) -> tuple[Row, ...]:
    """Fig 18: 256 requests, one decode instance."""

    def jct(policy: DecodeAdmission, prediction: Prediction) -> float:
        run = replace(TETRI, decode_admission=policy, prediction=prediction)
        workloads = ((seed, tetri("Mixed", 256, seed)) for seed in SEEDS)
        return fmean(
            mean_jct_s(disaggregated(testbed, one, run, prefill=INSTANT, seed=seed)) for seed, one in workloads
        )

    greedy = jct(Watermark(), _SURE)
    what = "against greedy: mean JCT"
    return (
        points(
            "rd_749",
            "Fig 18",
            f"reserve-dynamic {what}, accuracy 74.9 %",
            0.0,
            change(jct(AtopWatermark(ReserveDynamic()), TETRI.prediction or _SURE), greedy),
            5.0,
        ),
        gain(
            "rd_100",
            "Fig 18",
            f"reserve-dynamic {what}, accuracy 100 %",
            -12.0,
            change(jct(AtopWatermark(ReserveDynamic()), _SURE), greedy),
        ),
        gain(
            "rs_100",
            "Fig 18",
            f"reserve-static {what}, accuracy 100 %",
            -10.0,
            change(jct(AtopWatermark(ReserveStatic()), _SURE), greedy),
        ),
    )


def _dispatch(testbed: Testbed) -> tuple[Row, ...]:
    """Fig 19: 32 requests a decode instance, 2 to 8 of them."""
    rows = []
    for count in (2, 4, 8):
        took = {
            name: fmean(_decode_s(testbed, policy, count, seed) for seed in range(5))
            for name, policy in _DISPATCHERS.items()
        }
        ranking = sorted(took, key=lambda name: took[name])
        ours = " < ".join(f"{name} {took[name]:.1f} s" for name in ranking)
        ranking.remove("spread")  # ours, beside the paper's three
        rows.append(
            order(
                f"dispatch_{count}",
                "Fig 19",
                f"total decode time, {count} decode instances",
                "power of two is least",
                ours,
                ranking[0] == "power of two",
            )
        )
    return tuple(rows)


_DISPATCHERS: dict[str, DispatchPolicy] = {
    "power of two": PowerOfTwo(),
    "spread": Spread(),
    "random": RandomDispatch(),
    "imbalance": WorstCase(),
}


def _decode_s(testbed: Testbed, policy: DispatchPolicy, count: int, seed: int) -> float:
    """Seconds from the first token of all to the last one."""
    run = replace(TETRI, policies=Policies(LeastLoad(), FullSplit(), policy))
    result = disaggregated(testbed, tetri("Mixed", 32 * count, seed), run, prefill=INSTANT, decodes=count, seed=seed)
    return float(np.nanmax(result.outcomes.last_token_s) - np.nanmin(result.outcomes.first_token_s))
