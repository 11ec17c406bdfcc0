"""The precision of a model's weights, by its config.json and as instances report it."""

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
QUANTISED = frozenset({"fp8", "fp4", "int8", "int4"})  # for which the cost model has rates
_METHODS = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "ptpc_fp8": "fp8",
    "mxfp4": "fp4",
    "experts_int8": "int8",
}  # whose weights have one precision


def stored_in(precision: str) -> str:
    """The precision in which weights of an `InstanceInfo.precision` are stored, as the cost model calls it; empty where
    it has no rates for it.
    """
    return next((name for name in sorted(QUANTISED) if precision.startswith(name)), "")


def quantised_to(config: Config) -> str:
    """The precision of the weights that a config.json says are quantised: fp8, fp4, int8, int4, or the name of the
    method where that has no single precision; empty where they are not quantised.
    """
    given = config.get("quantization_config") or {}
    method = str(given.get("quant_method", "")) if isinstance(given, Mapping) else ""
    if not method:
        return ""
    return _METHODS.get(method) or _stated(method, given)


def _stated(method: str, given: Mapping[str, Any]) -> str:
    bits, kind = given.get("bits", given.get("w_bit", 4)), "int"
    if method == "compressed-tensors":
        groups = given.get("config_groups")
        schemes = [each.get("weights") for each in groups.values() if isinstance(each, Mapping)] if groups else []
        scheme = next((each for each in schemes if isinstance(each, Mapping)), {})
        if not scheme and given.get("kv_cache_scheme"):
            return ""  # KV alone is quantised
        bits, kind = scheme.get("num_bits"), "fp" if scheme.get("type") == "float" else "int"
    elif method.startswith("modelopt"):
        inner = given.get("quantization")
        named = str((inner if isinstance(inner, Mapping) else given).get("quant_algo", method)).lower()
        bits, kind = (4 if "fp4" in named else 8), "fp"
    elif method == "bitsandbytes":
        bits = 8 if given.get("load_in_8bit") else 4
    elif method.removesuffix("_marlin") not in ("gptq", "awq"):
        return method
    return f"{kind}{bits}" if bits in (4, 8) else method
