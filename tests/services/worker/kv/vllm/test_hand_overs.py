"""Greedy tokens after a hand-over equal those of one plain engine, between engines of unlike block sizes, ranks, stages
and precisions. float32: across tensor-parallel degrees only that is exact.

Tests of identity count pulls: a silent recomputation would be identical, too. The last test kills an engine.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from services.worker.kv.rank_links import PullEnded, Release, StagedChunk, Stats
from services.worker.kv.wire.nixl_agent import installed
from shared.domain.kv import Codec
from tests.gpu.engines import BACKENDS, PAIRS, SHARE
from tests.services.worker.kv.rig import prefetch
from tests.services.worker.kv.vllm.engine_client import (
    NEW_TOKENS,
    Engine,
    emptied,
    exporting,
    handed_over,
    identical,
    importing,
    prompts,
)
from tests.services.worker.kv.vllm.two_engines import Found, hand_overs, refused_backend, show, strays_of
from tests.tiny_models import make_gpt_oss, make_llama, make_qwen3

TOKEN_BYTES = 3 * 2 * 2 * 32 * 4
OVERLAPPING: dict[str, Any] = {"async_scheduling": True}
LOSSY: dict[str, Any] = {"extra": {"lossy": True}}
ENGINES: dict[str, dict[str, dict[str, Any]]] = {
    "blocks": {"p": LOSSY, "d": {"block_size": 128, **LOSSY}},
    "overlapping": {"p": {**LOSSY, **OVERLAPPING}, "d": {"block_size": 128, **LOSSY, **OVERLAPPING}},
    "nixl": {"p": {"scheme": "nixl"}, "d": {"block_size": 128, "scheme": "nixl"}},
    "ranks": {
        "one": {},
        "two": {"tp": 2, "block_size": 64, **OVERLAPPING},
        "half": {"dtype": "bfloat16", **OVERLAPPING},
        "wide": {"dtype": "bfloat16", "block_size": 128, **OVERLAPPING},
        "tight": {"kv_cache_memory_bytes": 1536 * TOKEN_BYTES, **OVERLAPPING},  # room for about 1500 tokens
    },
    "stages": {"one": {}, "front": {"pp": 2}, "back": {"pp": 2, "layers": (1, 2), "block_size": 64}},
    "grid": {
        "two": {"tp": 2},
        "line": {"pp": 2, "layers": (1, 2)},
        "grid": {"tp": 2, "pp": 2, "block_size": 64},  # stages of 2 + 1 layers
    },
}
engines = [pytest.mark.slow, pytest.mark.alone, pytest.mark.asyncio(loop_scope="module")]


def on(*clusters: str) -> pytest.MarkDecorator:
    """The test runs with each of these clusters."""
    skip = pytest.mark.skipif(not installed(), reason="nixl is not installed")
    values = [pytest.param(each, marks=[*engines, skip] if each == "nixl" else engines) for each in clusters]
    return pytest.mark.parametrize("cluster", values, indirect=True)


class Cluster:
    """The engines of a kind, by name, and the tokens of a plain one for some prompts."""

    def __init__(self, engines: dict[str, Engine], plain: Engine) -> None:
        self.engines = engines
        self.plain = plain
        self.prompts = prompts() if "grid" not in engines else prompts()[-8:]
        self.references: list[list[int]] = []

    def __getattr__(self, name: str) -> Engine:
        return self.engines[name]

    @property
    def pair(self) -> tuple[Engine, Engine]:
        """An exporter and an importer, whose ranks or block sizes differ."""
        names = ("front", "back") if "front" in self.engines else ("p", "d")
        return self.engines[names[0]], self.engines[names[1]]

    async def fresh(self) -> None:
        """Forget prefixes and counts."""
        for engine in self.engines.values():
            await engine.ask("reset")
            await engine.ask("fault", zero=False, corrupt=False)
            engine.events.clear()


class Clusters:
    """The cluster that runs: the one that a test asked for last. `conftest` orders the tests by it."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._name = ""
        self._stack = AsyncExitStack()
        self._cluster: Cluster | None = None

    async def named(self, name: str) -> Cluster:
        if self._cluster is None or name != self._name:
            await self.stop()
            self._name, self._cluster = name, await self._start(ENGINES[name])
        return self._cluster

    async def stop(self) -> None:
        self._cluster = None
        await self._stack.aclose()

    async def _start(self, engines: Mapping[str, Mapping[str, Any]]) -> Cluster:
        plain = Engine("plain", self._model, dtype="float32", connector=False)
        made = {name: Engine(name, self._model, **({"dtype": "float32"} | each)) for name, each in engines.items()}
        for engine in (plain, *made.values()):
            self._stack.callback(engine.kill)  # also where another one does not start
        for engine in (plain, *made.values()):
            await self._stack.enter_async_context(engine)
        cluster = Cluster(made, plain)
        for engine in made.values():  # the first forward of several ranks takes seconds
            await engine.generate(cluster.prompts[-1], 2)
        cluster.references = [await plain.generate(text, NEW_TOKENS) for text in cluster.prompts]
        assert len({token for reference in cluster.references for token in reference}) > 50  # not degenerate
        return cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clusters(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Clusters]:
    clusters = Clusters(make_llama(tmp_path_factory.mktemp("llama")))
    yield clusters
    await clusters.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(request: pytest.FixtureRequest, clusters: Clusters) -> Cluster:
    return await clusters.named(request.param)


@pytest.mark.parametrize(
    ("cluster", "source", "target"),
    [
        pytest.param(*each.split(), marks=engines, id=each)
        for each in (
            "blocks p d",
            "overlapping p d",
            "overlapping d p",
            "ranks two one",
            "ranks one two",
            "stages one back",
            "stages front one",
            "stages front back",
            "stages back front",
            "grid two line",
            "grid line two",
            "grid grid line",
            "grid line grid",
            "grid two grid",
        )
    ],
    indirect=["cluster"],
)
async def test_all_prompts_at_once(cluster: Cluster, source: str, target: str) -> None:
    """Chunks leave while a prompt is prefilled, from each rank of the exporter to each rank of the importer."""
    await cluster.fresh()
    exporter, importer = cluster.engines[source], cluster.engines[target]
    outputs = await asyncio.gather(*(handed_over(exporter, importer, text) for text in cluster.prompts))
    count, ranks = len(cluster.prompts), len(importer.endpoints)
    assert identical(outputs, cluster.references) == count
    assert await importer.pulls(count * ranks) == {"ok": count * ranks}
    pulled = Counter(event.rank for event in importer.events if isinstance(event, PullEnded))
    assert pulled == dict.fromkeys(range(ranks), count)
    staged = Counter(event.rank for event in exporter.events if isinstance(event, StagedChunk))
    assert set(staged) == set(range(len(exporter.endpoints)))
    assert min(staged.values()) >= count
    await asyncio.gather(emptied(exporter), emptied(importer))


@on("overlapping", "nixl")
async def test_both_directions_at_once(cluster: Cluster) -> None:
    await cluster.fresh()
    p, d = cluster.pair
    pairs = [(p, d), (d, p)]
    outputs = await asyncio.gather(
        *(handed_over(*pairs[index % 2], text) for index, text in enumerate(cluster.prompts))
    )
    assert identical(outputs, cluster.references) == len(cluster.prompts)
    to_p = len(cluster.prompts) // 2
    for engine, count in ((p, to_p), (d, len(cluster.prompts) - to_p)):
        assert await engine.pulls(count) == {"ok": count}
        (stats,) = await engine.control.call(Stats())
        by_nixl = engine.endpoints[0].startswith("nixl")
        carriers = {event.transport for event in engine.events if isinstance(event, PullEnded) and event.tokens}
        assert carriers == {"nixl" if by_nixl else "tcp"}
        assert stats.nixl_received_bytes == (stats.received_bytes if by_nixl else 0)
        assert stats.nixl_failures == 0


@on("blocks", "stages")
async def test_any_split(cluster: Cluster) -> None:
    await cluster.fresh()
    source, target = cluster.pair
    cases = [
        (text, reference, split)
        for text, reference in list(zip(cluster.prompts, cluster.references, strict=True))[1::2]
        for split in sorted({1, len(text) // 3, len(text) * 4 // 5, len(text) - 1} - {0})
    ]
    assert len(cases) >= 35
    for first in range(0, len(cases), 12):
        await target.ask("reset")
        part = cases[first : first + 12]
        outputs = await asyncio.gather(*(handed_over(source, target, text, split=split) for text, _, split in part))
        assert identical(outputs, [reference for _, reference, _ in part]) == len(part)
    # What a neighbour's prompt has left in the cache is not pulled again.
    pulled = await target.pulls(35)
    assert set(pulled) <= {"ok", "cached"}
    assert pulled["ok"] >= 35


@on("overlapping", "stages")
async def test_the_first_token_is_carried(cluster: Cluster) -> None:
    await cluster.fresh()
    source, target = cluster.pair
    outputs = []
    for text in cluster.prompts[-8:]:
        transfer_id = uuid.uuid4().hex
        first = await source.generate(text, 1, exporting(transfer_id))
        handle = source.handle(transfer_id, len(text))
        outputs.append(first + await target.generate(text + first, NEW_TOKENS - 1, importing(handle)))
    assert identical(outputs, cluster.references[-8:]) == 8
    ranks = len(target.endpoints)
    assert await target.pulls(8 * ranks) == {"ok": 8 * ranks}


@on("overlapping", "stages")
async def test_only_tokens_that_are_not_cached_are_pulled(cluster: Cluster) -> None:
    await cluster.fresh()
    source, target = cluster.pair
    text, reference, ranks = cluster.prompts[-1], cluster.references[-1], len(target.endpoints)
    await target.generate(text[:600], 1)
    assert await handed_over(source, target, text) == reference
    assert await target.pulls(ranks) == {"ok": ranks}
    cached = 512 if ranks == 1 else 576  # whole blocks of 128, or 64
    assert {event.tokens for event in target.events if isinstance(event, PullEnded)} == {1000 - cached}
    assert await handed_over(source, target, text, split=500) == reference
    assert await target.pulls(2 * ranks) == {"ok": ranks, "cached": ranks}
    await emptied(source)  # although nothing was pulled


@on("overlapping", "stages")
async def test_a_prefetch_is_joined(cluster: Cluster) -> None:
    await cluster.fresh()
    source, target = cluster.pair
    text, transfer_id = cluster.prompts[-1], uuid.uuid4().hex
    handle = source.handle(transfer_id, len(text))
    await target.control.call(prefetch(handle, keep_s=20))
    await source.generate(text, 1, exporting(transfer_id))
    assert await target.generate(text, NEW_TOKENS, importing(handle)) == cluster.references[-1]
    for rank in range(len(target.endpoints)):
        ended = await target.wait_event(PullEnded, transfer_id, rank)
        assert (ended.ok, ended.prefetched, ended.tokens) == (True, True, 1000)
    await emptied(target)


@pytest.mark.parametrize("stage", [0, 1])
@on("overlapping", "nixl", "stages")
async def test_zeroed_kv_of_either_stage_would_be_noticed(cluster: Cluster, stage: int) -> None:
    await cluster.fresh()
    source, target = cluster.pair
    await target.ask("fault", zero=True, corrupt=False, stage=stage if len(target.endpoints) > 1 else 0)
    outputs = [await handed_over(source, target, text) for text in cluster.prompts]
    pulls = len(cluster.prompts) * len(target.endpoints)
    assert await target.pulls(pulls) == {"ok": pulls}
    assert identical(outputs, cluster.references) < len(cluster.prompts) / 2


@on("overlapping", "nixl", "stages")
async def test_corruption_is_recomputed(cluster: Cluster) -> None:
    await cluster.fresh()
    source, target = cluster.pair
    ranks, count = len(target.endpoints), len(cluster.prompts)
    await source.ask("fault", zero=False, corrupt=True, stage=ranks - 1)
    outputs = await asyncio.gather(*(handed_over(source, target, text) for text in cluster.prompts))
    assert identical(outputs, cluster.references) == count
    failed = count * (1 if ranks == 1 else 2)  # front's second stage has layers of one, back's of both ranks
    assert (await target.pulls(count * ranks))["checksum"] in (count, failed)
    await emptied(source)


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4, Codec.FP8])
@on("overlapping")
async def test_lossy_kv_stays_away_from_exact_requests(cluster: Cluster, codec: Codec) -> None:
    await cluster.fresh()
    p, d = cluster.pair
    texts, references = cluster.prompts[-6:], cluster.references[-6:]
    outputs = [await handed_over(p, d, text, codec=codec) for text in texts]
    assert await d.pulls(6) == {"ok": 6}
    assert all(len(output) == NEW_TOKENS for output in outputs)
    assert identical([await handed_over(p, d, text) for text in texts], references) == 6
    assert await d.pulls(12) == {"ok": 12}
    assert await handed_over(p, d, texts[-1] + [5], codec=codec, salt=False) is not None
    assert await d.pulls(13) == {"ok": 12, "unsalted": 1}


@on("overlapping", "blocks")
async def test_waiting_for_kv_ends_at_its_deadline_and_leaves_the_cpu_alone(cluster: Cluster) -> None:
    await cluster.fresh()
    p, d = cluster.pair
    before = await d.ask("levels")
    handle = p.handle("never", len(cluster.prompts[10]))
    output = await d.generate(cluster.prompts[10], NEW_TOKENS, importing(handle, deadline_s=2.0))
    after = await d.ask("levels")
    assert output == cluster.references[10]
    assert set(await d.pulls()) == {"timeout"}
    assert (after["cpu_s"] - before["cpu_s"]) / (after["now_s"] - before["now_s"]) < 0.6


@on("overlapping", "stages")
async def test_aborts_leave_nothing_behind(cluster: Cluster) -> None:
    await cluster.fresh()
    source, target = cluster.pair
    text = cluster.prompts[-1]
    before = await target.ask("levels")
    handle = source.handle("unstaged", len(text))
    waiting = asyncio.create_task(target.generate(text, 4, importing(handle), request_id="importer"))
    doomed = asyncio.create_task(source.generate(text, 200, exporting("doomed"), request_id="exporter"))
    async with asyncio.timeout(20):
        while (await target.ask("levels"))["free"] == before["free"]:
            await asyncio.sleep(0.01)
    await target.abort("importer")
    for rank in range(len(target.endpoints)):
        await source.wait_event(StagedChunk, "doomed", rank)
        assert (await target.wait_event(PullEnded, "unstaged", rank)).error == "cancelled"
    await source.abort("exporter")
    await emptied(source)
    async with asyncio.timeout(20):
        while (await target.ask("levels"))["free"] != before["free"]:
            await asyncio.sleep(0.01)
    assert (await target.ask("levels"))["requests"] == 0
    for task in (waiting, doomed):
        task.cancel()
    assert (
        await target.generate(text, NEW_TOKENS, importing(source.handle("doomed", len(text)))) == cluster.references[-1]
    )
    assert (await target.pulls(2 * len(target.endpoints)))["released"] == len(target.endpoints)


@on("stages")
async def test_stages_are_read_from_the_engine_and_a_handle_of_others_is_recomputed(cluster: Cluster) -> None:
    await cluster.fresh()
    assert [engine.stages for engine in (cluster.one, cluster.front, cluster.back)] == [(), (2, 1), (1, 2)]
    text, reference = cluster.prompts[-1], cluster.references[-1]
    for stages in ((1, 2), (2, 2)):
        transfer_id = uuid.uuid4().hex
        await cluster.front.generate(text, 1, exporting(transfer_id))
        handle = msgspec.structs.replace(cluster.front.handle(transfer_id, len(text)), stages=stages)
        assert await cluster.one.generate(text, NEW_TOKENS, importing(handle)) == reference
        await cluster.front.control.call(Release(transfer_id))
    assert await cluster.one.pulls(2) == {"invalid_request": 2}


@on("ranks")
async def test_bfloat16_between_block_sizes_and_to_float32(cluster: Cluster) -> None:
    """One after the other: the plain engine's own bfloat16 results depend on what shares a batch (seen with AMX)."""
    await cluster.fresh()
    count = len(cluster.prompts)
    references = [await cluster.half.generate(text, NEW_TOKENS) for text in cluster.prompts]
    for source, target in ((cluster.half, cluster.wide), (cluster.wide, cluster.half)):
        await cluster.fresh()
        outputs = [await handed_over(source, target, text) for text in cluster.prompts]
        assert identical(outputs, references) == count
        assert await target.pulls(count) == {"ok": count}
    outputs = [await handed_over(cluster.half, cluster.one, text) for text in cluster.prompts]
    assert await cluster.one.pulls(count) == {"ok": count}
    firsts = sum(output[0] == reference[0] for output, reference in zip(outputs, cluster.references, strict=True))
    assert firsts > count / 2  # not identical, but the same model


@on("ranks")
async def test_preemption_under_a_tight_kv_space(cluster: Cluster) -> None:
    """Both as importer and as exporter: what was staged or pulled before a preemption stays right."""
    texts = prompts(seed=2, lengths=(300, 310, 320, 330))
    big = [text + text + text[:300] for text in texts]
    for source, target, wanted, tokens in (
        (cluster.one, cluster.tight, texts, 200),
        (cluster.tight, cluster.one, big, NEW_TOKENS),
    ):
        references = [await cluster.plain.generate(text, tokens) for text in wanted]
        await cluster.fresh()
        outputs = await asyncio.gather(*(handed_over(source, target, text, new_tokens=tokens) for text in wanted))
        assert identical(outputs, references) == len(wanted)
        assert await target.pulls(len(wanted)) == {"ok": len(wanted)}
    assert (await cluster.tight.ask("levels"))["preemptions"] > 0


@on("overlapping")
async def test_a_killed_exporter_is_recomputed(cluster: Cluster) -> None:
    """Kills an engine: no test with this cluster may follow."""
    await cluster.fresh()
    p, d = cluster.pair
    text, reference = cluster.prompts[-1], cluster.references[-1]
    await p.generate(text, 1, exporting("orphan"))
    handle = p.handle("orphan", len(text))
    p.kill()
    assert await asyncio.wait_for(d.generate(text, NEW_TOKENS, importing(handle)), 15) == reference
    (code,) = await d.pulls()
    assert code in ("unreachable", "peer_lost")


# What `make gpu-check` runs with engines on GPUs, on the CPU: the same functions, models and checks.


def exact(found: Found) -> None:
    """Greedy tokens of a plain engine, and each KV pulled."""
    print(show(found))
    assert found.distinct > 100
    assert found.one_by_one == found.back == found.of
    assert found.at_once == [found.of] * len(found.at_once)
    assert found.pulls == {"ok": found.wanted}
    assert found.zeroed < found.of / 2
    assert found.prefixes == [True, True]
    assert 0 < found.cached <= 600
    assert found.strays == []


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("make", [make_llama, make_qwen3, make_gpt_oss])
async def test_two_engines_that_schedule_asynchronously_hand_over_the_plain_ones_tokens(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    found = await hand_overs(make(tmp_path), "cpu", dtype="float32")
    exact(found)
    assert found.asynchronous
    assert found.lossy["int8"] > 0.5


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("pair", PAIRS)
async def test_between_ranks_and_stages(pair: str, tmp_path: Path) -> None:
    source, target = ({**each, "async_scheduling": False} for each in PAIRS[pair])  # vLLM's CPU backend cannot
    exact(await hand_overs(make_llama(tmp_path), "cpu", source=source, target=target, lossy=False, dtype="float32"))


def rank(pid: int, own: int | None, *contexts: int) -> dict[str, Any]:
    return {"pid": pid, "own": own, "contexts": list(contexts)}


def test_contexts_on_devices_of_others_are_found() -> None:
    ranks = [rank(11, 0, 0), rank(12, 1, 0, 1)]
    assert strays_of("p", {"engine": rank(10, None), "ranks": ranks}) == [
        "process 12 of p, whose device is 1, has a context on device 0"
    ]
    assert strays_of("p", {"engine": rank(10, None, 0), "ranks": ranks[:1]}) == [
        "process 10 of p, whose device is None, has a context on device 0"
    ]
    assert strays_of("d", {"engine": rank(10, None, 1), "ranks": [rank(10, 1, 1)]}) == []  # the one rank is the engine


def test_a_backend_that_a_gpu_lacks_is_told_from_an_engine_that_fails() -> None:
    log = "ValueError: Selected backend AttentionBackendEnum.FLASHINFER is not valid for this configuration. Reason: "
    error = RuntimeError(f"d died: …\n{log}['sink setting not supported']\nmore")
    assert refused_backend(error) == "['sink setting not supported']"
    with pytest.raises(RuntimeError, match="out of memory"):
        refused_backend(RuntimeError("d died: CUDA out of memory"))


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(("make", "architecture"), [(make_qwen3, "Qwen3"), (make_gpt_oss, "GptOss")])
def test_vllm_accepts_the_arguments_of_each_check(
    make: Callable[[Path], Path], architecture: str, backend: str | None, tmp_path: Path
) -> None:
    """Its own parser and configuration; which backend a device has is known there alone."""
    arguments = {**SHARE, "skip_tokenizer_init": True, "max_model_len": 1280, "block_size": 128}
    config = EngineArgs(model=str(make(tmp_path)), attention_backend=backend, **arguments).create_engine_config()
    assert config.model_config.architecture == f"{architecture}ForCausalLM"
    assert config.attention_config.backend == (AttentionBackendEnum[backend] if backend else None)


def test_the_whole_qwen3_has_the_kv_of_qwen3_0_6b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.tiny_models._saved", lambda path, config, *_: config.save_pretrained(path) or path)
    config = EngineArgs(model=str(make_qwen3(tmp_path, full=True)), skip_tokenizer_init=True).create_model_config()
    shape = config.get_total_num_hidden_layers(), config.get_total_num_kv_heads(), config.get_head_size()
    assert shape == (28, 8, 128)
