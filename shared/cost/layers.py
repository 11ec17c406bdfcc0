"""What a model's layers cost on one instance: the times of their operators, summed as an engine runs them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shared.cost.catalogue import Accelerator, bytes_of
from shared.cost.efficiency import Efficiencies
from shared.cost.geometry import ExpertSplit, Matmul, ModelGeometry
from shared.cost.operators import Device, Gemm, Heads, Numeric, device_of


def _product_s(gemm: Gemm, rows: Numeric, n: int, k: int, width: float, device: Device) -> Numeric:
    """Seconds of a product as an engine runs it. Arrays of rows are worked out once for all ways to cut a pipeline."""
    if isinstance(rows, np.ndarray) and rows.dtype == np.float64:
        return _products_s(gemm, rows.tobytes(), n, k, width, device)
    return gemm.time_s(rows, n, k, width, device, cold=True)


@lru_cache(maxsize=8192)
def _products_s(gemm: Gemm, rows: bytes, n: int, k: int, width: float, device: Device) -> NDArray[np.float64]:
    made: NDArray[np.float64] = gemm.time_s(np.frombuffer(rows), n, k, width, device, cold=True)
    made.flags.writeable = False
    return made


class LayerCost:
    """Operator sums over all layers of one pipeline pass."""

    def __init__(
        self,
        accelerator: Accelerator,
        geometry: ModelGeometry,
        tensor_parallel: int,
        pipeline_parallel: int,
        dtype: str,
        kv_dtype: str,
        efficiencies: Efficiencies,
        experts: ExpertSplit = ExpertSplit(),
    ) -> None:
        self._geometry = geometry
        self._degree = tensor_parallel
        self._stages = pipeline_parallel
        self._efficiencies = efficiencies
        self._experts = experts
        self._link = accelerator.links.scale_up
        self._collective = efficiencies.collective_over(accelerator.links)
        self._width = bytes_of(dtype)
        self._kv_width = bytes_of(kv_dtype)
        self._gemm = efficiencies.gemm_for(dtype)
        self._expert_mlp = efficiencies.experts_for(dtype)
        self._head_gemm = efficiencies.gemm_for("bf16")
        self._decode = efficiencies.decode_for(kv_dtype)
        self._varlen = efficiencies.varlen_for(kv_dtype)
        self._device, self._half = device_of(accelerator, dtype), device_of(accelerator, "bf16")
        self._heads, self._prefill_heads = self._local_heads()
        if geometry.latent:
            # Decode over a latent is a product of all heads with it: as dense in compute as prefill.
            self._decode = replace(self._decode, compute=self._varlen.compute)
        self._windowed = geometry.window_layers if geometry.window_tokens else 0
        self._plain = geometry.layers - self._windowed
        self._decode_lines: dict[int, tuple[float, float, float, float]] = {}
        kinks = [self._decode.depth_tokens]
        if self._windowed:
            kinks.append(float(geometry.window_tokens))
        self.decode_kinks: tuple[float, ...] = tuple(kinks)  # mean contexts at which the decode time bends

    def dense_s(self, tokens: Numeric) -> Numeric:
        """All layers without attention, for `tokens` tokens: matrices, elementwise, communication, step overhead."""
        geometry, layers = self._geometry, self._geometry.layers
        total = layers * sum(self._gemm_s(m, tokens) for m in geometry.attention_matmuls())
        total = total + geometry.dense_layers * sum(self._gemm_s(m, tokens) for m in geometry.mlp_matmuls())
        if geometry.experts:
            total = total + geometry.experts.layers * self._own_experts_s(tokens)
            total = total + self.experts_s(tokens * self._experts.engines)
        total = total + layers * self._elementwise_s(tokens)
        return total + self._communication_s(tokens) + self._efficiencies.step_s

    def experts_s(self, tokens: Numeric) -> Numeric:
        """All layers' routed experts on one rank, for `tokens` tokens of all engines, with the tokens' transfer.

        Tokens of several engines are gathered before the experts, summed and scattered after. Source: vLLM's
        `allgather_reducescatter`, its default.
        """
        geometry, experts, split = self._geometry, self._geometry.experts, self._experts
        if not experts:
            return 0.0 * tokens
        active = experts.expected_active(tokens) / split.ranks
        rows = tokens * experts.per_token / split.ranks
        width = -(-experts.intermediate // split.cut(self._degree))
        up = 2 * width if geometry.gated_mlp else width
        total = self._expert_mlp.time_s(rows, active, up, width, geometry.hidden, self._width, self._device)
        if split.engines > 1:
            moved = tokens * geometry.hidden * 2.0
            total = total + self._collective.gather_scatter_s(moved, float(split.engines), self._link)
        return experts.layers * total

    def head_s(self, sequences: Numeric) -> Numeric:
        """Output projection and sampling for that many sequences."""
        head = self._geometry.lm_head()
        n, k = head.shard(self._degree)
        product = _product_s(self._head_gemm, sequences, n, k, 2.0, self._half)
        logits = sequences * n * 4.0 * 3.0
        sampling = 3.0 * self._efficiencies.elementwise.time_s(logits / 3.0, self._half)
        return product + sampling + sequences * self._efficiencies.sequence_s

    def decode_attention_s(self, count: int, context_tokens: float) -> float:
        """All layers' attention of `count` decodes, the token under way added to each context."""
        mean = context_tokens / count + 1.0
        total = self._plain * self._decode_layer_s(count, mean)
        if self._windowed:
            total += self._windowed * self._decode_layer_s(count, min(mean, float(self._geometry.window_tokens)))
        return total

    def mixed_attention_s(self, chunks: Sequence[tuple[int, int]], count: int, context_tokens: float) -> float:
        """All layers' attention of prefill chunks, with `count` decodes in the same step."""
        total = self._plain * self._mixed_layer_s(chunks, count, context_tokens, 0.0) if self._plain else 0.0
        if self._windowed:
            window = float(self._geometry.window_tokens)
            total += self._windowed * self._mixed_layer_s(chunks, count, context_tokens, window)
        return total

    def _local_heads(self) -> tuple[Heads, Heads]:
        """Shapes on one rank, for decode and for prefill."""
        geometry = self._geometry
        query = -(-geometry.heads // self._degree)
        if geometry.latent:
            # Decode is absorbed: all heads share the latent, once as key and once as value. Prefill expands it.
            # Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
            latent = geometry.latent
            width = 2 * latent.kv_rank + latent.rope_dim
            kv_bytes = geometry.kv_elements_per_token_layer * self._kv_width
            prefill = Heads(
                query, 1, 2.0 * query * (geometry.qk_dim + geometry.v_dim), kv_bytes, 4.0 * query * latent.v_dim
            )
            return Heads(query, 1, 2.0 * query * width, kv_bytes, 2.0 * query * width), prefill
        kv = max(1, -(-geometry.kv_heads // self._degree))
        each = 4.0 * query * geometry.head_dim
        heads = Heads(query, kv, each, 2.0 * kv * geometry.head_dim * self._kv_width, each)
        return heads, heads

    def _gemm_s(self, matmul: Matmul, tokens: Numeric) -> Numeric:
        n, k = matmul.shard(self._degree)
        return _product_s(self._gemm, tokens, n, k, self._width, self._device)

    def _own_experts_s(self, tokens: Numeric) -> Numeric:
        """Router and shared experts, which an engine computes for its own tokens alone."""
        geometry, experts = self._geometry, self._geometry.experts
        assert experts is not None
        total = self._gemm_s(Matmul("router", experts.count, geometry.hidden, "none"), tokens)
        if experts.shared_intermediate:
            total = total + sum(self._gemm_s(m, tokens) for m in geometry.mlp_matmuls(experts.shared_intermediate))
        return total

    def _elementwise_s(self, tokens: Numeric) -> Numeric:
        """One layer's norms (residual fused), rotary embedding, KV write and, outside of experts, activation."""
        geometry, one = self._geometry, self._efficiencies.elementwise
        norm = geometry.norms_per_layer * one.time_s(tokens * geometry.hidden * 8.0, self._half)
        rotated = (self._heads.query + self._heads.kv) * geometry.head_dim * 4.0
        rotary = one.time_s(tokens * rotated, self._half)
        write = one.time_s(tokens * self._heads.kv_bytes * 2.0, self._half)
        total = norm + rotary + write + (one.time_s(tokens * rotated, self._half) if geometry.qk_norm else 0.0)
        if not geometry.dense_layers:
            return total
        share, width = geometry.dense_layers / geometry.layers, geometry.intermediate / self._degree
        return total + share * one.time_s(tokens * width * (6.0 if geometry.gated_mlp else 4.0), self._half)

    def _communication_s(self, tokens: Numeric) -> Numeric:
        """Two all-reduces a layer under tensor parallelism; one send for each pipeline boundary."""
        activation = tokens * self._geometry.hidden * 2.0
        collective = self._collective
        total = 0.0 * tokens
        if self._degree > 1:
            reduce_s = collective.all_reduce_s(activation, float(self._degree), self._link)
            total = total + 2 * self._geometry.layers * reduce_s
        if self._stages > 1:
            hop = collective.latency_s + activation / (self._degree * collective.ring_share * self._link)
            total = total + (self._stages - 1) * hop
        return total

    def _decode_layer_s(self, count: int, mean: float) -> float:
        """One layer's decode attention: linear in the mean context up to a bend, and beyond it."""
        known = self._decode_lines.get(count)
        if known is None:
            known = self._decode_lines[count] = self._decode_line(count)
        fixed, slope, depth, bend = known
        return fixed + slope * mean + depth * (mean if mean < bend else bend)

    def _decode_line(self, count: int) -> tuple[float, float, float, float]:
        one, heads, device = self._decode, self._heads, self._half
        busy = one.busy(count, heads, device)
        query_s = count * heads.query_bytes / (device.bandwidth * one.memory.share)
        fixed = one.fixed_s(count, heads, device) + one.long_s + query_s / busy
        slope = count * one.cold_position_s(heads, device) / busy
        return float(fixed), float(slope), float(one.depth_at(count, 1.0, heads)), one.depth_tokens

    def _mixed_layer_s(
        self, chunks: Sequence[tuple[int, int]], count: int, context_tokens: float, window: float
    ) -> float:
        """One kernel for chunks and decodes, at least the time of the decodes alone. A latent keeps two kernels."""
        one, heads = self._varlen, self._prefill_heads
        positions = moved = longest = tokens = 0.0
        for new, before in chunks:
            context = float(before)
            if window:
                # The mean span of the chunk's tokens is capped; `positions` adds the chunk's own share to it.
                own = one.triangle * new
                context = min(context + own, window) - own
            positions += one.positions(new, context)
            span = new + max(0.0, min(float(before), context))
            moved += span
            longest = max(longest, span)
            tokens += new
        moved = moved * heads.kv_bytes + tokens * heads.query_bytes
        if not count:
            return float(one.time_s(positions, moved, longest, heads, self._half))
        mean = context_tokens / count + 1.0
        mean = min(mean, window) if window else mean
        alone = self._decode_layer_s(count, mean)
        if self._geometry.latent:
            return alone + float(one.time_s(positions, moved, longest, heads, self._half))
        decode_s = one.decode_s(count, mean * count, heads, self._half)
        together = float(one.time_s(positions, moved, max(longest, mean), heads, self._half, decode_s))
        return max(alone, together)
