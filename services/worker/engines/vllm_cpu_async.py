"""What vLLM's asynchronous scheduling needs of a device, on a CPU: its streams and events, where each call is done when
it returns.

vLLM 0.32 turns it off on CPUs, since it gains nothing there. With this it runs, so that all of ours that depends on it
can be tried on any machine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput


class Done:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Nothing is under way."""

    def synchronize(self) -> None:
        """Nothing is waited for."""


class CpuOutput(AsyncGPUModelRunnerOutput):  # type: ignore[misc]  # vLLM is untyped here
    """Sampled tokens that the engine fetches later, as from a device."""

    def __init__(
        self,
        model_runner_output: Any,
        sampled_token_ids: torch.Tensor,
        logprobs_tensors: Any,
        invalid_req_indices: list[int],
        async_output_copy_stream: Any,
        vocab_size: int,
        check_ep_fault: bool = False,
        num_nans: torch.Tensor | None = None,
    ) -> None:
        """As vLLM's, without its copies."""
        self._model_runner_output = model_runner_output
        self._invalid_req_indices = invalid_req_indices
        self.async_copy_ready_event = Done()
        self._sampled_token_ids = sampled_token_ids
        self.sampled_token_ids_cpu = sampled_token_ids.clone()
        self.vocab_size = vocab_size
        self._logprobs_tensors = self._logprobs_tensors_cpu = logprobs_tensors
        self._num_nans = self._num_nans_cpu = num_nans
        self._has_fault = None


@contextmanager
def stand_ins() -> Iterator[None]:
    """A model runner that is made inside needs no device; its outputs are `CpuOutput`s for good."""
    gpu_model_runner.AsyncGPUModelRunnerOutput = CpuOutput
    event, torch.cuda.Event = torch.cuda.Event, Done  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch.cuda.Event = event  # type: ignore[misc]
