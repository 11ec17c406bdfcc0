"""A KV endpoint in a process of its own, to be killed or frozen: exports `whole` and `half`, or imports one."""

import json
import sys
import threading
from pathlib import Path

from services.worker.kv.wire.importing import Load, PullLimits
from shared.domain.kv import KvHandle
from tests.services.worker.kv.rig import Capture, Rig, model_kv, stage


def main(folder: str, scheme: str, tokens: int, address: str) -> None:
    own = Path(folder, "peer")
    own.mkdir()
    endpoint = Rig(own, scheme).endpoint(limits=PullLimits(stall_s=3.0))
    if address:
        capture = Capture(0, tokens)
        capture.before = lambda: print("writing", flush=True)
        handle = KvHandle("t", "exporter", 7, "model", (address,), tokens, "float32")
        endpoint.load(Load("request", handle, 0, tokens, (capture,), 600.0))
    else:
        stage(endpoint, model_kv(tokens), "whole")
        stage(endpoint, model_kv(tokens), "half", end=tokens // 2)
    print(json.dumps(endpoint.address), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
