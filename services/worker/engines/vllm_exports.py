"""Exports of KV that vLLM's blocks hold already, or the host tier: of prefixes in its cache, and of requests that run.

Between two steps each export is looked up, its blocks are pinned by their reference counts, and the ranks copy them
piece by piece into their staging pools, from where other instances pull them. The engine's thread makes all calls.
While the engine computes, copies take at most `EXPORT_SHARE` of its time, in pieces of about `PIECE_S`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from services.worker.engines.base import CacheExport, Left
from services.worker.engines.vllm_patches import forced_tokens, sampling_state
from services.worker.kv.vllm.connector import ExportChunk, copy_on_rank, drop_on_rank, stage_on_rank
from shared.domain.kv import EXPORT_SHARE
from shared.runtime.logs import get_log

if TYPE_CHECKING:
    from services.worker.kv.disk_store import DiskReport
    from services.worker.kv.vllm.host_store import HostCopies
    from services.worker.kv.vllm.host_tier import HostTier

log = get_log(__name__)
PIECE_S = 0.004  # of the engine's time for the copy of a piece
FIRST_PIECE, MIN_PIECE = 128, 16  # tokens
NEVER = 1 << 62  # a step that does not come


@dataclass(slots=True)
class _Export:
    """Tokens [at, end) of an export are still to be staged, from pinned blocks, one list for each KV cache group."""

    wanted: CacheExport
    at: int
    end: int
    blocks: tuple[Sequence[KVCacheBlock], ...]
    has_room: bool = False


@dataclass(slots=True)
class _Leaving:
    """A request that is to leave the engine once no step has it."""

    wanted: CacheExport
    left: Callable[[Left | None], None]


class CacheExports:
    """The exports of one engine core."""

    def __init__(self, core: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._scheduler = core.scheduler
        self._cache = core.scheduler.kv_cache_manager
        # A state is overwritten as its request goes on: it can be exported only at the end.
        self._has_states = bool(self._cache.kv_cache_config.has_mamba_layers)
        self.tier: HostTier | None = None
        self._clock = clock
        self._exports: list[_Export] = []  # in the order of their arrival
        self._leaving: dict[str, _Leaving] = {}  # by request
        self._again_mono = 0.0  # when the next piece may be copied while the engine computes
        self._token_s = 0.0  # of the last pieces

    def _copy_disk(self, copies: "HostCopies") -> "list[DiskReport | None]":
        reports: list[DiskReport | None] = self._core.model_executor.collective_rpc(copy_on_rank, args=(copies,))
        return reports

    def export_cached(self, request: Request, wanted: CacheExport) -> int | None:
        """Begin to export what the prefix cache has of a request that the engine does not compute. Returns its tokens;
        0: nothing is exported, also where it has no room now: waiting, it would keep its blocks from requests. None:
        blocks are being read from the disk for it, and this is to be called again, or `give_up`.
        """
        if not self._cache.enable_caching or request.skip_reading_prefix_cache or self._has_states:
            return 0
        if self.tier is not None:
            if self.tier.prepares(wanted.transfer_id, request, wanted.start):
                if not self._scheduler.has_requests():  # else the next step does it
                    self.tier.copy_now(self._copy_disk)
                return None
            blocks, tokens = self.tier.exported(request)
            if tokens <= wanted.start:
                self.tier.export_ended(chain(*blocks))
            begun = self._begin(wanted, tokens, tuple(blocks))
        else:
            hit = self._cache.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens)
            begun = self._begin(wanted, hit[1], hit[0])
        if begun and not self._has_room(self._exports[-1]):
            self._unpin(self._exports[-1])
            return 0
        return begun

    def give_up(self, transfer_id: str) -> None:
        """No blocks are wanted any more that are being read for an export."""
        if self.tier is not None:
            self.tier.unprepare(transfer_id)

    def export_running(self, request_id: str, wanted: CacheExport) -> int:
        """Begin to export what is computed of a request, which goes on. Returns its tokens; 0: nothing is exported."""
        request = self._scheduler.requests.get(request_id)
        if request is None or request.status != RequestStatus.RUNNING or self._has_states:
            return 0
        return self._begin(wanted, _computed(request), self._cache.get_blocks(request_id).blocks)

    def leave(self, request_id: str, wanted: CacheExport, left: Callable[[Left | None], None]) -> None:
        """Have a request leave. `left` is called with None where it has ended, has not begun its answer, or still
        generates tokens again that its client has: its state would be that after fewer tokens than are known.
        """
        request = self._scheduler.requests.get(request_id)
        known = len(forced_tokens(request.sampling_params)) if request is not None else 0
        if request is None or request.num_output_tokens < max(1, known) or request_id in self._leaving:
            left(None)
            return
        request.next_decode_eligible_step = NEVER  # no further step computes it
        self._leaving[request_id] = _Leaving(wanted, left)

    def advance(self) -> None:
        """Let requests leave that no step has any more, and copy the next piece, if the engine's time allows it."""
        for request_id, leaving in list(self._leaving.items()):
            request = self._scheduler.requests.get(request_id)
            if request is None or request.is_finished():  # the step under way was its last one
                del self._leaving[request_id]
                leaving.left(None)
            elif not (request.num_output_placeholders or request.num_in_flight_tokens):
                # Placeholders count no steps of a request that was preempted meanwhile, nor those of pipeline stages.
                del self._leaving[request_id]
                leaving.left(self._left(request, leaving.wanted))
        computes = bool(self._scheduler.running)
        while self._exports and (not computes or self._clock() >= self._again_mono):
            export = next((each for each in self._exports if self._has_room(each)), None)
            if export is None:
                return
            self._copy(export)

    def close(self) -> None:
        """Give up what is not staged yet."""
        for export in list(self._exports):
            self._drop(export)
        for leaving in self._leaving.values():
            leaving.left(None)
        self._leaving.clear()

    def _begin(self, wanted: CacheExport, tokens: int, blocks: tuple[Sequence[KVCacheBlock], ...]) -> int:
        if tokens <= wanted.start:
            return 0
        export = _Export(wanted, wanted.start, tokens, tuple(list(group) for group in blocks))
        self._cache.block_pool.touch(_held(export))
        self._exports.append(export)
        wanted.announce(tokens - wanted.start)
        return tokens

    def _left(self, request: Request, wanted: CacheExport) -> Left:
        """The request's KV is staged at once: few tokens are missing where most of it was exported before."""
        request_id, state, tokens = request.request_id, sampling_state(self._core, request.request_id), 0
        if request.status == RequestStatus.RUNNING:
            tokens = _computed(request)
            export = _Export(wanted, wanted.start, tokens, tuple(self._cache.get_blocks(request_id).blocks))
            if tokens > wanted.start:
                wanted.announce(tokens - wanted.start)
            if tokens > wanted.start and wanted.has_room():
                self._stage(export, tokens)
            else:
                tokens = 0
        return Left(tokens, state)

    def _has_room(self, export: _Export) -> bool:
        export.has_room = export.has_room or export.wanted.has_room()
        return export.has_room

    def _copy(self, export: _Export) -> None:
        began_mono = self._clock()
        tokens = FIRST_PIECE if not self._token_s else max(MIN_PIECE, int(PIECE_S / self._token_s))
        end = min(export.end, export.at + tokens)
        count = end - export.at
        try:
            self._stage(export, end)
        except Exception as error:  # of a rank: the request of another instance must not end this one's
            log.error("KV could not be exported", transfer_id=export.wanted.transfer_id, exc_info=error)
            self._drop(export)
            return
        took_s = self._clock() - began_mono
        self._token_s = took_s / count if not self._token_s else 0.7 * self._token_s + 0.3 * took_s / count
        self._again_mono = began_mono + took_s / EXPORT_SHARE
        if export.at >= export.end:
            self._unpin(export)

    def _stage(self, export: _Export, end: int) -> None:
        blocks = [[block.block_id for block in group] for group in export.blocks]
        wanted = export.wanted
        chunk = ExportChunk(wanted.transfer_id, export.at, end, export.end, blocks, first=wanted.start)
        self._core.model_executor.collective_rpc(stage_on_rank, args=(chunk,))
        export.at = end

    def _drop(self, export: _Export) -> None:
        self._unpin(export)
        self._core.model_executor.collective_rpc(drop_on_rank, args=(export.wanted.transfer_id,))

    def _unpin(self, export: _Export) -> None:
        self._exports.remove(export)
        if self.tier is not None:
            self.tier.export_ended(chain(*export.blocks))
        self._cache.block_pool.free_blocks(reversed(_held(export)))


def _held(export: _Export) -> list[KVCacheBlock]:
    """Its blocks without vLLM's null block, and without those of the host tier."""
    return [block for block in chain(*export.blocks) if not block.is_null and block.block_id > 0]


def _computed(request: Request) -> int:
    """Tokens of a running request whose KV is there once the work that the ranks were given is done; the last token is
    known, and not computed.
    """
    return int(min(request.num_computed_tokens - request.num_output_placeholders, request.num_tokens - 1))
