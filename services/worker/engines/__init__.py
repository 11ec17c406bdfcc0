"""The engines an instance can run: vLLM, or an emulated accelerator."""
