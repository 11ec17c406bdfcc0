"""A KV endpoint in a process of its own, to be killed or frozen: exports half of a transfer, or imports one."""

import json
import sys
import threading
from pathlib import Path

from services.worker.kv.wire.importing import Load, PullLimits
from shared.domain.kv import KvHandle
from tests.services.worker.kv.rig import Capture, Rig, model_kv, stage


def main(folder: str, scheme: str, address: str) -> None:
    own = Path(folder, "peer")
    own.mkdir()
    endpoint = Rig(own, scheme).endpoint(limits=PullLimits(stall_s=1.0))
    if address:
        capture = Capture(0, 64)
        capture.before = lambda: print("writing", flush=True)
        handle = KvHandle("t", "exporter", 7, "model", (address,), 64, "float32")
        endpoint.load(Load("request", handle, 0, 64, capture, 600.0))
    else:
        stage(endpoint, model_kv(64), end=32)
    print(json.dumps(endpoint.address), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
