"""Step times of the papers' engines, vLLM up to 0.8 (V0), where they differ from the later engine that ours prices."""

from dataclasses import replace

from shared.cost.catalogue import Accelerator
from shared.cost.efficiency import Efficiencies
from shared.cost.geometry import ModelGeometry
from shared.cost.layers import LayerCost
from shared.cost.step import Batch, StepModel


class EngineSteps(StepModel):
    """Prefill chunks and decodes of one step have attention kernels of their own; ours are priced as one.

    shares_heads: query heads that share a KV head read its KV once. The paged-attention kernel, which is all that GPUs
    before Ampere can run, reads it for each of them.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        geometry: ModelGeometry,
        tensor_parallel: int,
        efficiencies: Efficiencies,
        shares_heads: bool = True,
    ) -> None:
        super().__init__(accelerator, geometry, tensor_parallel, efficiencies=efficiencies)
        self.shares_heads = shares_heads
        if not shares_heads and geometry.kv_heads < geometry.heads:
            apart = replace(geometry, kv_heads=geometry.heads)
            self._layers = _DecodeApart(
                accelerator, geometry, tensor_parallel, 1, self.dtype, self.kv_dtype, efficiencies
            )
            self._layers.decodes = LayerCost(
                accelerator, apart, tensor_parallel, 1, self.dtype, self.kv_dtype, efficiencies
            )

    def step_time_s(self, batch: Batch) -> float:
        """See `StepModel`."""
        count, contexts = batch.decode_count, batch.decode_context_tokens
        if not batch.prefill or not count:
            return super().step_time_s(batch)
        apart = self._layers.mixed_attention_s(batch.prefill, 0, 0) + self._layers.decode_attention_s(count, contexts)
        return self._dense_s(batch.tokens) + apart + self._head_s(count + len(batch.prefill))


class _DecodeApart(LayerCost):
    """Layers whose decode attention is that of others."""

    decodes: LayerCost

    def decode_attention_s(self, count: int, context_tokens: float) -> float:
        """See `LayerCost`."""
        return self.decodes.decode_attention_s(count, context_tokens)
