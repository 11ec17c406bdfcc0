"""Huawei's ranking of tensor-parallel degrees, and ZTE's P:D recommendations."""

from pathlib import Path
from time import perf_counter

from lab.bench.plan_cases import NO_ITL_S
from lab.bench.plan_thunderserve import Part, aim
from lab.papers.lengths import sharegpt
from lab.papers.testbed import ACCELERATORS
from shared.cost.kinds import Workshop
from shared.cost.library import Library
from shared.cost.network import Link, Network
from shared.domain.instance import Role
from shared.domain.job import Slo
from shared.plan.group import Group
from shared.plan.group import Part as StagePart
from shared.plan.inventory import Inventory, Pool
from shared.plan.methods.papers import machine_throughputs, recommended
from shared.plan.plan import Plan, deployed
from shared.plan.problem import Problem
from shared.plan.search import Search
from shared.sim.cluster import simulate
from shared.sim.spec import EngineLimits, RunSpec, with_words
from shared.sim.workload import Workload, synthetic

# The machine and the model whose degrees Huawei ranks (5.1, Fig 4).
_MACHINE = ("V100-32-PCIe", 8, "Llama-3-8B")
_SAMPLE, _SENT = 200, 250
# ZTE's Figs 7, 8, 9 and 10: prompt, output, requests a second. The lengths of Fig 6 are not in its text.
_SCENARIOS = ((256, 256, 2.0), (1024, 1024, 3.0), (512, 1024, 3.0), (1024, 1024, 2.0))
_ZTE_SLO = Slo(ttft_s=2.0, tpot_s=0.1, itl_s=NO_ITL_S)


def case_huawei(data: Path) -> Part:
    """The estimate's order of the degrees beside the simulator's."""
    figures: dict[str, float] = {}
    sample, sent = sharegpt(data, _SAMPLE, seed=1), sharegpt(data, _SENT, seed=2)
    pairs = list(zip(sample.prompt_tokens.tolist(), sample.output_tokens.tolist(), strict=True))
    lab = Library.built_in(ACCELERATORS)
    name, count, model = _MACHINE
    search = Search(_alone(lab, name, count, model, sent), perf_counter)
    estimated = machine_throughputs(search, name, count, pairs)
    simulated = {degree: _throughput(search, degree, count, sent) for degree in estimated}
    ours, real = (sorted(by, key=lambda t: -by[t]) for by in (estimated, simulated))
    for degree in estimated:
        figures[f"huawei_t{degree}_estimated_tokens_per_s"] = estimated[degree]
        figures[f"huawei_t{degree}_simulated_tokens_per_s"] = simulated[degree]
    told = f"estimate {' > '.join(map(str, ours))}; simulated {' > '.join(map(str, real))}"
    return figures, {f"Huawei: degrees of {count} x {name}, {model}": aim("the same order", told, ours == real)}, []


def case_zte() -> Part:
    """P:D for its scenarios over its two GPUs, at the rates that it runs."""
    figures: dict[str, float] = {}
    notes = []
    lab = Library.built_in(ACCELERATORS)
    aims = {}
    for prompt, output, rate in _SCENARIOS:
        pools = tuple(
            Pool(node, lab.catalogue.get(name), 4, lab.catalogue.get(name).price_usd_hour)
            for node, name in (("a", "ZTE-GPU-A"), ("b", "ZTE-GPU-B"))
        )
        network = Network(dict.fromkeys("ab", Link(32e9, 1e-4, 0.8)), {("a", "b"): Link(25e9, efficiency=0.8)})
        workload = synthetic(500, prompt, output)
        problem = Problem(
            Inventory(pools, network), Workshop(lab, lab.geometry("Llama-2-7B")), workload, _ZTE_SLO, rate=rate
        )
        search = Search(problem, perf_counter)
        ratio = recommended(search)
        if ratio is None:
            aims[f"ZTE {prompt}+{output} at {rate:g}/s"] = aim("a ratio", "none", False)
            continue
        what, key = f"ZTE {prompt}+{output} at {rate:g}/s", f"zte_{prompt}_{output}_{rate:g}"
        figures |= {
            f"{key}_prefill": ratio.prefills,
            f"{key}_decode": ratio.decodes,
            f"{key}_requests_per_s": ratio.rate,
        }
        first, then = ratio.prefill, ratio.decode
        notes.append(
            f"{what}: {ratio.prefills}P{ratio.decodes}D, prefill on {first.accelerator} ({first.group.layout}, "
            f"{first.rate:.2f} requests/s each), decode on {then.accelerator} ({then.group.layout}, "
            f"{then.rate:.2f} each)"
        )
        aims[what] = aim(f"serves {rate:g}/s", f"{ratio.rate:.2f}", ratio.rate >= rate)
    return figures, aims, notes


def _alone(lab: Library, name: str, count: int, model: str, sent: Workload) -> Problem:
    pool = Pool("machine", lab.catalogue.get(name), count, lab.catalogue.get(name).price_usd_hour)
    link = Link(16e9, 1e-4, 0.8)
    limits = EngineLimits(batched_tokens=8192, sequences=256, prefill_first=True)
    inventory = Inventory((pool,), Network({"machine": link}))
    return Problem(inventory, Workshop(lab, lab.geometry(model)), sent, limits=limits)


def _throughput(search: Search, degree: int, count: int, sent: Workload) -> float:
    """Tokens a second of the whole machine, each of its instances with its share of all requests at once."""
    problem = search.problem
    groups = (Group(Role.DECODE, degree, (StagePart(0, problem.shop.geometry.layers),)),) * (count // degree)
    plan = Plan(groups, policies="round_robin+split=none+dispatch=random")
    instances, network = deployed(problem, plan, search.estimator.costs, search.estimator.places)
    run = with_words(RunSpec(network=network), plan.policies)
    result = simulate(sent.at_once(), instances[:1], run)
    done = result.outcomes.completed
    tokens = float((result.outcomes.prompt_tokens[done] + result.outcomes.output_tokens[done]).sum())
    return (count // degree) * tokens / result.duration_s
