"""What the checks with engines on GPUs are started with. It imports nothing that needs a GPU, or vLLM."""

from typing import Any

# Several engines share a GPU; each takes what its KV says, whatever this share allows.
SHARE: dict[str, Any] = {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 256 << 20}
BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
# Of the exporter and the importer: ranks that share heads (tp), and stages (pp).
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp2 to tp1": ({"tp": 2}, {}),
    "pp2 to pp1": ({"pp": 2, "layers": (1, 2)}, {}),
    "tp2 to pp2": ({"tp": 2}, {"pp": 2, "layers": (2, 1)}),
}
