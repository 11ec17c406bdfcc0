"""What lossy KV does to answers (ThunderServe, Tables 2, 6 and 7): perplexity, right answers, and how much of an answer
stays as it is, of the demo model with each codec.

Two real engines in processes of their own, and the transfer between them that serves: one computes a prompt and exports
its KV, the other imports it and decodes. Perplexity is teacher-forced: the importing engine is made to produce the text
that follows, and reports at each step how likely that token was. The prompts are conversations that the demo model's
training held out, and tasks drawn anew. One request at a time: what shares a batch changes bfloat16's last bits.
"""

import asyncio
import importlib.util
import json
import math
import os
import socket
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import msgspec

from benchmarks.results import at_least, at_most
from benchmarks.suite import spawned
from services.launcher.model_source import PROJECT
from services.worker.kv import lossy_salt
from shared.domain.kv import Codec, KvHandle
from shared.errors import InvalidRequest, Unavailable

TEXTS, TASKS = 80, 120
ANSWER_TOKENS = 64
PROMPT_TOKENS, SCORED_TOKENS = (48, 400), 64  # of a text: the first half is the prompt, at most so many are scored
PLAIN = "one instance"  # no transfer: what the other rows are compared with
RAW = Codec.RAW.value
ROWS = (PLAIN, *(codec.value for codec in Codec))
# ThunderServe finds perplexities within 1 % (Table 6), accuracies within 2 points (Table 2) and ROUGE of about 0.95
# (Table 7) with 4 bits.
_PERPLEXITY, _RIGHT, _ROUGE = 1.01, 0.02, 0.9
_TRAINING = {"seed": 0, "held_out_share": 0.02}  # of models/train_demo_model.py and models/demo_corpus.py
_ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>", "end": "<|end|>"}
_START_S = 600.0
_END = 1  # `<|end|>`


@dataclass(frozen=True, slots=True)
class Order:
    """One request to an engine, for `most` tokens or those that are `forced`. `transfer_id`: of its export with this
    codec; or `handle`: where to import from.
    """

    prompt: list[int]
    most: int
    forced: list[int]
    transfer_id: str = ""
    codec: Codec = Codec.RAW
    handle: KvHandle | None = None
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """Tokens and their log probabilities, without temperature; bytes that the import took."""

    tokens: list[int]
    logprobs: list[float]
    handle: KvHandle | None
    wire_bytes: int


@dataclass(frozen=True, slots=True)
class Task:
    """A conversation whose last answer is known."""

    prompt: list[int]
    answer: str


def run_kv_quality_bench(data: Path, texts: int = TEXTS, tasks: int = TASKS) -> dict[str, Any]:
    """`data` holds `prompt_response/`, GPTeacher's files. Returns {"figures", "aims", "tables", "notes"}."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PROJECT / "models" / "demo")
    held_out = held_out_texts(data / "prompt_response", tokenizer)
    low, high = PROMPT_TOKENS
    chosen = [text for text in held_out if low <= len(text) // 2 <= high]
    if len(chosen) < texts:
        raise InvalidRequest(
            f"{data}/prompt_response: {len(chosen)} held-out texts of {2 * low} tokens and more, need {texts}"
        )
    chosen = Random(1).sample(chosen, texts)
    drawn = drawn_tasks(tokenizer, tasks)
    with ExitStack() as stack:
        pipes = [stack.enter_context(_engine(name)) for name in ("p", "d")]
        pair = Pair(*pipes)
        measured = {row: _measure(pair, row, chosen, drawn, tokenizer) for row in ROWS}
    return _result(measured, drawn, texts)


class Pair:
    """An engine that exports and one that imports."""

    def __init__(self, exporter: Connection, importer: Connection) -> None:
        self._exporter, self._importer = exporter, importer
        self._count = 0

    def answer(self, row: str, prompt: list[int], forced: list[int] | None = None) -> Result:
        """A greedy answer, or the tokens that are forced. Raises Unavailable where KV was not pulled whole: a
        recomputation would look like a faultless codec.
        """
        self._count += 1
        forced = forced or []
        most = len(forced) or ANSWER_TOKENS
        salt = f"{row}-{self._count}"  # nothing is found in a prefix cache
        if row == PLAIN:
            return _ask(self._importer, Order(prompt, most, forced, salt=salt))
        name = f"quality-{self._count}"
        exported = _ask(self._exporter, Order(prompt, 1, [], transfer_id=name, codec=Codec(row), salt=salt))
        salt = lossy_salt(name) if Codec(row).lossy else salt  # without it, lossy KV is not imported
        return _ask(self._importer, Order(prompt, most, forced, handle=exported.handle, salt=salt))


def _ask(pipe: Connection, order: Order) -> Result:
    try:
        pipe.send(order)
        result = pipe.recv()
    except (EOFError, OSError) as error:
        raise Unavailable("an engine's process has ended") from error
    if isinstance(result, str):
        raise Unavailable(result)
    assert isinstance(result, Result)
    return result


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one row. logprobs: of each scored token. free: words of greedy answers to the first halves of texts."""

    logprobs: list[float]
    free: list[list[str]]
    tasks: list[str]
    wire_bytes: int

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


def _measure(pair: Pair, row: str, texts: list[list[int]], tasks: list[Task], tokenizer: Any) -> Measured:
    logprobs, free, answers, wire = list[float](), list[list[str]](), list[str](), 0
    for text in texts:
        prompt, rest = text[: len(text) // 2], text[len(text) // 2 :][:SCORED_TOKENS]
        scored = pair.answer(row, prompt, rest)
        if scored.tokens != rest:
            raise Unavailable(f"{row}: the engine has produced other tokens than it was given")
        logprobs += scored.logprobs
        wire += scored.wire_bytes
        answer = pair.answer(row, prompt)
        free.append(tokenizer.decode(answer.tokens, skip_special_tokens=True).split())
    for task in tasks:
        answer = pair.answer(row, task.prompt)
        answers.append(tokenizer.decode(answer.tokens, skip_special_tokens=True).strip())
    return Measured(logprobs, free, answers, wire)


def _result(measured: dict[str, Measured], tasks: list[Task], texts: int) -> dict[str, Any]:
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    plain, raw = measured[PLAIN], measured[RAW]
    right = {
        row: sum(given == task.answer for given, task in zip(each.tasks, tasks, strict=True)) / len(tasks)
        for row, each in measured.items()
    }
    for row, each in measured.items():
        name = row.replace(" ", "_")
        same = sum(one == other for one, other in zip(each.free, plain.free, strict=True)) / len(each.free)
        rouge = rouge_of(each.free, plain.free)
        figures |= {
            f"{name}_perplexity": round(each.perplexity, 3),
            f"{name}_tasks_right_share": round(right[row], 3),
            f"{name}_answers_identical_share": round(same, 3),
        }
        figures |= {f"{name}_rouge_{kind}": round(value, 3) for kind, value in rouge.items()}
        rows.append(
            {
                "run": row,
                "KV bytes": f"{each.wire_bytes / raw.wire_bytes:.2f}" if each.wire_bytes else "–",
                "perplexity": f"{each.perplexity:.3f}",
                "tasks right": f"{right[row]:.3f}",
                "answers identical": f"{same:.3f}",
                **{f"ROUGE-{kind.upper()}": f"{value:.3f}" for kind, value in rouge.items()},
            }
        )
    aims = {f"{RAW}_answers_identical_share": at_least(1.0, figures[f"{RAW}_answers_identical_share"])}
    for codec in (each.value for each in Codec if each.lossy):
        aims |= {
            f"{codec}_perplexity_ratio": at_most(_PERPLEXITY, measured[codec].perplexity / raw.perplexity, 4),
            f"{codec}_tasks_lost_share": at_most(_RIGHT, round(right[RAW] - right[codec], 3)),
            f"{codec}_rouge_l": at_least(_ROUGE, figures[f"{codec}_rouge_l"]),
        }
    notes = [
        f"{len(plain.logprobs)} tokens of {texts} held-out conversations scored after their first halves; greedy "
        f"answers of {ANSWER_TOKENS} tokens to these, those of one instance being ROUGE's truth; {len(tasks)} tasks."
    ]
    return {"figures": figures, "aims": aims, "tables": {"Lossy KV and answers": rows}, "notes": notes}


# Overlap of answers.


def rouge_of(given: list[list[str]], truth: list[list[str]]) -> dict[str, float]:
    """Mean F-measures of words in common: single words (1), pairs (2), and the longest common subsequence (l)."""
    pairs = list(zip(given, truth, strict=True))
    kinds: dict[str, Callable[[list[str], list[str]], float]] = {
        "1": lambda one, other: _overlap(one, other, 1),
        "2": lambda one, other: _overlap(one, other, 2),
        "l": lambda one, other: _f_measure(_common(one, other), len(one), len(other)) if one != other else 1.0,
    }
    return {kind: sum(measure(*pair) for pair in pairs) / len(pairs) for kind, measure in kinds.items()}


def _overlap(one: list[str], other: list[str], size: int) -> float:
    grams = [Counter(zip(*(words[at:] for at in range(size)), strict=False)) for words in (one, other)]
    if one == other:  # both may be too short for a pair
        return 1.0
    return _f_measure((grams[0] & grams[1]).total(), grams[0].total(), grams[1].total())


def _f_measure(common: int, one: int, other: int) -> float:
    return 2 * common / (one + other) if one + other else 0.0


def _common(one: list[str], other: list[str]) -> int:
    """Length of the longest common subsequence."""
    best = [0] * (len(other) + 1)
    for word in one:
        before = 0
        for at, against in enumerate(other, start=1):
            before, best[at] = best[at], before + 1 if word == against else max(best[at], best[at - 1])
    return best[-1]


# Prompts.


def held_out_texts(folder: Path, tokenizer: Any) -> list[list[int]]:
    """Conversations of GPTeacher's files that the demo model's training held out, as it writes them; see
    models/demo_corpus.py. Raises InvalidRequest where there are none.
    """
    rng, texts = Random(_TRAINING["seed"]), list[list[int]]()
    for path in sorted(folder.glob("*.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))
        order = list(range(len(rows)))
        rng.shuffle(order)
        for number in order[: int(len(rows) * _TRAINING["held_out_share"])]:
            row = rows[number]
            request = f"{row['instruction']}\n{row['input']}".strip()
            texts.append(_written(tokenizer, [(request, row["response"].strip())]))
    if not texts:
        raise InvalidRequest(f"{folder}: no *.json file of GPTeacher's; see --data")
    return texts


def drawn_tasks(tokenizer: Any, count: int) -> list[Task]:
    """Tasks that the demo model has learned to answer, drawn anew, each the second of two turns."""
    module, rng, tasks = _demo_tasks(), Random(20_261_126), list[Task]()
    facts, names = module.load_facts(), list(module.TASKS)
    weights = [weight for _, weight in module.TASKS.values()]
    for _ in range(count):
        before, (request, answer) = (module.TASKS[name][0](rng, facts) for name in rng.choices(names, weights, k=2))
        context = _role(tokenizer, "system", rng.choice(facts["system_prompts"])) + _written(tokenizer, [before])
        prompt = [*context, *_role(tokenizer, "user", request), tokenizer.convert_tokens_to_ids(_ROLES["assistant"])]
        tasks.append(Task(prompt, answer.strip()))
    return tasks


def _demo_tasks() -> ModuleType:
    """The tasks are the demo model's, in a script beside it, not in a package."""
    spec = importlib.util.spec_from_file_location("demo_tasks", PROJECT / "models" / "demo_tasks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _written(tokenizer: Any, turns: list[tuple[str, str]]) -> list[int]:
    return [
        token
        for request, answer in turns
        for role, text in (("user", request), ("assistant", answer))
        for token in _role(tokenizer, role, text)
    ]


def _role(tokenizer: Any, role: str, text: str) -> list[int]:
    start, end = (tokenizer.convert_tokens_to_ids(_ROLES[each]) for each in (role, "end"))
    return [start, *tokenizer.encode(text, add_special_tokens=False), end]


# The engines.


@contextmanager
def _engine(name: str) -> Iterator[Connection]:
    """A process with an instance's engine and its KV transfers, which answers orders; it ends with the context."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with spawned(_serve, name, port, end_s=20.0) as pipe:
        if not pipe.poll(_START_S):
            raise Unavailable(f"{name}: no engine after {_START_S:.0f} s")
        if failure := pipe.recv():
            raise Unavailable(f"{name}: {failure}")
        yield pipe


def _serve(pipe: Connection, name: str, port: int) -> None:
    os.environ |= {  # as in a worker
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from services.worker.settings import WorkerSettings

    settings = WorkerSettings(
        instance_id=name,
        model=str(PROJECT / "models" / "demo"),
        rpc_port=1,
        http_port=1,
        kv_port=port,
        monitor_url="http://127.0.0.1:1",
        heartbeat_address="tcp://127.0.0.1:1",
        broadcast_address="tcp://127.0.0.1:1",
        kv_cache_bytes=32 << 20,
        lossy_kv=True,
        cluster_token="bench",
    )
    asyncio.run(_answer(pipe, settings))


async def _answer(pipe: Connection, settings: Any) -> None:
    from services.worker.engine_start import start_engine
    from shared.runtime.tasks import background

    async with AsyncExitStack() as stack:
        try:
            engine, _, port = await start_engine(settings, os.getpid(), lambda: None, lambda _: None, stack)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
            return
        tasks = await stack.enter_async_context(background())
        port.start(tasks)
        pipe.send("")
        while (order := await asyncio.to_thread(pipe.recv)) is not None:
            pipe.send(await _answered(engine, port, order))


async def _answered(engine: Any, port: Any, order: Order) -> Result | str:
    """A result, or the error."""
    from services.worker.engines.base import FAILED, EngineRequest
    from shared.domain.job import Generation, JobView
    from shared.domain.kv import TransferOutcome
    from shared.wire.messages import decode_rows

    stops = [] if order.forced else [_END]
    sampling = {"temperature": 0.0, "ignore_eos": True, "stop_token_ids": stops, "logprobs": 0}  # vLLM's SamplingParams
    request = EngineRequest(
        request_id=order.salt,
        job=JobView(order.salt, len(order.prompt), order.most),
        prompt_token_ids=order.prompt,
        generation=Generation(msgspec.msgpack.encode(sampling), 0.0, cache_salt=order.salt),
        max_tokens=order.most,
        first_token_only=bool(order.transfer_id),
        export_to=order.transfer_id,
        export_codec=order.codec,
        import_from=order.handle,
        forced_tokens=order.forced,
    )
    expected = port.expect(order.handle) if order.handle is not None else None
    ended, tokens, logprobs = asyncio.Event(), list[int](), list[float]()
    failed: list[str] = []

    def sink(step: Any) -> None:
        tokens.extend(step.tokens)
        if step.logprobs:
            rows = decode_rows(step.logprobs)
            values = array("f", rows.values)
            logprobs.extend(values[:: rows.candidates])  # the produced token is each row's first
        if step.finish_reason:
            if step.finish_reason in FAILED:
                failed.append(f"{step.finish_reason}: {step.stop_reason}")
            ended.set()

    engine.submit(request, sink)
    await ended.wait()
    wire_bytes = 0
    if expected is not None:
        report = await port.import_report(expected)
        port.end(expected)
        wire_bytes = report.wire_bytes
        if report.outcome is not TransferOutcome.PULLED:
            failed.append(f"KV was not pulled: {report.outcome} {report.error}")
    if failed:
        return "; ".join(failed)
    handle = port.handle(order.transfer_id, len(order.prompt), order.codec) if order.transfer_id else None
    return Result(tokens, logprobs, handle, wire_bytes)
