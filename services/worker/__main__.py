"""`python -m services.worker`: one instance."""

from shared.runtime.signals import end_at_sigterm

end_at_sigterm()  # before the imports, which take seconds

import os

from services.worker.settings import PP_LAYERS, WorkerSettings
from shared.runtime.logs import LogTail, configure_logs


def main() -> None:
    """Read the settings and serve until SIGTERM."""
    settings = WorkerSettings.load()
    tail = LogTail()
    configure_logs("worker", settings.log_level, tail)
    _prepare_environment(settings)
    from services.worker.app import create_app
    from shared.runtime.http import serve

    serve(create_app(settings, tail), settings.host, settings.http_port)


def _prepare_environment(settings: WorkerSettings) -> None:
    """Before torch or vLLM are imported. Unbound threads: vLLM would put every instance on the first cores."""
    os.environ.pop("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", None)  # has vLLM's ranks make traces of their own
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would count before `kv_cache_bytes`
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", str(settings.threads))
    if settings.pipeline_layers:
        os.environ[PP_LAYERS] = ",".join(map(str, settings.pipeline_layers))
    if settings.ranks == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the executor too stays in this process
    if settings.accelerator == "cpu":
        # Some sampling helpers are compiled on first use even in eager mode, while all streams of the instance wait:
        # 5 s for the first log probabilities, and up to a minute where there is a C++ compiler to run.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


if __name__ == "__main__":
    main()
