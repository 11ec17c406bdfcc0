"""How much KV an instance holds, and whether a model fits it at all."""

from shared.cost.catalogue import Accelerator, bytes_of, precision_of
from shared.cost.geometry import ExpertSplit, ModelGeometry
from shared.errors import Incompatible

# u and v of Huawei eq. 1, as vLLM sets them: share of the memory that the engine may use, and bytes of each
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

    Source: Huawei eq. 1 (R): C_s = t·(u·m − v) − a·P, divided by kappa. KV that several ranks must each hold
    (fewer KV heads than ranks, a latent) counts once for each copy. Data-parallel engines that compute the experts
    together hold a share of them each.
    """
    precision = precision_of(dtype or geometry.dtype)
    kv_precision = precision_of(kv_dtype or ("bf16" if bytes_of(precision) < 2 else precision))
    ranks = tensor_parallel * pipeline_parallel
    copies = float(tensor_parallel) if geometry.latent else max(1.0, tensor_parallel / geometry.kv_heads)
    space = ranks * (utilisation * accelerator.memory_bytes - reserve_bytes)
    space -= geometry.weight_bytes(bytes_of(precision))
    space += geometry.expert_parameters() * (1.0 - 1.0 / experts.engines) * bytes_of(precision)
    return int(space // (geometry.kv_bytes_per_token(bytes_of(kv_precision)) * copies))


def require_fit(
    accelerator: Accelerator,
    geometry: ModelGeometry,
    longest_tokens: int,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    utilisation: float = UTILISATION,
    reserve_bytes: float = RESERVE_BYTES,
) -> int:
    """The KV capacity in tokens, or an error when not one request of `longest_tokens` fits (Huawei eq. 2)."""
    tokens = kv_capacity_tokens(
        accelerator,
        geometry,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        dtype=dtype,
        kv_dtype=kv_dtype,
        utilisation=utilisation,
        reserve_bytes=reserve_bytes,
    )
    if tokens >= longest_tokens:
        return tokens
    ranks = tensor_parallel * pipeline_parallel
    weights = geometry.weight_bytes(bytes_of(dtype or geometry.dtype)) / 1e9
    room = ranks * utilisation * accelerator.memory_bytes / 1e9
    raise Incompatible(
        f"{geometry.name} does not fit {ranks} x {accelerator.name}: weights of {weights:.1f} GB in {room:.1f} GB "
        f"leave KV for {max(0, tokens)} tokens, and one request needs {longest_tokens}"
    )
