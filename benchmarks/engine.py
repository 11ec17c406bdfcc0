"""`polyphase bench engine`: prefill orders and decode admissions, changed on a real vLLM engine while it runs.

Each round sends the same requests under all policies, in rotating order: bursts of prompts of different lengths for the
orders, answers that outgrow the KV memory for the admissions. The report gives medians of rounds and counts requests
that were overtaken.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean, median

from benchmarks.cluster_files import ClusterDict, LlamaShape, engines_on_cpu, make_llama
from benchmarks.experiment import Session, measured
from benchmarks.results import Figures, Result, aim, arm_medians, at_least, at_most, in_turns, merged, progress, result
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


def cluster_of(model: Path) -> ClusterDict:
    """The only instance decodes, so it computes whole requests: no placement and no KV transfer is measured."""
    sizes = {"chunk_size": CHUNK, "max_seqs": SEATS, "block_size": BLOCK}
    memory = (KV_TOKENS + BLOCK) * SHAPE.kv_bytes_per_token  # a block is vLLM's own
    instances = [{"id": ENGINE, "role": Role.DECODE.value}]
    return {
        **engines_on_cpu("engine", model, instances, MAX_MODEL_LEN, kv_cache_bytes=memory, **sizes),
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
    seats, began_mono = asyncio.Semaphore(at_once or len(requests)), loop.time()

    async def send_one(at: int, request: Request) -> Served:
        await asyncio.sleep(began_mono + at * APART_S - loop.time())
        async with seats:
            sent_s, name = loop.time() - began_mono, f"{label}n{at}"
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
JCT_SHARE = 1.02  # of greedy's, at most


@dataclass(frozen=True, slots=True)
class Run:
    served: Sequence[Served]
    preemptions: int = 0

    @property
    def jct_mean_s(self) -> float:
        return fmean(one.jct_s for one in self.served)

    @property
    def ttft_mean_s(self) -> float:
        return fmean(one.ttft_s for one in self.served)

    def of_order(self) -> Figures:
        return {
            "ttft_mean_s": self.ttft_mean_s,
            "ttft_max_s": max(one.ttft_s for one in self.served),
            "tight_ttft_mean_s": fmean(one.ttft_s for one in self.served if not one.request.slo),
        }

    def of_admission(self) -> Figures:
        return {"preemptions": self.preemptions, "jct_mean_s": self.jct_mean_s, "ttft_mean_s": self.ttft_mean_s}


Rounds = Sequence[dict[str, Run]]  # by policy


def overtaken(served: Sequence[Served]) -> list[int]:
    """For each request, in the order of sending, how many later ones had their first token earlier."""
    return [sum(later.first_s < one.first_s for later in served[at + 1 :]) for at, one in enumerate(served)]


def different_tokens(rounds: Rounds, alone: Run | None = None) -> list[str]:
    """Requests whose tokens are not those of the round's first policy. alone: the requests of the first round."""
    found = []
    for number, by_policy in enumerate(rounds):
        runs = ({"alone": alone} if alone is not None and not number else {}) | by_policy
        first, *others = runs
        for name in others:
            pairs = zip(runs[first].served, runs[name].served, strict=True)
            different = [at for at, (one, other) in enumerate(pairs) if one.tokens != other.tokens]
            found += [f"round {number}: {first} and {name}, request {at}" for at in different]
    return found


def report(orders: Rounds, admissions: Rounds, alone: tuple[Run, Run] | None = None) -> Result:
    """alone: runs of few requests at a time, for the reference tokens of orders and admissions."""
    found = [*different_tokens(orders, alone and alone[0]), *different_tokens(admissions, alone and alone[1])]
    runs = [*(alone or ()), *(run for by_policy in (*orders, *admissions) for run in by_policy.values())]
    same = aim(0, "; ".join(found[:5]) or 0, not found)
    compared = {"answers_compared": float(sum(len(run.served) for run in runs))}
    return merged(_orders(orders), _admissions(admissions), result(compared, {"answers_with_other_tokens": same}))


def _orders(rounds: Rounds) -> Result:
    figures = arm_medians("order", [{name: run.of_order() for name, run in row.items()} for row in rounds])
    passed = {name: max(max(overtaken(row[name].served)) for row in rounds) for name in rounds[0]}
    figures |= {f"order_{name}_passed_by_at_most": float(count) for name, count in passed.items()}
    ratio = figures[f"order_{SJF}_ttft_mean_s"] / figures[f"order_{FCFS}_ttft_mean_s"]
    aims = {
        "sjf_ttft_mean_over_fcfs": aim("< 1", round(ratio, 3), ratio < 1.0),
        "passed_by_at_most": at_most(WINDOW, max(passed.values())),
    }
    return result({**figures, "sjf_ttft_mean_over_fcfs": ratio}, aims)


def _admissions(rounds: Rounds) -> Result:
    rows = [{name: run.of_admission() for name, run in row.items()} for row in rounds]
    figures = arm_medians("admission", rows, ("jct_mean_s",))
    greedy, dynamic = (figures[f"admission_{name}_preemptions"] for name in (GREEDY, DYNAMIC))
    jct_share = median(row[DYNAMIC].jct_mean_s / row[GREEDY].jct_mean_s for row in rounds)
    aims = {
        "greedy_preemptions": at_least(1, greedy),
        "reserve_dynamic_fewer_preemptions": at_least(1, greedy - dynamic),
        "reserve_dynamic_jct_mean_over_greedy": at_most(JCT_SHARE, jct_share),
    }
    return result(figures, aims)


# The measurement.

ORDERS = (FCFS, SJF, "ljf")
ADMISSIONS = (GREEDY, STATIC, DYNAMIC)
# `sjf` and `ljf` overtake instead of working in batches.
PARAMETERS = {STATIC: {"reserve_all": True}, SJF: {"overtake": True}, "ljf": {"overtake": True}}
ROUNDS = 3
FITTING = 6  # requests at once that the KV holds at their full lengths
PREEMPTIONS = "vllm:num_preemptions_total"


def run_engine_bench(rounds: int = ROUNDS) -> Result:
    with tempfile.TemporaryDirectory(prefix="polyphase-engine-") as folder:
        model = make_llama(Path(folder) / "model", SHAPE)
        return asyncio.run(measured(cluster_of(model), partial(_measure, rounds)))


async def _measure(rounds: int, on: Session) -> Result:
    names = count()
    async with ApiClient(on.target.api_url, on.target.model) as api, HostWatch(on.target.launcher_pid) as watch:

        async def run(requests: Sequence[Request], order: str, admission: str, at_once: int = 0) -> Run:
            """One load under these policies, on an engine that has nothing else to do."""
            chosen = {"prefill_order": order, "decode_admission": admission}
            await on.use({kind: PolicySpec(name, PARAMETERS.get(name, {})) for kind, name in chosen.items()})
            before = (await on.metrics(PREEMPTIONS))[ENGINE][0]
            served = await send(api, requests, f"e{next(names)}", at_once)
            found = Run(served, round((await on.metrics(PREEMPTIONS))[ENGINE][0] - before))
            means = f"TTFT {found.ttft_mean_s:6.2f} s, JCT {found.jct_mean_s:6.2f} s"
            progress(f"{order:8} {admission:16} {means}, {found.preemptions} preemptions")
            return found

        # Admissions first: the short answers of bursts would teach the predictor other lengths.
        pressed = await run(pressing(SEED), FCFS, GREEDY, FITTING)
        admissions = await in_turns(ADMISSIONS, rounds, lambda number, name: run(pressing(SEED + number), FCFS, name))
        alone = await run(burst(SEED), FCFS, GREEDY, 1)
        orders = await in_turns(ORDERS, rounds, lambda number, name: run(burst(SEED + number), name, GREEDY))
    notes = [
        f"one engine on one core, {KV_TOKENS} tokens of KV in blocks of {BLOCK}, {SEATS} seats; {rounds} rounds",
        "admissions that reserve use what the predictor has observed, beginning with an uncounted run",
    ]
    return merged(
        report(orders, admissions, (alone, pressed)), result({"foreign_cores": watch.mean_cores}, notes=notes)
    )
