"""The bench of KV transports: real processes, little KV."""

from lab.bench.kv import NIXL_OVER_TCP, SCHEMES, run_kv_bench
from services.worker.kv.wire.nixl_agent import installed


def test_every_transport_is_measured_beside_the_socket() -> None:
    result = run_kv_bench((1,), rounds=3)
    figures, aims = result["figures"], result["aims"]
    assert all(value > 0 for value in figures.values())
    for name in SCHEMES:
        assert {f"{name}_1mb_to_socket_ratio", f"{name}_1mb_import_cpu_ratio"} <= set(figures)
    for codec in ("int8", "int4", "fp8"):
        assert {f"{codec}_encode_gb_per_s", f"{codec}_decode_gb_per_s"} <= set(figures)
    beside = [name for name in figures if NIXL_OVER_TCP in name]
    assert bool(beside) == installed()
    assert len(result["notes"]) == 1
    assert aims["tcp_1mb_to_socket_ratio"]["got"] == figures["tcp_1mb_to_socket_ratio"]
    signs = {name: aim["want"].split()[0] for name, aim in aims.items()}
    assert all(sign == ("<=" if "cpu" in name else ">=") for name, sign in signs.items())
