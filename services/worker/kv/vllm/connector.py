"""vLLM's KV connector interface (v1) over our scheduler and worker halves.

vLLM prescribes the methods, hence their number. `services.worker.kv` documents configuration and request
parameters.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)

from services.worker.kv.vllm.metadata import StepMetadata, read_settings
from services.worker.kv.vllm.scheduler_half import SchedulerHalf
from services.worker.kv.vllm.worker_half import WorkerHalf

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class PolyphaseConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is untyped here
    """Exports KV to host staging chunk by chunk, and imports it asynchronously; holds no blocks for a
    transfer.

    vLLM makes one with role SCHEDULER and one with role WORKER a rank.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        """Raises msgspec.ValidationError for bad settings, ValueError for an engine that cannot be served."""
        super().__init__(vllm_config, role, kv_cache_config)
        settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        parallel = vllm_config.parallel_config
        ranks = parallel.pipeline_parallel_size * parallel.tensor_parallel_size
        if len(settings.endpoints) != ranks:
            raise ValueError(f"endpoints: one a rank, which are {ranks}")
        if settings.controls and len(settings.controls) != ranks:
            raise ValueError(f"controls: one a rank, which are {ranks}, or none")
        if parallel.decode_context_parallel_size != 1 or parallel.prefill_context_parallel_size != 1:
            raise ValueError("KV transfer does not support context parallelism: a rank has to hold all tokens")
        if len(kv_cache_config.kv_cache_groups) > 1:
            raise ValueError("KV transfer supports models with one KV cache group only")
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            raise ValueError('kv_load_failure_policy must be "recompute"')
        self.scheduler = (
            SchedulerHalf(settings, vllm_config.max_concurrent_batches) if role is KVConnectorRole.SCHEDULER else None
        )
        self.worker = WorkerHalf(vllm_config, settings, kv_cache_config) if role is KVConnectorRole.WORKER else None

    @property
    def requires_kv_delivery(self) -> bool:
        """False: KV is copied before its blocks can be freed, so a preemption loses none."""
        return False

    # The scheduler's side.

    def on_new_request(self, request: "Request") -> None:
        """See KVConnectorBase_V1."""
        self._scheduler.add(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        """See KVConnectorBase_V1."""
        tokens = self._scheduler.external_tokens(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """See KVConnectorBase_V1."""
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """See KVConnectorBase_V1."""
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """See KVConnectorBase_V1."""
        self._scheduler.received(set(connector_output.finished_recving or ()))

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See KVConnectorBase_V1. Never holds the blocks."""
        self._scheduler.finished(request)
        return False, None

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See KVConnectorBase_V1."""
        self._worker.register(kv_caches)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """See KVConnectorBase_V1."""
        self._worker.begin(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are asynchronous, and a request runs only when its own has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Nothing: all layers are saved after the forward."""

    def wait_for_save(self) -> None:
        """See KVConnectorBase_V1."""
        self._worker.save(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See KVConnectorBase_V1."""
        received, failed = self._worker.results()
        return KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def shutdown(self) -> None:
        """See KVConnectorBase_V1."""
        if self.worker is not None:
            self.worker.stop()

    @property
    def _scheduler(self) -> SchedulerHalf:
        assert self.scheduler is not None, "a call for the scheduler's half"
        return self.scheduler

    @property
    def _worker(self) -> WorkerHalf:
        assert self.worker is not None, "a call for the worker's half"
        return self.worker

    @property
    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata
