"""`polyphase bench engine`: prefill orders and decode admissions, changed on a real vLLM engine while it runs.

Each round sends the same requests under all policies, in rotating order: bursts of prompts of different lengths for the
orders, answers that outgrow the KV memory for the admissions. The report gives medians of rounds and counts requests
that were overtaken.
"""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

import httpx

from benchmarks.demo.client import ApiClient, Ask
from benchmarks.experiment import WHO, Session, measured
from benchmarks.real_engines import LlamaShape, make_llama
from benchmarks.results import Result, at_least, at_most, merged, progress, result, rotated
from benchmarks.suite import DEMO_MODEL, metric
from shared.domain.instance import Role
from shared.domain.route import PolicySpec
from shared.errors import Unavailable
from shared.policy.prefill_order import WINDOW
from shared.timeline import RequestTimeline
from tools.calibrate.host_watch import HostWatch
from tools.client import Response

ENGINE = "engine"
# 26 million parameters: computing a burst of prompts takes seconds, beside which what the services add is small.
SHAPE = LlamaShape(4096, 512, 1408, 8, 8, 4, 4096)
MAX_MODEL_LEN, CHUNK, SEATS = 1024, 256, 32
KV_TOKENS, BLOCK = 4096, 32
PATIENT = "patient"
_FLOAT32_BYTES = 4
_PREEMPTIONS = "vllm:num_preemptions_total"


def cluster_of(model: Path) -> dict[str, Any]:
    """The cluster file.

    The only instance decodes, so it computes whole requests: order and admission meet in one engine, and neither
    placement nor KV transfers have a part in what is measured.
    """
    head_bytes = 2 * SHAPE.num_key_value_heads * SHAPE.head_dim * _FLOAT32_BYTES
    return {
        "name": "bench engine",
        "model": str(model),
        "served_model_name": "engine",
        "max_model_len": MAX_MODEL_LEN,
        "gateway": {"dtype": "float32", "slo": {PATIENT: {"ttft_s": 30.0, "tpot_s": 1.0}}},
        "predictor": {"bucket_tokens": 32, "bucket_count": 16},
        "dashboard": {"enabled": False},
        "instance_defaults": {"engine": "vllm", "accelerator": "cpu", "dtype": "float32", "threads": 1},
        "instances": [
            {
                "id": ENGINE,
                "role": Role.DECODE.value,
                "chunk_size": CHUNK,
                "max_seqs": SEATS,
                "block_size": BLOCK,
                "kv_cache_bytes": (KV_TOKENS + BLOCK) * SHAPE.num_hidden_layers * head_bytes,  # a block is vLLM's own
            }
        ],
    }


# The load.

PROMPTS = (24, 48, 96, 192, 384, 768)  # tokens of a burst's prompts
BURST, BURST_OUTPUT = 36, 4
APART_S = 0.01  # between one request and the next: their order is that of the list
# Prompts and answers of the requests that outgrow the KV: what is predicted of an answer rests on its prompt's length.
SORTS = (((20, 31), (34, 62)), ((64, 120), (130, 158)), ((140, 250), (290, 318)))
PRESSING = 33
_VOCABULARY = range(300, SHAPE.vocab_size)  # without special tokens


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request to send. slo: its class, "" for the default."""

    prompt: tuple[int, ...]
    output_tokens: int
    slo: str = ""


@dataclass(frozen=True, slots=True)
class Served:
    """A request that was. sent_s: after the first was sent; ttft_s, jct_s: from then on."""

    wanted: Wanted
    request_id: str
    sent_s: float
    ttft_s: float
    jct_s: float
    tokens: tuple[int, ...]

    @property
    def first_s(self) -> float:
        return self.sent_s + self.ttft_s


def burst(seed: int) -> list[Wanted]:
    """As many prompts of each length, in a drawn order; every second request is of the patient class."""
    rng = Random(seed)
    lengths = list(PROMPTS) * (BURST // len(PROMPTS))
    rng.shuffle(lengths)
    classes = ("", PATIENT)
    return [
        Wanted(tuple(rng.choices(_VOCABULARY, k=length)), BURST_OUTPUT, classes[at % 2])
        for at, length in enumerate(lengths)
    ]


def pressing(seed: int) -> list[Wanted]:
    """As many of each of the `SORTS`, in any order."""
    rng = Random(seed)
    sorts = list(SORTS) * (PRESSING // len(SORTS))
    rng.shuffle(sorts)
    return [
        Wanted(tuple(rng.choices(_VOCABULARY, k=rng.randint(*prompt))), rng.randint(*output))
        for prompt, output in sorts
    ]


async def send(api: ApiClient, wanted: Sequence[Wanted], label: str, at_once: int = 0) -> list[Served]:
    """One after the other, `APART_S` apart; with `at_once`, never more than so many. In the order of `wanted`.

    `label` is of the run: a prompt that is sent again under another one is found in no prefix cache. Raises Unavailable
    when one fails.
    """
    loop = asyncio.get_running_loop()
    seats, began_s = asyncio.Semaphore(at_once or len(wanted)), loop.time()

    async def one(at: int, request: Wanted) -> Served:
        await asyncio.sleep(began_s + at * APART_S - loop.time())
        async with seats:
            sent_s, name = loop.time() - began_s, f"{label}n{at}"
            ask = Ask(list(request.prompt), request.output_tokens, name, salt=name, slo=request.slo)
            answer = await api.stream(ask)
        _check(answer, request)
        return Served(request, name, sent_s, answer.ttft_s or 0.0, answer.took_s, tuple(answer.tokens))

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(at, request)) for at, request in enumerate(wanted)]
    return [task.result() for task in tasks]


def predicted_in_time(timeline: RequestTimeline) -> bool:
    """Whether the length of its answer was predicted before its first token."""
    predicted_s = [decision.time_s for decision in timeline.decisions if decision.kind == "prediction"]
    return bool(predicted_s) and predicted_s[0] <= timeline.first_token_s


def _check(answer: Response, request: Wanted) -> None:
    if answer.error or len(answer.tokens) != request.output_tokens:
        raise Unavailable(
            f"a request failed: {answer.error or f'{len(answer.tokens)} of {request.output_tokens} tokens'}"
        )


# The report.

FCFS, SJF = "fcfs", "sjf"
GREEDY, STATIC, DYNAMIC = "greedy", "reserve_static", "reserve_dynamic"
ALONE = "alone"  # a run of few requests at once, for the reference tokens
JCT_SHARE = 1.02  # of greedy's, at most: what counts as no longer


@dataclass(frozen=True, slots=True)
class Run:
    round: int
    policy: str
    served: Sequence[Served]
    preemptions: int = 0
    predicted: float = 0.0  # share of the requests whose length was predicted in time


def passed(served: Sequence[Served]) -> list[int]:
    """For each request, in the order of sending, by how many that came later its first token was preceded."""
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
    figures, aims = _of_orders(_by_policy(orders))
    more, wanted = _of_admissions(_by_policy(admissions))
    found = [*different_tokens(orders), *different_tokens(admissions)]
    answers = sum(len(run.served) for run in (*orders, *admissions))
    aims |= wanted
    aims["answers_with_other_tokens"] = {"want": 0, "got": "; ".join(found[:5]) or 0, "met": not found}
    return {"figures": figures | more | {"answers_compared": float(answers)}, "aims": aims, "notes": []}


def _by_policy(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run.policy != ALONE:
            found.setdefault(run.policy, []).append(run)
    return found


def _of_orders(runs: Mapping[str, Sequence[Run]]) -> tuple[dict[str, float], Result]:
    figures: dict[str, float] = {}
    for policy, rounds in runs.items():
        tight = [[one for one in run.served if not one.wanted.slo] for run in rounds]
        figures |= {
            f"{policy}_ttft_mean_s": median(fmean(one.ttft_s for one in run.served) for run in rounds),
            f"{policy}_ttft_max_s": median(max(one.ttft_s for one in run.served) for run in rounds),
            f"{policy}_tight_ttft_mean_s": median(fmean(one.ttft_s for one in some) for some in tight),
            f"{policy}_passed_by_at_most": float(max(max(passed(run.served)) for run in rounds)),
        }
    ratio = figures[f"{SJF}_ttft_mean_s"] / figures[f"{FCFS}_ttft_mean_s"]
    figures["sjf_ttft_mean_over_fcfs"] = ratio
    most = max(figures[f"{policy}_passed_by_at_most"] for policy in runs)
    return figures, {
        "sjf_ttft_mean_over_fcfs": {"want": "< 1", "got": round(ratio, 3), "met": ratio < 1.0},
        "passed_by_at_most": at_most(WINDOW, most),
    }


def _of_admissions(runs: Mapping[str, Sequence[Run]]) -> tuple[dict[str, float], Result]:
    figures: dict[str, float] = {}
    for policy, rounds in runs.items():
        figures |= {
            f"{policy}_preemptions": median(run.preemptions for run in rounds),
            f"{policy}_jct_mean_s": median(fmean(one.jct_s for one in run.served) for run in rounds),
            f"{policy}_ttft_under_pressure_mean_s": median(fmean(one.ttft_s for one in run.served) for run in rounds),
            f"{policy}_predicted_share": min(run.predicted for run in rounds),
        }
    for policy in (STATIC, DYNAMIC):
        ratios = [
            fmean(one.jct_s for one in run.served) / fmean(one.jct_s for one in greedy.served)
            for run, greedy in zip(runs[policy], runs[GREEDY], strict=True)
        ]
        figures[f"{policy}_jct_mean_over_greedy"] = median(ratios)
    fewer = figures[f"{GREEDY}_preemptions"] - figures[f"{DYNAMIC}_preemptions"]
    return figures, {
        "greedy_preemptions": at_least(1, figures[f"{GREEDY}_preemptions"]),
        "reserve_dynamic_fewer_preemptions": at_least(1, fewer),
        "reserve_dynamic_jct_mean_over_greedy": at_most(JCT_SHARE, figures[f"{DYNAMIC}_jct_mean_over_greedy"]),
    }


ORDERS = (FCFS, SJF, "ljf")
OURS = {STATIC: {"reserve_all": True}}
OVERTAKING = {SJF: {"overtake": True}, "ljf": {"overtake": True}}  # instead of batches
ADMISSIONS = (GREEDY, STATIC, DYNAMIC)
ROUNDS = 3
FITTING = 6  # requests at once that the KV holds at their full lengths
SEED = 21


def run_engine_bench(rounds: int = ROUNDS) -> Result:
    with tempfile.TemporaryDirectory(prefix="polyphase-engine-") as folder:
        model = make_llama(Path(folder) / "model", SHAPE, DEMO_MODEL)
        return asyncio.run(measured(cluster_of(model), partial(_measure, rounds)))


async def _measure(rounds: int, on: Session) -> Result:
    names = count()
    async with ApiClient(on.target.api_url, on.target.model) as api, HostWatch(on.target.launcher_pid) as watch:

        async def run(
            number: int,
            policy: str,
            wanted: Sequence[Wanted],
            order: str = FCFS,
            admission: str = GREEDY,
            at_once: int = 0,
        ) -> Run:
            """One load under these policies, on an engine that has nothing else to do."""
            await on.suite.wait_idle()
            chosen = PolicySpec(order, OVERTAKING.get(order, {})), PolicySpec(admission, OURS.get(admission, {}))
            kinds = ("prefill_order", "decode_admission")
            await on.suite.set_policies(dict(zip(kinds, chosen, strict=True)), WHO)
            before = await _preemptions(on)
            served = await send(api, wanted, f"e{next(names)}", at_once)
            preemptions = await _preemptions(on) - before
            timelines = await on.target.timelines({one.request_id for one in served})
            predicted = fmean(predicted_in_time(timeline) for timeline in timelines.values())
            ttft_s, jct_s = (fmean(getattr(one, name) for one in served) for name in ("ttft_s", "jct_s"))
            progress(f"{number} {policy:16} TTFT {ttft_s:6.2f} s, JCT {jct_s:6.2f} s, {preemptions} preemptions")
            return Run(number, policy, served, preemptions, predicted)

        # Admissions first: the short answers of bursts would teach the predictor another thing.
        admissions = [await run(0, ALONE, pressing(SEED), at_once=FITTING)]
        for number in range(rounds):
            for admission in rotated(ADMISSIONS, number):
                admissions.append(await run(number, admission, pressing(SEED + number), admission=admission))
        orders = [await run(0, ALONE, burst(SEED), at_once=1)]
        for number in range(rounds):
            for order in rotated(ORDERS, number):
                orders.append(await run(number, order, burst(SEED + number), order=order))
    notes = [
        f"one engine on one core, {KV_TOKENS} tokens of KV in blocks of {BLOCK}, {SEATS} seats; {rounds} rounds",
        "admissions that reserve go by what the predictor has observed, beginning with an uncounted run",
    ]
    return merged(report(orders, admissions), result({"foreign_cores": watch.mean_cores}, notes=notes))


async def _preemptions(on: Session) -> int:
    """The count so far. Raises Unavailable."""
    entry = (await on.suite.instances())[ENGINE]
    async with httpx.AsyncClient(base_url=entry["info"]["http"], timeout=10, trust_env=False) as http:
        try:
            text = (await http.get("/metrics")).raise_for_status().text
        except httpx.HTTPError as error:
            raise Unavailable(f"{ENGINE}: {error}") from error
    return int(metric(text, _PREEMPTIONS))
