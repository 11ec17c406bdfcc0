"""`tests/gpu` is collected everywhere, also where vLLM and Triton are missing, and skips with a reason there."""

import os
import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]
BARE = """
import sys
for name in ("vllm", "triton", "nixl"):
    sys.modules[name] = None
import pytest
sys.exit(pytest.main(["tests/gpu", "-q", "-p", "no:cacheprovider"]))
"""


def test_without_a_gpu_all_checks_skip_with_a_reason() -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "PYTHONPATH": str(PROJECT)}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | hidden
    command = [sys.executable, "-c", BARE]
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert re.search(r"^\d+ skipped in", done.stdout, re.MULTILINE), done.stdout[-500:]  # none passed, failed or erred
    reasons = dict(re.findall(r"^SKIPPED \[\d+\] tests/gpu/(\w+)\.py:\d+: (.+)$", done.stdout, re.MULTILINE))
    assert set(reasons) == {path.stem for path in (PROJECT / "tests" / "gpu").glob("test_*.py")}
    assert reasons["test_ranks"] == "needs two CUDA devices; torch sees 0"
