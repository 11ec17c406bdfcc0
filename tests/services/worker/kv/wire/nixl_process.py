"""A KV endpoint with NIXL in a process of its own, to be killed: exports two transfers, or imports one."""

import json
import sys
import threading
from pathlib import Path

from services.worker.kv.wire.importing import Load, PullLimits
from shared.domain.kv import KvHandle
from tests.services.worker.kv.rig import Capture, Rig, model_kv, stage


def main(folder: str, tokens: str, address: str = "") -> None:
    own, count = Path(folder, "peer"), int(tokens)
    own.mkdir()
    endpoint = Rig(own, "nixl").endpoint(limits=PullLimits(stall_s=1.0))
    if address:
        capture = Capture(0, count)
        capture.before = lambda: print("writing", flush=True)
        handle = KvHandle("t", "exporter", 7, "model", (address,), count, "float32")
        endpoint.load(Load("request", handle, 0, count, capture, 600.0))
    else:
        for name in ("whole", "half"):
            stage(endpoint, model_kv(count), name)
    print(json.dumps(endpoint.address), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
