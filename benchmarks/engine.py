"""`polyphase bench engine`: prefill orders and decode admissions, changed on a real vLLM engine while it runs.

Each round sends the same requests under all policies, in rotating order: bursts of prompts of different lengths for the
orders, answers that outgrow the KV memory for the admissions. The report gives medians of rounds and counts requests
that were overtaken.
"""

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean, median

import httpx

from benchmarks.experiment import WHO, Session, measured
from benchmarks.real_engines import LlamaShape, cluster_file, make_llama
from benchmarks.results import Aim, Result, at_least, at_most, merged, progress, result, rotated
from benchmarks.suite import metric
from shared.domain.instance import Role
from shared.domain.route import PolicySpec
from shared.errors import Unavailable
from shared.policy.prefill_order import WINDOW
from tools.calibrate.host_watch import HostWatch
from tools.client import ApiClient, Ask

ENGINE = "engine"
# 26 million parameters: computing a burst of prompts takes seconds, beside which what the services add is small.
SHAPE = LlamaShape(4096, 512, 1408, 8, 8, 4, 4096)
MAX_MODEL_LEN, CHUNK, SEATS = 1024, 256, 32
KV_TOKENS, BLOCK = 4096, 32
PATIENT = "patient"
SEED = 21


def cluster_of(model: Path) -> dict[str, object]:
    """The only instance decodes, so it computes whole requests: no placement and no KV transfer is measured."""
    sizes = {"chunk_size": CHUNK, "max_seqs": SEATS, "block_size": BLOCK}
    memory = (KV_TOKENS + BLOCK) * SHAPE.kv_bytes_per_token  # a block is vLLM's own
    instances = [{"id": ENGINE, "role": Role.DECODE.value}]
    return {
        **cluster_file("engine", model, instances, MAX_MODEL_LEN, kv_cache_bytes=memory, **sizes),
        "gateway": {"dtype": "float32", "slo": {PATIENT: {"ttft_s": 30.0, "tpot_s": 1.0}}},
        "predictor": {"bucket_tokens": 32, "bucket_count": 16},
    }


# The load.

PROMPTS = (24, 48, 96, 192, 384, 768)  # tokens of a burst's prompts
BURST, BURST_OUTPUT = 36, 4
APART_S = 0.01  # between one request and the next: their order is that of the list
# Prompts and answers of the requests that outgrow the KV: the prediction of an answer rests on its prompt's length.
KINDS = (((20, 31), (34, 62)), ((64, 120), (130, 158)), ((140, 250), (290, 318)))
PRESSING = 33
_VOCABULARY = range(300, SHAPE.vocab_size)  # without special tokens


@dataclass(frozen=True, slots=True)
class Request:
    """slo: its class, "" for the default."""

    prompt: tuple[int, ...]
    output_tokens: int
    slo: str = ""


@dataclass(frozen=True, slots=True)
class Served:
    """sent_s: after the first request was sent; ttft_s, jct_s: from then on."""

    request: Request
    sent_s: float
    ttft_s: float
    jct_s: float
    tokens: tuple[int, ...]

    @property
    def first_s(self) -> float:
        return self.sent_s + self.ttft_s


def burst(seed: int) -> list[Request]:
    """As many prompts of each length, in a random order; every second request is of the patient class."""
    rng = Random(seed)
    lengths = list(PROMPTS) * (BURST // len(PROMPTS))
    rng.shuffle(lengths)
    return [
        Request(tuple(rng.choices(_VOCABULARY, k=length)), BURST_OUTPUT, ("", PATIENT)[at % 2])
        for at, length in enumerate(lengths)
    ]


def pressing(seed: int) -> list[Request]:
    """As many of each of the `KINDS`, in a random order."""
    rng = Random(seed)
    kinds = list(KINDS) * (PRESSING // len(KINDS))
    rng.shuffle(kinds)
    return [
        Request(tuple(rng.choices(_VOCABULARY, k=rng.randint(*prompt))), rng.randint(*output))
        for prompt, output in kinds
    ]


async def send(api: ApiClient, requests: Sequence[Request], label: str, at_once: int = 0) -> list[Served]:
    """One after the other, `APART_S` apart; with `at_once`, at most so many at a time. In the order of `requests`.

    label: of the run, so that no prefix cache knows a prompt of another run. Raises Unavailable when one fails.
    """
    loop = asyncio.get_running_loop()
    seats, began_s = asyncio.Semaphore(at_once or len(requests)), loop.time()

    async def send_one(at: int, request: Request) -> Served:
        await asyncio.sleep(began_s + at * APART_S - loop.time())
        async with seats:
            sent_s, name = loop.time() - began_s, f"{label}n{at}"
            ask = Ask(list(request.prompt), request.output_tokens, name, salt=name, slo=request.slo)
            answer = await api.stream(ask)
        if answer.error or len(answer.tokens) != request.output_tokens:
            got = answer.error or f"{len(answer.tokens)} of {request.output_tokens} tokens"
            raise Unavailable(f"a request failed: {got}")
        return Served(request, sent_s, answer.ttft_s or 0.0, answer.took_s, tuple(answer.tokens))

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send_one(at, request)) for at, request in enumerate(requests)]
    return [task.result() for task in tasks]


# The report.

FCFS, SJF = "fcfs", "sjf"
GREEDY, STATIC, DYNAMIC = "greedy", "reserve_static", "reserve_dynamic"
ALONE = "alone"  # a run of few requests at once, for the reference tokens
JCT_SHARE = 1.02  # of greedy's, at most


@dataclass(frozen=True, slots=True)
class Run:
    round: int
    policy: str
    served: Sequence[Served]
    preemptions: int = 0

    def mean(self, value: Callable[[Served], float]) -> float:
        return fmean(map(value, self.served))


def ttft_s(one: Served) -> float:
    return one.ttft_s


def jct_s(one: Served) -> float:
    return one.jct_s


def overtaken(served: Sequence[Served]) -> list[int]:
    """For each request, in the order of sending, how many later ones had their first token earlier."""
    return [sum(later.first_s < one.first_s for later in served[at + 1 :]) for at, one in enumerate(served)]


def different_tokens(runs: Sequence[Run]) -> list[str]:
    """Requests whose tokens are not those that they had in the round's first run of the same load."""
    found = []
    first: dict[int, Run] = {}
    for run in runs:
        before = first.setdefault(run.round, run)
        for at, (one, other) in enumerate(zip(before.served, run.served, strict=True)):
            if one.tokens != other.tokens:
                found.append(f"round {run.round}: {before.policy} and {run.policy}, request {at}")
    return found


def report(orders: Sequence[Run], admissions: Sequence[Run]) -> Result:
    found = [*different_tokens(orders), *different_tokens(admissions)]
    answers = sum(len(run.served) for run in (*orders, *admissions))
    same = {"want": 0, "got": "; ".join(found[:5]) or 0, "met": not found}
    compared = result({"answers_compared": float(answers)}, {"answers_with_other_tokens": same})
    return merged(_of_orders(_by_policy(orders)), _of_admissions(_by_policy(admissions)), compared)


def _by_policy(runs: Sequence[Run]) -> Mapping[str, list[Run]]:
    found: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if run.policy != ALONE:
            found[run.policy].append(run)
    return found


def _of_orders(runs: Mapping[str, Sequence[Run]]) -> Result:
    figures: dict[str, float] = {}
    for policy, rounds in runs.items():
        figures |= {
            f"{policy}_ttft_mean_s": median(run.mean(ttft_s) for run in rounds),
            f"{policy}_ttft_max_s": median(max(map(ttft_s, run.served)) for run in rounds),
            f"{policy}_tight_ttft_mean_s": median(
                fmean(one.ttft_s for one in run.served if not one.request.slo) for run in rounds
            ),
            f"{policy}_passed_by_at_most": float(max(max(overtaken(run.served)) for run in rounds)),
        }
    ratio = figures[f"{SJF}_ttft_mean_s"] / figures[f"{FCFS}_ttft_mean_s"]
    figures["sjf_ttft_mean_over_fcfs"] = ratio
    most = max(figures[f"{policy}_passed_by_at_most"] for policy in runs)
    aims: dict[str, Aim] = {
        "sjf_ttft_mean_over_fcfs": {"want": "< 1", "got": round(ratio, 3), "met": ratio < 1.0},
        "passed_by_at_most": at_most(WINDOW, most),
    }
    return result(figures, aims)


def _of_admissions(runs: Mapping[str, Sequence[Run]]) -> Result:
    figures: dict[str, float] = {}
    for policy, rounds in runs.items():
        figures |= {
            f"{policy}_preemptions": median(run.preemptions for run in rounds),
            f"{policy}_jct_mean_s": median(run.mean(jct_s) for run in rounds),
            f"{policy}_ttft_under_pressure_mean_s": median(run.mean(ttft_s) for run in rounds),
        }
    for policy in (STATIC, DYNAMIC):
        pairs = zip(runs[policy], runs[GREEDY], strict=True)
        figures[f"{policy}_jct_mean_over_greedy"] = median(run.mean(jct_s) / base.mean(jct_s) for run, base in pairs)
    fewer = figures[f"{GREEDY}_preemptions"] - figures[f"{DYNAMIC}_preemptions"]
    aims = {
        "greedy_preemptions": at_least(1, figures[f"{GREEDY}_preemptions"]),
        "reserve_dynamic_fewer_preemptions": at_least(1, fewer),
        "reserve_dynamic_jct_mean_over_greedy": at_most(JCT_SHARE, figures[f"{DYNAMIC}_jct_mean_over_greedy"]),
    }
    return result(figures, aims)


# The measurement.

ORDERS = (FCFS, SJF, "ljf")
ADMISSIONS = (GREEDY, STATIC, DYNAMIC)
# `sjf` and `ljf` overtake instead of working in batches.
PARAMETERS = {STATIC: {"reserve_all": True}, SJF: {"overtake": True}, "ljf": {"overtake": True}}
ROUNDS = 3
FITTING = 6  # requests at once that the KV holds at their full lengths


def run_engine_bench(rounds: int = ROUNDS) -> Result:
    with tempfile.TemporaryDirectory(prefix="polyphase-engine-") as folder:
        model = make_llama(Path(folder) / "model", SHAPE)
        return asyncio.run(measured(cluster_of(model), partial(_measure, rounds)))


async def _measure(rounds: int, on: Session) -> Result:
    names = count()
    async with ApiClient(on.target.api_url, on.target.model) as api, HostWatch(on.target.launcher_pid) as watch:

        async def run(
            number: int, label: str, requests: Sequence[Request], order: str, admission: str, at_once: int = 0
        ) -> Run:
            """One load under these policies, on an engine that has nothing else to do."""
            await on.suite.wait_idle()
            chosen = {"prefill_order": order, "decode_admission": admission}
            specs = {kind: PolicySpec(name, PARAMETERS.get(name, {})) for kind, name in chosen.items()}
            await on.suite.set_policies(specs, WHO)
            before = await _preemptions(on)
            served = await send(api, requests, f"e{next(names)}", at_once)
            preemptions = await _preemptions(on) - before
            found = Run(number, label, served, preemptions)
            means = f"TTFT {found.mean(ttft_s):6.2f} s, JCT {found.mean(jct_s):6.2f} s"
            progress(f"{number} {label:16} {means}, {preemptions} preemptions")
            return found

        # Admissions first: the short answers of bursts would teach the predictor other lengths.
        admissions = [await run(0, ALONE, pressing(SEED), FCFS, GREEDY, FITTING)]
        for number in range(rounds):
            for name in rotated(ADMISSIONS, number):
                admissions.append(await run(number, name, pressing(SEED + number), FCFS, name))
        orders = [await run(0, ALONE, burst(SEED), FCFS, GREEDY, 1)]
        for number in range(rounds):
            for name in rotated(ORDERS, number):
                orders.append(await run(number, name, burst(SEED + number), name, GREEDY))
    notes = [
        f"one engine on one core, {KV_TOKENS} tokens of KV in blocks of {BLOCK}, {SEATS} seats; {rounds} rounds",
        "admissions that reserve use what the predictor has observed, beginning with an uncounted run",
    ]
    return merged(report(orders, admissions), result({"foreign_cores": watch.mean_cores}, notes=notes))


async def _preemptions(on: Session) -> int:
    """The count so far. Raises Unavailable."""
    entry = (await on.suite.instances())[ENGINE]
    async with httpx.AsyncClient(base_url=entry.info.http, timeout=10, trust_env=False) as http:
        try:
            text = (await http.get("/metrics")).raise_for_status().text
        except httpx.HTTPError as error:
            raise Unavailable(f"{ENGINE}: {error}") from error
    return int(metric(text, "vllm:num_preemptions_total"))
