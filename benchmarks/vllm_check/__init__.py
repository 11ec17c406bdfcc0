"""vLLM's own entrypoint tests, run against a suite that serves the demo model; `make vllm-check`."""
