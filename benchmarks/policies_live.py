"""`polyphase bench policies --live`: scenarios on emulated instances, beside a simulation of the same cluster file.

Three of the twelve scenarios, or scenarios of pauses. Each of the three runs at SHARE of the goodput that the simulator
finds for `adaptive`, so slowly that TOKENS_PER_S tokens a second come. Emulated engines end no answer before the length
that clients ask for, so policies know the lengths here.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.comparison import Row, goodput, of_result, of_samples, share_within
from benchmarks.experiment import Arm, Experiment, Means, Session, emulated_file, measured, model_with_context
from benchmarks.live import LivePair, Round, judged
from benchmarks.pauses import TABLE as PAUSES
from benchmarks.pauses import USUAL, pause_scenarios_live, run_pauses_live
from benchmarks.policies import named
from benchmarks.results import Result, merged
from benchmarks.scenarios import SLO, TARGET, Scenario, instances
from shared.errors import InvalidRequest
from shared.sim.cluster import simulate
from shared.sim.metrics import attainment, summary
from tools.simulate.deployment import load_deployment

SCENARIOS = (Scenario("equal", "conversation"), Scenario("fast_slow", "code"), Scenario("prefill_heavy", "mixed"))
ADAPTIVE = Arm("adaptive", "adaptive")
FIXED = Arm("fixed", "least_load+balanced+power_of_two")
TABLE = "side by side, live and simulated; milliseconds as slow as the rest"
SHARE = 0.7  # of goodput
LASTS_S = 15.0  # of arrivals, in the time of the accelerators
TOKENS_PER_S = 1_800.0
MIN_FACTOR = 3.0  # what the services add is small beside the accelerators' times, as it is in a real cluster
MIN_REQUESTS, START_PER_S, STEP = 600, 16.0, 1.02  # of the search for goodput
CONTEXT = 16384


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """scenarios: of the twelve (SCENARIOS if empty), of pauses, or `pauses` for one of each kind of those.

    runs: of each scenario of pauses under each policy.
    """

    scenarios: tuple[str, ...] = ()
    runs: int = 1


def run_policies_live(options: LiveOptions | None = None) -> Result:
    options, known = options or LiveOptions(), pause_scenarios_live()
    names = [each for name in options.scenarios for each in (USUAL if name == PAUSES else (name,))]
    others = [name for name in names if name not in known]
    try:
        slowed_ones = named(others) if others else () if names else SCENARIOS
    except InvalidRequest as error:
        raise InvalidRequest(f"{error.message}; of pauses, live: {PAUSES}, {', '.join(known)}") from error
    found = _run_slowed(slowed_ones)
    of_pauses = [known[name] for name in dict.fromkeys(names) if name in known]
    return merged(found, run_pauses_live(of_pauses, options.runs)) if of_pauses else found


def _run_slowed(scenarios: Sequence[Scenario]) -> Result:
    parts: list[Result] = []
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="polyphase-policies-") as name:
        folder = Path(name)
        model_with_context(folder / "model", CONTEXT)
        for scenario in scenarios:
            experiment = slowed(scenario, folder)
            found, more = asyncio.run(
                measured(experiment.file, lambda on, one=experiment: _compared(one, on))  # type: ignore[misc]
            )
            parts.append(found)
            rows += more
    return merged(*parts, {"tables": {TABLE: rows} if scenarios else {}})


def slowed(scenario: Scenario, folder: Path) -> Experiment:
    """The scenario as slow as this machine can serve it, with its cluster file in `folder`."""

    def served(rate: float) -> bool:
        deployment = load_deployment(cluster_into(folder, scenario, 1.0))
        workload = scenario.workload(rate, max(MIN_REQUESTS, round(LASTS_S * rate)))
        outcomes = simulate(workload, deployment.instances, ADAPTIVE.under(deployment.run)).outcomes
        return attainment(outcomes, SLO).every >= TARGET

    rate = SHARE * goodput(served, START_PER_S, STEP)
    workload = scenario.workload(rate, max(50, round(LASTS_S * rate)))
    factor = float(max(MIN_FACTOR, np.ceil(rate * float(workload.output_tokens.mean()) / TOKENS_PER_S)))
    file, arms = cluster_into(folder, scenario, factor), (ADAPTIVE, FIXED)
    return Experiment(f"live_{scenario.name}", file, lambda _: workload, arms, SLO, factor)


def cluster_into(folder: Path, scenario: Scenario, factor: float) -> Path:
    """A cluster file with the scenario's instances, `factor` times as slow."""
    entries = [
        {
            "id": one.instance_id,
            "role": one.role.value,
            "accelerator": one.accelerator,
            "chunk_size": one.limits.batched_tokens,
            "max_seqs": one.limits.sequences,
            "kv_cache_bytes": int(one.kv_tokens * one.kv_bytes_per_token),
            "emulated_link_gbps": one.link.bandwidth_bytes_s * 8e-9,
        }
        for one in instances(scenario.cluster)
    ]
    return emulated_file(
        folder,
        f"bench policies {scenario.name} {factor:g}",
        entries,
        model=str(folder / "model"),
        max_model_len=CONTEXT,
        gateway={"slo": {"default": SLO.slower(factor).targets}},
        instance_defaults={"emulated_slowdown": factor},
    )


async def _compared(one: Experiment, on: Session) -> tuple[Result, list[Row]]:
    pairs: dict[str, LivePair] = {}
    figures, rows, slo = dict[str, float](), list[Row](), one.slow_slo
    async for pair in one.pairs(on):
        label, samples, simulated = pair.arm.label, pair.live.samples, pair.simulated
        head = {"scenario": one.name.removeprefix("live_"), "policy": label}
        rows.append(of_samples({**head, "run": "live"}, samples, slo))
        rows.append(of_result({**head, "run": "simulated"}, simulated, slo))
        pairs[label] = LivePair(
            Means.from_samples(samples), Means.from_summary(summary(simulated, slo)), pair.live.foreign_cores
        )
        figures[f"{one.name}_{label}_share_live"] = round(share_within(samples, slo), 4)
        figures[f"{one.name}_{label}_share_simulated"] = round(attainment(simulated.outcomes, slo).every, 4)
    workload = one.slow_workload(1)
    figures |= {f"{one.name}_rate_per_s": workload.rate, f"{one.name}_times_as_slow": one.factor}
    note = f"{one.name}: {len(workload)} requests a run; milliseconds as slow as the rest"
    return merged(judged(one.name, one.arms, [Round((), pairs)]), {"figures": figures, "notes": [note]}), rows
