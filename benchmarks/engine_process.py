"""One vLLM engine with our connector in a process of its own, driven over a ZeroMQ PAIR socket by JSON messages.

Tokens in, tokens out: no tokenizer, no front end. `Engine` in `engine_client.py` is the other side.
"""

import base64
import ctypes
import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # as in a worker
os.environ.update(
    # As in a worker: on a CPU, a C++ compiler takes up to a minute for sampling helpers.
    {"TORCHDYNAMO_DISABLE": "1"} if os.environ.get("POLYPHASE_TEST_DEVICE", "cpu") == "cpu" else {},
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
)

import msgspec
import torch
import zmq
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.executor import Executor
from vllm.v1.request import Request

from services.worker.engines.base import CacheExport, Left
from services.worker.engines.vllm import MediaFeatures
from services.worker.engines.vllm_exports import NEVER, CacheExports
from services.worker.engines.vllm_patches import (
    RESUMED,
    add_resumed,
    make_stage_buffers,
    overlap_on_cpu,
    resume_requests,
)
from services.worker.engines.vllm_start import CPU_WORKER, kept_kv, start_host_tier
from services.worker.kv.vllm.layers import stages_of
from services.worker.settings import PP_LAYERS
from shared.domain.instance import KvKind
from shared.domain.job import Generation

DEVICE = os.environ.get("POLYPHASE_TEST_DEVICE", "cpu")  # as torch calls it
if DEVICE == "cpu":
    from services.worker.engines import vllm_cpu_worker  # noqa: F401  # what an engine would import at its start

PR_SET_PDEATHSIG = 1

gc.collect()
gc.freeze()  # engines are forks of a process that has imported this; vLLM collects five times at a start


class Driver:
    """Answers requests on the socket and steps the engine while it has work."""

    def __init__(self, address: str, options: dict[str, Any], extra: dict[str, Any] | None) -> None:
        transfer, host_kv_bytes = None, options.pop("host_kv_bytes", 0)
        disk_kv_bytes, disk_folder = options.pop("disk_kv_bytes", 0), options.pop("disk_folder", None)
        if extra is not None:
            transfer = KVTransferConfig(
                kv_connector="PolyphaseConnector",
                kv_connector_module_path="services.worker.kv.vllm.connector",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=extra,
            )
        own = {"skip_tokenizer_init": True, "enforce_eager": True, "kv_transfer_config": transfer}
        if DEVICE == "cpu":
            own["worker_cls"] = CPU_WORKER
        config = EngineArgs(**(own | options)).create_engine_config()
        if DEVICE == "cpu":
            # Ranks are forks, too: vLLM's CPU platform would spawn them, and each would import vLLM anew.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        if options.get("async_scheduling") and DEVICE == "cpu":
            overlap_on_cpu(config)
        speculates = config.speculative_config is not None
        self.client = InprocClient(config, Executor.get_class(config), log_stats=speculates)
        make_stage_buffers(self.client.engine_core)
        resume_requests(self.client.engine_core)
        self.idle_ms = 4 if config.parallel_config.world_size > 1 else 0  # as in a worker's engine
        self.scheduler = self.client.engine_core.scheduler
        self.media = MediaFeatures.of_engine(config, self.scheduler)
        self.tokens: dict[str, list[int]] = {}
        self.exports = CacheExports(self.client.engine_core)
        self.host = None
        if host_kv_bytes:
            self.host = start_host_tier(self.client.engine_core, host_kv_bytes, disk_kv_bytes, disk_folder)
        self.exports.tier = self.host
        self.at_tokens: dict[str, tuple[int, Callable[[], None]]] = {}  # by request, what is to be done at so many
        self.preemptions = self.drafted = self.accepted = 0
        preempt = self.scheduler._preempt_request

        def counted(*arguments: Any, **more: Any) -> None:
            self.preemptions += 1
            preempt(*arguments, **more)

        self.scheduler._preempt_request = counted
        cache = self.scheduler.kv_cache_config  # the size of each of its tensors is that of all KV
        self.block_bytes = cache.kv_cache_tensors[0].size // cache.num_blocks
        self.peak_blocks = self.last_blocks = 0
        schedule = self.scheduler.schedule

        def watched(*arguments: Any, **more: Any) -> Any:
            step = schedule(*arguments, **more)
            used = self.used_blocks
            self.peak_blocks = max(self.peak_blocks, used)
            if step.total_num_scheduled_tokens:
                self.last_blocks = used
            return step

        self.scheduler.schedule = watched
        self.socket = zmq.Context.instance().socket(zmq.PAIR)
        self.socket.connect(address)
        asynchronous = bool(config.scheduler_config.async_scheduling)
        ranks = self.client.engine_core.model_executor
        stored = ranks.collective_rpc(kept_kv)[0][1] if transfer is not None else ""
        self.send(op="ready", async_scheduling=asynchronous, stages=stages_of(config), kv_dtype=stored)

    def send(self, **message: Any) -> None:
        self.socket.send(json.dumps(message).encode())

    def run(self) -> None:
        while True:
            busy = self.busy
            while self.socket.poll((0 if self.scheduler.running else self.idle_ms) if busy else 20):
                message = json.loads(self.socket.recv())
                if message["op"] == "stop":
                    self.client.shutdown()
                    return
                getattr(self, "do_" + message.pop("op"))(**message)
                busy = self.busy
            self.exports.advance()
            if busy:
                self.step()

    @property
    def used_blocks(self) -> int:
        """By requests: neither free, nor vLLM's block for tokens that are not kept."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_requests() or self.client.engine_core.batch_queue)

    def step(self) -> None:
        outputs = self.client.get_output()
        if outputs.scheduler_stats is not None and (drafts := outputs.scheduler_stats.spec_decoding_stats):
            self.drafted += drafts.num_draft_tokens
            self.accepted += drafts.num_accepted_tokens
        for output in outputs.outputs:
            tokens = self.tokens.setdefault(output.request_id, [])
            tokens.extend(output.new_token_ids)
            at, act = self.at_tokens.get(output.request_id, (0, None))
            if act is not None and len(tokens) >= at:
                del self.at_tokens[output.request_id]
                act()
            if output.finish_reason is not None:
                del self.tokens[output.request_id]
                self.send(op="done", id=output.request_id, tokens=tokens, reason=str(output.finish_reason))

    def do_generate(
        self,
        id: str,
        prompt: list[int],
        max_tokens: int,
        kv: dict[str, Any] | None,
        salt: str | None,
        adapter: list[Any] | None,
        media: str,
        known: list[int],
    ) -> None:
        features = None
        if media:
            generation = msgspec.msgpack.decode(base64.b64decode(media), type=Generation)
            features = self.media.features(generation, len(prompt))
        extra: dict[str, Any] = {"kv_transfer_params": kv} if kv else {}
        if known:
            extra[RESUMED] = {"tokens": known}
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra or None)
        request = EngineCoreRequest(
            request_id=id,
            prompt_token_ids=prompt,
            mm_features=features,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=LoRARequest(*adapter) if adapter is not None else None,
            cache_salt=salt,
            data_parallel_rank=None,
        )
        if known:
            add_resumed(self.client.engine_core, request)
        else:
            self.client.add_request(request)

    def do_export(self, transfer_id: str, start: int, prompt: list[int], salt: str | None, room: bool) -> None:
        """What the prefix cache has of a prompt. room: whether there is any for it."""
        params = SamplingParams(temperature=0, max_tokens=1)
        request = EngineCoreRequest(transfer_id, prompt, None, params, None, time.time(), None, salt, None)
        found = Request.from_engine_core_request(request, self.client.engine_core.request_block_hasher)
        export = export_of(transfer_id, start, room)
        while (tokens := self.exports.export_cached(found, export)) is None:  # a disk reads for it
            if self.busy:
                self.step()
            else:
                time.sleep(0.001)
        self.send(op="answer", tokens=tokens)

    def do_export_running(self, id: str, transfer_id: str, start: int, at: int, until: int) -> None:
        """What is computed of a request once it has given `at` tokens. It goes on, and waits at `until` tokens."""

        def export() -> None:
            tokens = self.exports.export_running(id, export_of(transfer_id, start))
            self.do_hold(id, until)
            self.send(op="answer", tokens=tokens)

        self.at_tokens[id] = (at, export)

    def do_hold(self, id: str, at: int) -> None:
        """A request waits once it has given `at` tokens."""

        def wait() -> None:
            self.scheduler.requests[id].next_decode_eligible_step = NEVER

        self.at_tokens[id] = (at, wait)

    def do_leave(self, id: str, transfer_id: str, start: int, at: int) -> None:
        """A request ends once it has given `at` tokens, and its KV is exported."""

        def left(result: Left | None) -> None:
            if result is None:
                self.send(op="answer", tokens=0, output=[])
                return
            self.client.abort_requests([id])
            self.send(op="answer", tokens=result.tokens, output=self.tokens.pop(id))

        def leave() -> None:
            self.exports.leave(id, export_of(transfer_id, start), left)

        if len(self.tokens.get(id, ())) >= at:
            self.at_tokens.pop(id, None)
            leave()
        else:
            self.at_tokens[id] = (at, leave)

    def do_abort(self, id: str) -> None:
        self.client.abort_requests([id])
        self.tokens.pop(id, None)
        self.at_tokens.pop(id, None)

    def do_reset(self) -> None:
        self.send(op="answer", ok=self.client.reset_prefix_cache())

    def do_fault(self, zero: bool, corrupt: bool, stage: int | None = None, kind: str = "") -> None:
        """`kind`: of the components whose imports are zeroed, all by default."""
        kinds = {kind} if kind else set(KvKind)

        def inject(worker: Any) -> None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group
            from vllm.distributed.parallel_state import get_pp_group

            meant = stage is None or get_pp_group().rank_in_group == stage
            connector = get_kv_transfer_group().worker
            connector.zero_imports = kinds if zero and meant else set()
            connector.faults.corrupt = corrupt and meant
            if connector.host is not None:
                connector.host.zero = zero and meant

        self.client.engine_core.model_executor.collective_rpc(inject)
        self.send(op="answer")

    def do_host(self) -> None:
        """What its host tier has done."""
        assert self.host is not None
        self.send(op="answer", **msgspec.to_builtins(self.host.stats()))

    def do_unscale(self) -> None:
        """From now on, transfers take the scales of eight bits for 1. The model's attention keeps its own."""

        def forget(worker: Any) -> None:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            for component in get_kv_transfer_group().worker._rank.components:
                shape = component.shape  # the endpoint's own, too
                object.__setattr__(shape, "scales", tuple((1.0,) * len(each) for each in shape.scales))

        self.client.engine_core.model_executor.collective_rpc(forget)
        self.send(op="answer")

    def do_devices(self) -> None:
        """On which devices the engine's process and those of its ranks have contexts."""
        ranks = self.client.engine_core.model_executor.collective_rpc(devices_of)
        self.send(op="answer", engine=devices_of(), ranks=ranks)

    def do_levels(self) -> None:
        """peak_blocks: in use after any step was scheduled; last_blocks: after the last one that computed tokens."""
        self.send(
            op="answer",
            free=self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            blocks=self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1,
            block_bytes=self.block_bytes,
            peak_blocks=self.peak_blocks,
            last_blocks=self.last_blocks,
            requests=len(self.scheduler.requests),
            preemptions=self.preemptions,
            drafted=self.drafted,
            accepted=self.accepted,
            encoded=len(self.scheduler.encoder_cache_manager.cached),
            cpu_s=time.process_time(),
            now_s=time.monotonic(),
        )


def export_of(transfer_id: str, start: int, room: bool = True) -> CacheExport:
    """One for which there is always room, or never."""
    return CacheExport(transfer_id, start, announce=lambda _: None, has_room=lambda: room)


def devices_of(worker: Any = None) -> dict[str, Any]:
    """Of this process: the device of its rank, and those on which it has a context. AMD's runtime does not tell."""
    device = getattr(worker, "device", None)
    seen = range(torch.cuda.device_count() if DEVICE == "cuda" and torch.version.hip is None else 0)
    return {
        "pid": os.getpid(),
        "own": device.index if device is not None and device.type == "cuda" else None,
        "contexts": [number for number in seen if torch._C._cuda_hasPrimaryContext(number)],  # type: ignore[attr-defined]
    }


def own_process(log: str) -> None:
    """What a fork does first: a group of its own, what it prints goes to `log`, and it ends with its parent."""
    os.setsid()
    with Path(log).open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    faulthandler.enable()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # its parent may be killed: an engine must not outlive it
    threading.Thread(target=_end_with_client, daemon=True).start()


def _end_with_client() -> None:
    """A fork server, which is the parent then, lives as long as its forks."""
    client = multiprocessing.parent_process()
    if client is not None:
        client.join()
        os.killpg(0, signal.SIGKILL)


def run(log: str, address: str, options: dict[str, Any], extra: dict[str, Any] | None, layers: tuple[int, ...]) -> None:
    """Drive an engine until told to stop; what it prints goes to `log`. `layers` of its stages, if vLLM is told."""
    own_process(log)
    if layers:
        os.environ[PP_LAYERS] = ",".join(map(str, layers))
    if DEVICE == "cpu":
        torch.cpu._init_amx()  # see connector_worker; engines without our connector need it too
    Driver(address, options, extra).run()
