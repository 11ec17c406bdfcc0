"""`polyphase bench kv_memory`: KV memory, and KV on the wire, of models most of whose layers have a sliding window.

Tiny random models with the layers and windows of gpt-oss-20b and Gemma-3-27b answer one request: on a plain vLLM
engine, whose hybrid KV cache manager keeps of a window only what is still read, and after a hand-over between two
engines with our connector, with that manager and (*before*) without it, where every layer keeps all tokens. The blocks
in use are counted after each step is scheduled, from the admission of the prompt to the last token of the answer.
"""

import asyncio
import re
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.engine_client import Engine, exporting, importing, prompts
from benchmarks.model_families import FAMILIES, Family, make_model
from benchmarks.results import Aim, Result, aim, at_most, merged, progress, result
from services.worker.kv.rank_messages import PullEnded

WANT = 1.1  # of plain vLLM's, at most
NEW_TOKENS = 16
KV_BYTES = 256 << 20
BLOCK = 32
ANSWER_S = 300.0
MB = 1e6


@dataclass(frozen=True, slots=True)
class Case:
    """A model, the tokens of its prompt, and those of it that an engine computes in one step."""

    family: Family
    tokens: int = 8192
    chunk: int = 1024

    @classmethod
    def of(cls, name: str, layers: Sequence[str], window: int, tokens: int = 8192, chunk: int = 1024) -> "Case":
        """The family with these layers (transformers' `layer_types`), in bfloat16 as the models that people run."""
        own = {
            "num_hidden_layers": len(layers),
            "layer_types": list(layers),
            "sliding_window": window,
            "max_position_embeddings": 131_072,
        }
        family = FAMILIES[name]
        return cls(replace(family, config={**family.config, **own}, dtype="bfloat16"), tokens, chunk)

    @property
    def key(self) -> str:
        return re.sub(r"[^a-z0-9]+", "_", self.family.name.lower())


WINDOW, FULL = "sliding_attention", "full_attention"
CASES = (
    Case.of("gpt-oss", [WINDOW, FULL] * 12, 128),
    Case.of("Gemma-3", ([WINDOW] * 5 + [FULL]) * 10 + [WINDOW] * 2, 1024),
)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the blocks that a request had: at the peak, and in its last step. room: bytes of all blocks."""

    peak: int
    last: int
    room: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    """wire_bytes: of a pull of all tokens."""

    tokens: list[int]
    prefill: Memory
    decode: Memory
    wire_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """before: without the hybrid KV cache manager."""

    tokens: list[int]
    plain: Memory
    now: HandedOver
    before: HandedOver


def run_kv_memory_bench(cases: Sequence[Case] = CASES) -> Result:
    parts = []
    for case in cases:
        began_mono = time.monotonic()
        parts.append(report(case, asyncio.run(measure(case))))
        progress(f"{case.family.name}: measured in {time.monotonic() - began_mono:.0f} s")
    sizes = [f"{each.family.name} {each.tokens} tokens in chunks of {each.chunk}" for each in cases]
    notes = [
        f"one request on each engine; prompts: {', '.join(sizes)}; answers of {NEW_TOKENS} tokens, blocks of {BLOCK}",
        f"an engine has {KV_BYTES / MB:.0f} MB of KV; before: without vLLM's hybrid KV cache manager",
    ]
    return merged(*parts, result({}, notes=notes))


def report(case: Case, measured: Measured) -> Result:
    plain, now, before = measured.plain, measured.now, measured.before
    memories = {
        "plain": plain,
        "prefill": now.prefill,
        "decode": now.decode,
        "prefill_before": before.prefill,
        "decode_before": before.decode,
    }
    pulls = {"decode": now, "decode_before": before}
    figures: dict[str, float] = {}
    rows = []
    for name, memory in memories.items():
        row = {"model": case.family.name, "engine": name.replace("_", ", ")}
        figures[f"{case.key}_{name}_peak_mb"] = round(memory.peak / MB, 2)
        figures[f"{case.key}_{name}_peak_share"] = round(memory.peak / memory.room, 4)
        row |= {"peak, MB": f"{memory.peak / MB:.1f}", "of all KV": f"{memory.peak / memory.room:.1%}"}
        row |= {"while decoding, MB": "", "pulled, MB": ""}
        if not name.startswith("prefill"):
            figures[f"{case.key}_{name}_last_mb"] = round(memory.last / MB, 2)
            row["while decoding, MB"] = f"{memory.last / MB:.1f}"
        if name in pulls:
            figures[f"{case.key}_{name}_pulled_mb"] = round(pulls[name].wire_bytes / MB, 2)
            row["pulled, MB"] = f"{pulls[name].wire_bytes / MB:.1f}"
        rows.append(row)
    same = [name for name, each in {"now": now, "before": before}.items() if each.tokens == measured.tokens]
    aims: dict[str, Aim] = {
        f"{case.key}_prefill_peak_over_plain": at_most(WANT, now.prefill.peak / plain.peak),
        f"{case.key}_decode_peak_over_plain": at_most(WANT, now.decode.peak / plain.peak),
        f"{case.key}_decode_last_over_plain": at_most(WANT, now.decode.last / plain.last),
        f"{case.key}_pulled_over_plain_last": at_most(WANT, now.wire_bytes / plain.last),
        f"{case.key}_tokens_of_plain": aim("now, before", ", ".join(same) or "none", len(same) == 2),
    }
    return {**result(figures, aims), "tables": {"KV of one request": rows}}


async def measure(case: Case) -> Measured:
    with tempfile.TemporaryDirectory(prefix="polyphase-memory-") as folder:
        model = await asyncio.to_thread(make_model, case.family, Path(folder))
        (text,) = prompts(lengths=(case.tokens,))
        async with AsyncExitStack() as stack:
            plain = _engine(case, model, "plain", stack, connector=False)
            await plain.__aenter__()
            tokens = await plain.generate(text, NEW_TOKENS)
            memory = await _memory(plain)
        now = await _handed_over(case, model, text)
        before = await _handed_over(case, model, text, disable_hybrid_kv_cache_manager=True)
        return Measured(tokens, memory, now, before)


async def _handed_over(case: Case, model: Path, text: list[int], **options: Any) -> HandedOver:
    """The prefill engine's first token, and the decode engine's after it. Raises RuntimeError when a pull fails: the
    engine would compute the prompt itself.
    """
    async with AsyncExitStack() as stack:
        p, d = (_engine(case, model, name, stack, **options) for name in ("p", "d"))
        for engine in (p, d):
            await engine.__aenter__()
        transfer_id = uuid.uuid4().hex
        first = await p.generate(text, 1, exporting(transfer_id))
        handle = importing(p.handle(transfer_id, len(text)))
        rest = await d.generate(text + first, NEW_TOKENS - 1, handle)
        pulled: PullEnded = await d.wait_event(PullEnded, transfer_id)
        if not pulled.ok or pulled.tokens != len(text):
            raise RuntimeError(f"the pull of {len(text)} tokens failed: {pulled}")
        return HandedOver(first + rest, await _memory(p), await _memory(d), pulled.wire_bytes)


def _engine(case: Case, model: Path, name: str, stack: AsyncExitStack, **options: Any) -> Engine:
    engine = Engine(
        name,
        model,
        dtype=case.family.dtype,
        block_size=BLOCK,
        max_model_len=case.tokens + 2 * NEW_TOKENS,
        max_num_batched_tokens=case.chunk,
        kv_cache_memory_bytes=KV_BYTES,
        answer_s=ANSWER_S,
        extra={"staging_bytes": KV_BYTES},
        **options,
    )
    stack.push_async_exit(engine)  # also where another one does not start
    stack.callback(engine.kill)  # at once, without a last message
    return engine


async def _memory(engine: Engine) -> Memory:
    levels = await engine.ask("levels")
    size = levels["block_bytes"]
    return Memory(levels["peak_blocks"] * size, levels["last_blocks"] * size, levels["blocks"] * size)
