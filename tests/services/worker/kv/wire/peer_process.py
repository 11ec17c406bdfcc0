"""A KV endpoint in a process of its own, to be killed or frozen: exports half of a transfer, or imports one."""

import importlib.util
import json
import sys
import threading
from pathlib import Path


def main(folder: str, address: str) -> None:
    spec = importlib.util.spec_from_file_location("kv_rig", Path(__file__).parents[1] / "rig.py")
    assert spec is not None
    assert spec.loader is not None
    rigs = importlib.util.module_from_spec(spec)
    sys.modules["kv_rig"] = rigs
    spec.loader.exec_module(rigs)
    endpoint = rigs.Rig(Path(folder)).endpoint(limits=rigs.PullLimits(stall_s=1.0))
    if address:
        capture = rigs.Capture(0, 64)
        capture.before = lambda: print("writing", flush=True)
        handle = rigs.KvHandle("t", "exporter", 7, "model", (address,), 64, "float32")
        endpoint.load(rigs.Load("request", handle, 0, 64, capture, 600.0))
    else:
        rigs.stage(endpoint, rigs.model_kv(64), end=32)
    print(json.dumps(endpoint.address), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
