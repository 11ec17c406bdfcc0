"""The shape of a model and what follows from it: weight matrices, parameters, bytes of weights and KV, KV capacity."""

from dataclasses import dataclass, replace
from typing import Literal

from shared.cost.catalogue import Accelerator, bytes_of, kv_precision, precision_of
from shared.domain.instance import KvGeometry

Split = Literal["column", "row", "none"]


@dataclass(frozen=True, slots=True)
class Matmul:
    """One weight matrix [k, n] of a layer. Tensor parallelism divides n (column), k (row) or nothing."""

    name: str
    n: int
    k: int
    split: Split

    def shard(self, degree: int) -> tuple[int, int]:
        """(n, k) on one rank of `degree`, rounded up."""
        n = -(-self.n // degree) if self.split == "column" else self.n
        k = -(-self.k // degree) if self.split == "row" else self.k
        return n, k


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts that replaces the MLP in `layers` of the layers."""

    count: int
    per_token: int
    intermediate: int
    shared_intermediate: int
    layers: int
    router_bias: bool = False
    shared_gate: bool = False

    def expected_active(self, tokens: float) -> float:
        """Distinct experts that `tokens` tokens touch when each picks `per_token` at random.

        Source: E·(1 − (1 − k/E)^t), the expected number of non-empty bins.
        """
        untouched: float = (1.0 - self.per_token / self.count) ** tokens
        return self.count * (1.0 - untouched)


@dataclass(frozen=True, slots=True)
class ExpertSplit:
    """How accelerators that compute a model's experts together divide them.

    ranks: parts among which whole experts are divided (expert parallelism); accelerators within a part cut each
    expert's matrices. engines: data-parallel engines whose tokens meet in the experts.
    """

    ranks: int = 1
    engines: int = 1

    def cut(self, tensor_parallel: int) -> int:
        """Accelerators that share one expert's matrices; each engine has `tensor_parallel` accelerators."""
        return max(1, tensor_parallel * self.engines // self.ranks)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1."""

    kv_rank: int
    q_rank: int  # 0: no compression of the query
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """What the cost of a decoder-only transformer depends on. Lengths are in elements, tokens, layers."""

    name: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_position: int
    dtype: str = "bf16"
    gated_mlp: bool = True
    tied_embeddings: bool = False
    qkv_bias: bool = False
    all_bias: bool = False  # every linear layer and norm has a bias (OPT)
    qk_norm: bool = False
    norms_per_layer: int = 2
    learned_positions: int = 0
    window_tokens: int = 0  # sliding window of `window_layers` of the layers
    window_layers: int = 0
    experts: Experts | None = None
    latent: LatentAttention | None = None

    def part(self, layers: int) -> "ModelGeometry":
        """The model cut to so many layers, each kind in proportion, with embeddings and output projection."""
        share = layers / self.layers
        experts = replace(self.experts, layers=round(self.experts.layers * share)) if self.experts else None
        return replace(self, layers=layers, experts=experts, window_layers=round(self.window_layers * share))

    @property
    def dense_layers(self) -> int:
        return self.layers - (self.experts.layers if self.experts else 0)

    @property
    def kv_elements_per_token_layer(self) -> int:
        if self.latent:
            return self.latent.kv_rank + self.latent.rope_dim
        return 2 * self.kv_heads * self.head_dim

    @property
    def qk_dim(self) -> int:
        return self.latent.nope_dim + self.latent.rope_dim if self.latent else self.head_dim

    @property
    def v_dim(self) -> int:
        return self.latent.v_dim if self.latent else self.head_dim

    def kv_geometry(self) -> KvGeometry:
        """The shape in which KV travels. A latent counts as one head whose K and V halves make it up."""
        if self.latent:
            return KvGeometry(self.layers, 1, self.kv_elements_per_token_layer // 2)
        return KvGeometry(self.layers, self.kv_heads, self.head_dim)

    def kv_bytes_per_token(self, bytes_per_element: float = 2.0) -> float:
        """KV bytes of one token over all layers and KV heads."""
        return float(self.layers * self.kv_elements_per_token_layer) * bytes_per_element

    def attention_matmuls(self) -> tuple[Matmul, ...]:
        if self.latent:
            return _latent_matmuls(self.hidden, self.heads, self.latent)
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        return (Matmul("qkv", qkv, self.hidden, "column"), Matmul("o", self.hidden, self.heads * self.head_dim, "row"))

    def mlp_matmuls(self, intermediate: int | None = None) -> tuple[Matmul, ...]:
        """Weight matrices of one MLP, or of one expert of that width."""
        width = self.intermediate if intermediate is None else intermediate
        up = 2 * width if self.gated_mlp else width
        return (
            Matmul("gate_up" if self.gated_mlp else "up", up, self.hidden, "column"),
            Matmul("down", self.hidden, width, "row"),
        )

    def lm_head(self) -> Matmul:
        """The output projection, computed once for each sampled sequence."""
        return Matmul("lm_head", self.vocab, self.hidden, "column")

    def parameters(self) -> int:
        return self._embedding_parameters() + self._attention_parameters() + self._mlp_parameters()

    def expert_parameters(self) -> int:
        """Weights of all routed experts; 0 without any."""
        e = self.experts
        return e.layers * e.count * sum(m.n * m.k for m in self.mlp_matmuls(e.intermediate)) if e else 0

    def weight_bytes(self, bytes_per_element: float = 2.0) -> float:
        """Bytes of all weights. Quantised checkpoints keep embeddings and the output projection in 16 bits."""
        if bytes_per_element >= 2.0:
            return self.parameters() * bytes_per_element
        kept = self._embedding_parameters()
        return (self.parameters() - kept) * bytes_per_element + kept * 2.0

    def matmul_flops_per_token(self) -> float:
        """FLOPs of one token through all layers' weight matrices, output projection not included."""
        total = self.layers * sum(2 * m.n * m.k for m in self.attention_matmuls())
        total += self.dense_layers * sum(2 * m.n * m.k for m in self.mlp_matmuls())
        if self.experts:
            e = self.experts
            one = sum(2 * m.n * m.k for m in self.mlp_matmuls(e.intermediate)) * e.per_token
            shared = sum(2 * m.n * m.k for m in self.mlp_matmuls(e.shared_intermediate))
            total += e.layers * (one + shared + 2 * self.hidden * e.count)
        return float(total)

    def _embedding_parameters(self) -> int:
        tables = 1 if self.tied_embeddings else 2
        return (tables * self.vocab + self.learned_positions) * self.hidden

    def _attention_parameters(self) -> int:
        layer = sum(m.n * m.k for m in self.attention_matmuls())
        norm = self.hidden * (2 if self.all_bias else 1)
        layer += self.norms_per_layer * norm
        if self.qkv_bias or self.all_bias:
            layer += (self.heads + 2 * self.kv_heads) * self.head_dim
        if self.all_bias:
            layer += self.hidden
        if self.qk_norm:
            layer += 2 * self.head_dim
        if self.latent:
            layer += self.latent.kv_rank + self.latent.q_rank
        return self.layers * layer + norm

    def _mlp_parameters(self) -> int:
        dense = sum(m.n * m.k for m in self.mlp_matmuls())
        if self.all_bias:
            dense += self.intermediate + self.hidden
        total = self.dense_layers * dense
        if self.experts:
            e = self.experts
            layer = e.count * sum(m.n * m.k for m in self.mlp_matmuls(e.intermediate))
            layer += sum(m.n * m.k for m in self.mlp_matmuls(e.shared_intermediate))
            layer += self.hidden * (e.count + int(e.shared_gate)) + (e.count if e.router_bias else 0)
            total += e.layers * layer
        return total


def _latent_matmuls(hidden: int, heads: int, latent: LatentAttention) -> tuple[Matmul, ...]:
    query = heads * (latent.nope_dim + latent.rope_dim)
    kv_down = Matmul("kv_a", latent.kv_rank + latent.rope_dim, hidden, "none")
    if latent.q_rank:
        queries: tuple[Matmul, ...] = (
            Matmul("q_a", latent.q_rank, hidden, "none"),
            Matmul("q_b", query, latent.q_rank, "column"),
        )
    else:
        queries = (Matmul("q", query, hidden, "column"),)
    return (
        *queries,
        kv_down,
        Matmul("kv_b", heads * (latent.nope_dim + latent.v_dim), latent.kv_rank, "column"),
        Matmul("o", hidden, heads * latent.v_dim, "row"),
    )


# u and v of Huawei eq. 1, as vLLM sets them: the share of memory that the engine may use, and the bytes of each
# accelerator for graphs and workspace.
UTILISATION = 0.9
RESERVE_BYTES = 1.25e9


def kv_capacity_tokens(
    accelerator: Accelerator,
    geometry: ModelGeometry,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    utilisation: float = UTILISATION,
    reserve_bytes: float = RESERVE_BYTES,
    experts: ExpertSplit = ExpertSplit(),
) -> int:
    """Tokens of KV that an instance holds; negative when the weights alone do not fit.

    Source: Huawei eq. 1: C_s = t·(u·m − v) − a·P, divided by the KV bytes of a token. KV that several ranks must
    each hold (fewer KV heads than ranks, a latent) counts once for each copy. Data-parallel engines that compute the
    experts together hold a share of them each.
    """
    precision = precision_of(dtype or geometry.dtype)
    ranks = tensor_parallel * pipeline_parallel
    copies = float(tensor_parallel) if geometry.latent else max(1.0, tensor_parallel / geometry.kv_heads)
    space = ranks * (utilisation * accelerator.memory_bytes - reserve_bytes)
    space -= geometry.weight_bytes(bytes_of(precision))
    space += geometry.expert_parameters() * (1.0 - 1.0 / experts.engines) * bytes_of(precision)
    return int(space // (geometry.kv_bytes_per_token(bytes_of(kv_precision(precision, kv_dtype))) * copies))
