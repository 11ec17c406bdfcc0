"""`polyphase bench predictor`: accuracy of the length predictor against a known optimum, its latency, and what a
prediction costs a first token. What it is worth is in `benchmarks.predictor_worth`.

torch and transformers are imported by the parts that need them.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from shutil import copy
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from benchmarks.experiment import Session, measured
from benchmarks.measuring import serving
from benchmarks.predictor_worth import run_worth
from benchmarks.results import Aim, Result, arm_medians, at_least, at_most, in_turns, result, run_parts
from predictor.buckets import Buckets
from predictor.checkpoint import TOKENIZER_FILE, CheckpointMeta, Scores, write_meta
from predictor.evaluate import Evaluation
from predictor.examples import Example, load_examples, load_served
from predictor.service import SOURCE
from predictor.settings import PredictorSettings
from services.launcher import ports
from services.launcher.cluster_file import Cluster, load_cluster
from services.launcher.model_source import PROJECT
from services.launcher.suite import until
from shared.domain.job import PREDICTED_FROM, ends_of
from shared.errors import PolyphaseError, Unavailable
from shared.wire.messages import PREDICT, PredictRequest
from shared.wire.rpc_client import RpcClient, RpcClients
from shared.wire.sockets import Sockets
from tools.calibrate.target import Shot

DEMO, SERVED = PROJECT / "models" / "demo-lengths", PROJECT / "models" / "demo"


def run_predictor_bench(parts: Sequence[str] = ()) -> Result:
    return run_parts({"bayes": run_bayes, "latency": run_latency, "modes": run_modes, "worth": run_worth}, parts)


# Accuracy. A drawn prompt contains one verb and one topic; all other words carry no information. Verbs and topics are
# of six kinds each, and P(bucket | kinds) is a table, so that the accuracy of a reader who knows the table, Bayes'
# optimum, is exact. Lengths are shaped like ShareGPT's. After half of the kinds of verbs a topic means the opposite:
# only the pair of words determines the optimal prediction, neither word alone nor the sum of both.

Floats = NDArray[np.float64]
SHARES = (0.22, 0.26, 0.24, 0.16, 0.11, 0.01)
BUCKETS = Buckets(200, len(SHARES))
LONGEST_TOKENS = 1_600  # of the last bucket, which is open-ended
# How often a word points at the true bucket; else at another, at one so many further away each time half as often.
VERB_RIGHT, TOPIC_RIGHT, FURTHER = 0.50, 0.70, 0.5
LONG_SHARE = 0.4  # of prompts that are mostly filler
SHORT_WORDS, LONG_WORDS = (6, 60), (150, 450)
FROM_HEAD, FROM_TAIL = 8, 30  # positions of a long prompt's two words: the classifier does not see the middle
VERBS = (
    ("name", "spell"),
    ("define", "translate"),
    ("list", "summarise"),
    ("explain", "describe"),
    ("compare", "discuss"),
    ("write", "compose"),
)
TOPICS = (
    ("capital", "colour"),
    ("recipe", "melody"),
    ("bridge", "planet"),
    ("policy", "engine"),
    ("history", "theorem"),
    ("saga", "constitution"),
)
OPPOSITE = (3, 4, 5)  # the kinds of verbs after which topics mean the opposite
_FILLER = (
    "the a of and to in that it with as for on at by from this which some other more than into over under after before"
    " while because although perhaps maybe really quite rather very often always never sometimes please thanks hello"
    " yesterday today tomorrow morning evening week month year house garden window table paper letter street river"
    " mountain forest ocean island village market station train road field stone water light night winter summer green"
    " blue white heavy small large early late quiet simple useful common recent modern local public private friend"
    " teacher doctor neighbour child people group story question reason result moment place number part side kind work"
    " think know want need find give take make see look use come go keep let help start"
)
FILLER = _FILLER.split()
PROMPTS, FRESH, SEED = 20_000, 10_000, 1
SIZE, INPUT_TOKENS, THREADS = "small", 64, 2
MIN_RATIO = 0.95  # of the optimum


@dataclass(frozen=True, slots=True)
class Drawn:
    """A prompt, the kinds of its two words, and the answer's length."""

    prompt: str
    verb: int
    topic: int
    output_tokens: int

    def record(self) -> dict[str, Any]:
        """As `polyphase predictor train --data` reads it."""
        return {"prompt": self.prompt, "output_tokens": self.output_tokens}


@dataclass(frozen=True, slots=True)
class Generator:
    """joint: [bucket, verb, topic], the probability that a prompt has that length and words of those kinds."""

    joint: Floats

    @classmethod
    def like_sharegpt(cls) -> "Generator":
        count = len(SHARES)
        verb, topic = _pointing(count, VERB_RIGHT), _pointing(count, TOPIC_RIGHT)
        after = np.stack([topic[:, ::-1] if kind in OPPOSITE else topic for kind in range(count)], axis=1)
        return cls(np.asarray(SHARES)[:, None, None] * verb[:, :, None] * after)

    @property
    def optimum(self) -> float:
        """Bayes' optimum: the mean of the highest posterior over all prompts. Exact."""
        return float(self.joint.max(axis=0).sum())

    @property
    def optimum_of_one(self) -> float:
        """The best accuracy from one of the two words alone."""
        return float(max(self.joint.sum(axis=other).max(axis=0).sum() for other in (1, 2)))

    def draw(self, count: int, seed: int) -> list[Drawn]:
        """Draw the kinds of each prompt, then the bucket by its posterior. Equal for equal seeds."""
        rng, kinds, evidence = Random(seed), len(SHARES), self.joint.sum(axis=0)
        posterior, found = self.joint / evidence, []
        for pair in rng.choices(range(kinds * kinds), evidence.ravel().tolist(), k=count):
            verb, topic = divmod(pair, kinds)
            lower, upper = BUCKETS.bounds(rng.choices(range(kinds), posterior[:, verb, topic].tolist())[0])
            prompt = _prompt(verb, topic, rng)
            found.append(Drawn(prompt, verb, topic, rng.randrange(lower, min(upper, LONGEST_TOKENS))))
        return found


def _pointing(count: int, right: float) -> Floats:
    """[bucket, kind]: the probability of each kind of word, given the bucket."""
    apart = np.abs(np.subtract.outer(np.arange(count), np.arange(count)))
    near = np.where(apart > 0, FURTHER**apart, 0.0)
    pointing: Floats = np.eye(count) * right + near / near.sum(axis=1, keepdims=True) * (1.0 - right)
    return pointing


def _prompt(verb: int, topic: int, rng: Random) -> str:
    pair = [rng.choice(VERBS[verb]), rng.choice(TOPICS[topic])]
    rng.shuffle(pair)
    is_long = rng.random() < LONG_SHARE
    words = rng.choices(FILLER, k=rng.randint(*(LONG_WORDS if is_long else SHORT_WORDS)))
    where = [*range(FROM_HEAD), *range(len(words) - FROM_TAIL, len(words))] if is_long else range(len(words))
    for at, word in zip(rng.sample(where, len(pair)), pair, strict=True):
        words[at] = word
    return " ".join(words)


def run_bayes() -> Result:
    """Train from scratch as a user does: a file of records, read, split, trained, saved, loaded; then fresh prompts."""
    generator = Generator.like_sharegpt()
    drawn = generator.draw(PROMPTS, SEED)
    known = {one.prompt for one in drawn}
    fresh = [one for one in generator.draw(FRESH, SEED + 1) if one.prompt not in known]
    began_mono = monotonic()
    with TemporaryDirectory(prefix="polyphase-bench-") as folder:
        found = _trained(Path(folder), drawn, fresh)
    figures = {
        "bayes_training_s": monotonic() - began_mono,
        "bayes_accuracy": found.scores.accuracy,
        "bayes_optimum": generator.optimum,
        "bayes_ratio": found.scores.accuracy / generator.optimum,
        "bayes_optimum_of_one_word": generator.optimum_of_one,
        "bayes_commonest_accuracy": found.majority.accuracy,
        "bayes_prompt_length_accuracy": found.prompt_length.accuracy,
        "bayes_calibration_error": found.scores.calibration_error,
    }
    note = (
        f"bayes: {PROMPTS} drawn prompts, and {len(fresh)} others to judge by; "
        f"`train --from-scratch {SIZE} --input-tokens {INPUT_TOKENS}`, else its defaults"
    )
    aims = {"accuracy of the optimum": at_least(MIN_RATIO, figures["bayes_ratio"], 4)}
    return result({name: round(value, 4) for name, value in figures.items()}, aims, [note])


def _trained(folder: Path, drawn: Sequence[Drawn], fresh: Sequence[Drawn]) -> Evaluation:
    from predictor.evaluate import evaluate
    from predictor.fine_tune import FineTuning, train_tokenizer
    from predictor.model import load_classifier
    from predictor.train import default_epochs, default_learning_rate, train_checkpoint

    def examples_of(name: str, prompts: Sequence[Drawn]) -> list[Example]:
        (folder / name).write_text("\n".join(json.dumps(one.record()) for one in prompts), encoding="utf-8")
        return load_examples([folder / name], served)

    (folder / "served").mkdir()
    tokenizer = train_tokenizer((one.prompt for one in drawn), SIZE)
    tokenizer.save(str(folder / "served" / TOKENIZER_FILE))
    served = load_served(str(folder / "served"))
    examples, judged_by = examples_of("train.jsonl", drawn), examples_of("fresh.jsonl", fresh)
    plan = FineTuning(
        BUCKETS,
        from_scratch=SIZE,
        input_tokens=INPUT_TOKENS,
        epochs=default_epochs(SIZE),
        learning_rate=default_learning_rate(SIZE),
    )
    train_checkpoint(examples, folder / "checkpoint", "drawn", plan)
    known = [one for one in examples if one.split == "train"]
    return evaluate(load_classifier(folder / "checkpoint", THREADS), known, judged_by)


# Latency: a predictor's process, over its RPC, with few and with many calls at once; with the demo model's checkpoint
# and with OPT-125M in full size, with random weights.

READY_S = 180.0
AT_ONCE = (1, 8, 64)
TIMEOUTS_MS = (250.0, 2000.0)
CELL_S = 5.0
TOKENS = (20, 1000)  # of the prompts
DISTINCT, MAX_TOKENS = 256, 1024
MIN_ANSWERED = 0.99  # of the calls of each cell: observed lengths answer what the classifier cannot
LATE_MS = 100.0  # over its deadline, a call is late: its way there and back, on a machine that is busy


Call = tuple[float, str]  # seconds, and the source of the answer or "" for an error


def run_latency() -> Result:
    """The aims: at each concurrency and deadline calls are answered, and none outlasts its deadline."""
    notes, figures = list[str](), dict[str, float]()
    with TemporaryDirectory(prefix="polyphase-bench-") as folder:
        for name, checkpoint in (("demo", DEMO), ("opt_125m", make_opt_125m(Path(folder) / "opt-125m"))):
            if not checkpoint.is_dir():
                notes.append(f"{name}: not measured: there is no {checkpoint}")
                continue
            for timeout_ms in TIMEOUTS_MS:
                figures |= asyncio.run(_latencies(name, checkpoint, timeout_ms, notes))
    return result(figures, latency_aims(figures), notes)


def latency_figures(name: str, calls: Sequence[Call], timeout_ms: float, lasted_s: float) -> dict[str, float]:
    """Latencies and rates of calls that were answered, by whatever source; shares of all calls."""
    answered = sorted(took_s * 1e3 for took_s, source in calls if source)
    by_classifier = sum(source == SOURCE for _, source in calls)
    figures = {
        "answers_per_s": len(answered) / lasted_s,
        "by_classifier_per_s": by_classifier / lasted_s,
        "by_classifier_share": by_classifier / max(1, len(calls)),
        "not_answered_share": 1.0 - len(answered) / max(1, len(calls)),
        "late": float(sum(took_s * 1e3 > timeout_ms + LATE_MS for took_s, _ in calls)),
    }
    if answered:
        p99_ms = answered[min(len(answered) - 1, len(answered) * 99 // 100)]
        figures |= {"p50_ms": median(answered), "p99_ms": p99_ms}
    return {f"{name}_{key}": round(value, 4) for key, value in figures.items()}


def latency_aims(figures: Mapping[str, float]) -> dict[str, Aim]:
    """Of all concurrencies and deadlines; missed where nothing was measured."""
    missing, late = (
        [value for name, value in figures.items() if name.endswith(ending)]
        for ending in ("_not_answered_share", "_late")
    )
    answered = at_least(MIN_ANSWERED, 1.0 - max(missing) if missing else None, 4)
    return {"share answered": answered, "calls past their deadline": at_most(0, sum(late) if late else None)}


def make_opt_125m(folder: Path) -> Path:
    """facebook/opt-125m in shape, with random weights and the demo model's tokenizer."""
    from tokenizers import Tokenizer
    from transformers import OPTConfig, OPTForSequenceClassification

    from predictor.fine_tune import save

    buckets, source = Buckets(200, 10), SERVED / TOKENIZER_FILE
    folder.mkdir(parents=True)
    network = OPTForSequenceClassification(OPTConfig(num_labels=buckets.count))  # its defaults are OPT-125M's
    save(network, Tokenizer.from_file(str(source)), folder, TOKENIZER_FILE)
    copy(source, folder / TOKENIZER_FILE)
    meta = CheckpointMeta(
        bucket_tokens=buckets.width_tokens,
        bucket_count=buckets.count,
        input_tokens=PREDICTED_FROM,
        base="OPT-125M, random weights",
        served_model=str(SERVED),
        data_digest="",
        examples={},
        scores=Scores(0, 0.0, 0.0, 0.0, 0.0, [], []),
        seed=0,
        trained_unix_s=0.0,
        means=[(at + 0.5) * buckets.width_tokens for at in range(buckets.count)],
    )
    write_meta(folder, meta)
    return folder


def real_prompts() -> list[list[int]]:
    """Token ids of texts of 20 to 1,000 tokens, as many lengths of each order of magnitude; equal each time."""
    from tokenizers import Tokenizer

    rng, tokenizer = Random(5), Tokenizer.from_file(str(SERVED / TOKENIZER_FILE))
    texts = [path.read_text(encoding="utf-8") for path in sorted((PROJECT / "docs").glob("*.md"))]
    ids, (low, high) = tokenizer.encode("\n".join(texts)).ids, TOKENS
    lengths = [round(low * (high / low) ** rng.random()) for _ in range(DISTINCT)]
    return [ids[start : start + length] for length in lengths for start in (rng.randrange(len(ids) - length),)]


async def _latencies(name: str, checkpoint: Path, timeout_ms: float, notes: list[str]) -> dict[str, float]:
    figures, prompts, sockets = dict[str, float](), real_prompts(), Sockets()
    async with _process(checkpoint, timeout_ms) as settings:
        try:
            notes.append(f"{name}, {timeout_ms:.0f} ms: {await _loaded(settings.port) or 'unknown runtime'}")
            with RpcClients(sockets) as clients:
                client = clients.to(settings.rpc_address)
                for at_once in AT_ONCE:
                    began_mono, calls = monotonic(), await _calls(client, prompts, at_once, timeout_ms / 1e3)
                    cell = f"{name}_{at_once}_at_once_{timeout_ms:.0f}ms"
                    figures |= latency_figures(cell, calls, timeout_ms, monotonic() - began_mono)
        finally:
            sockets.close()
    return figures


async def _calls(client: RpcClient, prompts: Sequence[list[int]], at_once: int, timeout_s: float) -> list[Call]:
    """Callers that each wait for an answer before the next request."""
    ends_mono, calls = monotonic() + CELL_S, list[Call]()

    async def caller(seed: int) -> None:
        rng = Random(seed)
        while monotonic() < ends_mono:
            ids, sent_mono = rng.choice(prompts), perf_counter()
            try:
                request = PredictRequest(ends_of(ids), len(ids), MAX_TOKENS)
                source = (await client.call(PREDICT, request, timeout_s=timeout_s)).source
            except PolyphaseError:
                source = ""
            calls.append((perf_counter() - sent_mono, source))
            if source != SOURCE:  # a gateway continues with its next job
                await asyncio.sleep(max(0.0, timeout_s - calls[-1][0]))

    async with asyncio.TaskGroup() as callers:
        for number in range(at_once):
            callers.create_task(caller(number))
    return calls


@asynccontextmanager
async def _process(checkpoint: Path, timeout_ms: float) -> AsyncIterator[PredictorSettings]:
    """The settings of a running predictor, whose classifier answers whatever it is worth."""
    port = ports.free_range()
    settings = PredictorSettings(
        port=port,
        rpc_address=f"tcp://127.0.0.1:{port + 1}",
        checkpoint=checkpoint,
        model=str(SERVED),
        timeout_ms=timeout_ms,
        use="classifier",
    )
    async with serving(f"http://127.0.0.1:{port}/v1/model", "-m", "predictor", **settings.to_environment()):
        yield settings


async def _loaded(port: int) -> dict[str, Any]:
    """How the process runs its classifier, once it has loaded it. Raises Unavailable, and DeadlineExceeded."""
    about: dict[str, Any] = {}

    async def loaded() -> bool:
        about.update((await http.get("/v1/model")).json()["checkpoint"])
        if about.get("state") in ("broken", "missing"):
            raise Unavailable(f"the predictor did not load its checkpoint: {about.get('error') or about}")
        return about.get("state") == "loaded"

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=5.0, trust_env=False) as http:
        await until(loaded, READY_S, "the predictor's checkpoint", 0.2)
    return dict(about.get("runs") or {})


# The TTFT cost of a prediction, with real engines and a real classifier on this machine's CPU. TetriInfer, section
# 3.3.2 and figure 17: in parallel a prefill takes 10 % longer under stress, and less otherwise.

MODES = ("off", "parallel", "sequential")
ROUNDS = 3
LOADS = {"light": (1, 24), "stress": (12, 96)}  # at once, requests
PROMPT_TOKENS, OUTPUT_TOKENS = (60, 400), 16


def run_modes() -> Result:
    """Medians over the rounds. No aim: what is measured are two cores that engines and classifier share."""

    async def run_mode(number: int, mode: str) -> dict[str, float]:
        return await measured(_cluster(mode), _ttfts)

    rounds = asyncio.run(in_turns(MODES, ROUNDS, run_mode))
    figures = arm_medians("modes", rounds, [name for name in rounds[0]["off"] if name.startswith("ttft_")])
    loads = f"at once and in all: {LOADS}; prompts of {PROMPT_TOKENS} tokens, {OUTPUT_TOKENS} out"
    return result(figures, notes=[f"modes: {ROUNDS} rounds; {loads}"])


async def _ttfts(on: Session) -> dict[str, float]:
    """TTFT by load, and the classifier's share of all requested predictions."""
    await on.warm_up()
    figures: dict[str, float] = {}
    for name, (at_once, count) in LOADS.items():
        rng = Random(at_once)
        shots = [Shot(rng.randint(*PROMPT_TOKENS), OUTPUT_TOKENS) for _ in range(count)]
        p50_s, p99_s = np.percentile([one.ttft_s for one in await on.traffic.closed(shots, at_once)], (50, 99))
        figures |= {f"ttft_{name}_p50_ms": 1e3 * float(p50_s), f"ttft_{name}_p99_ms": 1e3 * float(p99_s)}
    async with httpx.AsyncClient(base_url=on.running.plan.predictor_url, timeout=10, trust_env=False) as http:
        text = (await http.get("/metrics")).raise_for_status().text
    found = re.findall(r'^polyphase_predictor_latency_seconds_count\{source="(\w+)"\} (\S+)$', text, re.MULTILINE)
    counts = {source: float(count) for source, count in found}
    return figures | {"classified": counts.get(SOURCE, 0.0) / (sum(counts.values()) or 1.0)}


def _cluster(mode: str) -> Cluster:
    cluster = load_cluster(Path("laptop"))
    changes: dict[str, dict[str, Any]] = {
        "gateway": {"predict": mode},
        "dashboard": {"enabled": False},
        "planner": {"enabled": False},
        "predictor": {"use": "classifier"},
    }
    sections = {name: getattr(cluster, name).model_copy(update=change) for name, change in changes.items()}
    return cluster.model_copy(update=sections)
