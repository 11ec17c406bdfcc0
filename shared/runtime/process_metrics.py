"""What every process tells of itself: which build it is, what it uses, how often it was started again."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, disable_created_metrics

RESTARTS = "POLYPHASE_RESTARTS"  # set by whoever keeps the process running; absent where nobody counts


def describe_process(registry: CollectorRegistry) -> None:
    """Add it to a process's own registry, and leave out when each series began: that doubles a scrape."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    ProcessCollector(registry=registry)
    build = {
        "version": _version("polyphase"),
        "vllm_version": _version("vllm"),
        "python_version": platform.python_version(),
    }
    told = Gauge("polyphase_build_info", "What runs here; always 1.", list(build), registry=registry)
    told.labels(**build).set(1)
    if RESTARTS in os.environ:
        text = "Times that the launcher has started it again since its own start."
        restarts = Counter("polyphase_process_restarts", text, registry=registry)
        restarts.inc(int(os.environ[RESTARTS]))


def _version(package: str) -> str:
    """Empty where it is not installed: not every process needs the engine."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
