"""The connector's half in the scheduler: decides, with blocks in hand, what each step exports and imports."""

import logging
import math
from dataclasses import dataclass

import msgspec
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from services.worker.kv.errors import KvFault, lossy_salt
from services.worker.kv.vllm.metadata import (
    ConnectorSettings,
    ExportChunk,
    ExportParams,
    ImportSkip,
    ImportStart,
    StepMetadata,
    TransferParams,
)
from shared.domain.kv import KvHandle

_log = logging.getLogger(__name__)
_STAGED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass(slots=True)
class _Export:
    params: ExportParams
    prompt_tokens: int
    staged_tokens: int = 0


@dataclass(slots=True)
class _Import:
    handle: KvHandle
    timeout_s: float
    error: str  # why it is not even tried, or empty
    decided: bool = False  # at most one remote try: what follows a failure or a preemption is computed here
    pulling: bool = False
    wanted_tokens: int = 0


class SchedulerHalf:
    """State of the requests that export or import, by the engine's request id."""

    def __init__(self, settings: ConnectorSettings, batches: int) -> None:
        """`batches`: how many the engine has under way at once."""
        self._settings = settings
        self._batches = batches
        self._empty_steps = 0  # in a row
        self._exports: dict[str, _Export] = {}
        self._imports: dict[str, _Import] = {}
        self._next = StepMetadata()

    def add(self, request: Request) -> None:
        """A request arrives. Parameters that cannot be understood are as good as none: the engine computes
        all.
        """
        if not request.kv_transfer_params:
            return
        try:
            params = msgspec.convert(request.kv_transfer_params, TransferParams)
        except msgspec.ValidationError as error:
            _log.error("request %s has bad kv_transfer_params: %s", request.request_id, error)
            return
        if params.export is not None:
            self._exports[request.request_id] = _Export(params.export, request.num_prompt_tokens)
        if params.import_ is not None:
            timeout_s = params.deadline_s if params.deadline_s is not None else math.inf
            objection = self._objection(request, params.import_)
            self._imports[request.request_id] = _Import(params.import_, timeout_s, objection)

    def _objection(self, request: Request, handle: KvHandle) -> str:
        if handle.fingerprint != self._settings.fingerprint:
            return KvFault.FINGERPRINT.value
        if handle.codec.lossy and request.cache_salt != lossy_salt(handle.transfer_id):
            return KvFault.UNSALTED.value
        return "" if handle.endpoints and handle.tokens > 0 else KvFault.INVALID.value

    def external_tokens(self, request: Request, computed_tokens: int) -> int:
        """Tokens that an import can add to `computed_tokens`. Free of side effects that matter: may be called
        often.
        """
        wanted = self._imports.get(request.request_id)
        if wanted is None or wanted.decided or wanted.error:
            return 0
        wanted.wanted_tokens = max(0, self._end(request, wanted) - computed_tokens)
        return wanted.wanted_tokens

    def _end(self, request: Request, wanted: _Import) -> int:
        return min(wanted.handle.tokens, int(request.num_prompt_tokens))

    def allocated(self, request: Request, blocks: KVCacheBlocks, external_tokens: int) -> None:
        """Blocks are there; `external_tokens` of them wait for an import."""
        wanted = self._imports.get(request.request_id)
        if wanted is None or wanted.decided:
            return
        wanted.decided = True
        if external_tokens == 0:
            error = wanted.error or (KvFault.SKIPPED.value if wanted.wanted_tokens else "")
            self._next.skips.append(ImportSkip(wanted.handle, error))
            return
        wanted.pulling = True
        end = self._end(request, wanted)
        self._next.imports.append(
            ImportStart(
                request.request_id,
                wanted.handle,
                end - external_tokens,
                end,
                list(blocks.get_block_ids()[0]),
                wanted.timeout_s,
            )
        )

    def step(self, output: SchedulerOutput) -> StepMetadata:
        """What the workers do in this step."""
        step, self._next = self._next, StepMetadata()
        self._empty_steps = 0 if output.total_num_scheduled_tokens else self._empty_steps + 1
        step.idle = self._empty_steps >= self._batches  # before, ranks may wait for each other in an earlier step
        if self._exports:
            starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
            cached = output.scheduled_cached_reqs
            starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            for request_id, tokens in output.num_scheduled_tokens.items():
                chunk = self._chunk(request_id, starts[request_id] + tokens, output)
                if chunk is not None:
                    step.exports.append(chunk)
        return step

    def _chunk(self, request_id: str, computed_tokens: int, output: SchedulerOutput) -> ExportChunk | None:
        """What is new to the transfer once this step has computed up to `computed_tokens`.

        A preempted request starts again below what is staged already. That stays right, since the same tokens
        have the same KV, so only the rest is staged, from the blocks that the request has by then.
        """
        export = self._exports.get(request_id)
        end = min(computed_tokens, export.prompt_tokens) if export else 0
        if export is None or end <= export.staged_tokens:
            return None
        state = output.kv_connector_block_state
        assert state is not None, "vLLM resolves the blocks of every scheduled request"
        blocks = list(state.resolve_block_ids(request_id)[0])
        start, export.staged_tokens = export.staged_tokens, end
        params = export.params
        return ExportChunk(params.transfer_id, start, end, export.prompt_tokens, blocks, params.codec)

    def received(self, request_ids: set[str]) -> None:
        """Imports of these have ended on all ranks."""
        for request_id in request_ids:
            if request_id in self._imports:
                self._imports[request_id].pulling = False

    def finished(self, request: Request) -> None:
        """A request ends. Its import stops; what it exported stays only if it ended well."""
        wanted = self._imports.pop(request.request_id, None)
        if wanted is not None and wanted.pulling:
            self._next.cancels.append(wanted.handle.transfer_id)
        elif wanted is not None and not wanted.decided:
            self._next.skips.append(ImportSkip(wanted.handle, KvFault.CANCELLED.value))
        export = self._exports.pop(request.request_id, None)
        if export is not None and request.status not in _STAGED:
            self._next.drops.append(export.params.transfer_id)
