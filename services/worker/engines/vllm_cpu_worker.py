"""vLLM's CPU worker with additions, checked against vLLM 0.32.0 (see `vllm_patches`).

It supports seeded requests whose prompt takes several steps, and the streams and events that asynchronous scheduling
expects of a device, so that everything that depends on that can be tested on any machine. Its LoRA leaves rows of the
base model alone. Its experts may be divided among data-parallel ranks. vLLM loads the class by name.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

from services.worker.engines.vllm_patches import ForcedTokens

# How long a rank polls for its next step before it sleeps. vLLM's second keeps a core busy for each rank, and waking a
# sleeping rank takes a tenth of a millisecond.
_SPIN_S = 0.002
SpinCondition.__init__.__defaults__ = (_SPIN_S,)


def without_base_rows(operation: Callable[..., None]) -> Callable[..., None]:
    """An operation of vLLM's LoRA on CPUs that adds nothing to rows without an adapter.

    Such rows have the index -1, and vLLM takes it for that of the last adapter: a request for the base model that
    shares a step with one for an adapter gets an answer of an adapter (vllm-project/vllm#48421).
    """

    def masked(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        indices: torch.Tensor,
        *more: Any,
        **named: Any,
    ) -> None:
        base = indices < 0
        if base.any():
            inputs = inputs.masked_fill(base.unsqueeze(1), 0)
        operation(inputs, weights, output, indices, *more, **named)

    return masked


def leave_base_rows_alone() -> None:
    for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
        masked = without_base_rows(getattr(lora_ops, name))
        for module in (lora_ops, punica_cpu):  # the first calls them for prompts, the second for single tokens
            setattr(module, name, masked)


leave_base_rows_alone()


def all_gatherv(
    communicator: Any, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """As the communicators of devices have it: the rows of all ranks, of which each has `sizes[rank]`.

    Gloo gathers tensors of one size only, so that all are padded to the largest.
    """
    if isinstance(input_, list):
        return [all_gatherv(communicator, each, dim, sizes) for each in input_]  # type: ignore[misc]
    assert dim == 0
    if sizes is None or len(set(sizes)) == 1:
        return communicator.all_gather(input_, dim=0)  # type: ignore[no-any-return]
    most = max(sizes)
    padded = input_.new_zeros((most, *input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    gathered = communicator.all_gather(padded, dim=0)
    return torch.cat([gathered[rank * most :][:size] for rank, size in enumerate(sizes)])


def reduce_scatterv(
    communicator: Any, input_: torch.Tensor, dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor:
    """The same for the sum over all ranks, of which each gets its rows."""
    assert dim == 0
    ranks, own = communicator.world_size, communicator.rank_in_group
    each = sizes if sizes is not None else [input_.shape[0] // ranks] * ranks
    summed: torch.Tensor = communicator.all_reduce(input_.clone())
    return summed[sum(each[:own]) :][: each[own]].clone()


CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


def for_own_experts(experts: Callable[..., None]) -> Callable[..., None]:
    """`CPUUnquantizedExperts.apply` for experts that are divided among ranks.

    vLLM's kernel takes the numbers of experts for those of the rank's own. What it computes for the others counts
    nothing, since their ranks compute it.
    """

    @functools.wraps(experts)
    def mapped(self: Any, *given: Any, **named: Any) -> None:
        arguments = _EXPERTS.bind(self, *given, **named).arguments
        if (numbers := arguments["expert_map"]) is not None:
            own = numbers[arguments["topk_ids"].long()]
            arguments["topk_weights"] = arguments["topk_weights"].masked_fill(own < 0, 0)
            arguments["topk_ids"] = own.clamp(min=0).to(arguments["topk_ids"].dtype)
        experts(**arguments)

    return mapped


_EXPERTS = inspect.signature(CPUUnquantizedExperts.apply)
CPUUnquantizedExperts.apply = for_own_experts(CPUUnquantizedExperts.apply)


class SeededCpuWorker(CPUWorker):  # type: ignore[misc]  # vLLM is untyped here
    """Rows of a prompt that goes on in the next step use no random numbers of their request.

    vLLM samples such rows too, drops the token, and winds the request's generator back by an offset, which a CPU
    generator does not have: the engine died of it.
    """

    def init_device(self) -> None:
        with device_stand_ins() if self.scheduler_config.async_scheduling else nullcontext():
            super().init_device()
        # `ForcedTokens` needs the number of a request's tokens, not which they are: a step need not wait for the last.
        processors = self.model_config.logits_processors or ()
        if all(one is ForcedTokens for one in processors):
            self.model_runner.input_batch.logitsprocs_need_output_token_ids = False

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As vLLM, with those rows drawn from the shared generator."""
        runner = self.model_runner
        generators, batch = runner.input_batch.generators, runner.input_batch.num_reqs
        unfinished = runner.discard_request_mask.np[:batch].nonzero()[0].tolist()
        kept = {row: generators.pop(row) for row in unfinished if row in generators}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(kept)


class CompletedEvent:
    """An event of a device on which each call is done when it returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


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
        # As vLLM's, without its copies.
        self._model_runner_output = model_runner_output
        self._invalid_req_indices = invalid_req_indices
        self.async_copy_ready_event = CompletedEvent()
        self._sampled_token_ids = sampled_token_ids
        self.sampled_token_ids_cpu = sampled_token_ids.clone()
        self.vocab_size = vocab_size
        self._logprobs_tensors = self._logprobs_tensors_cpu = logprobs_tensors
        self._num_nans = self._num_nans_cpu = num_nans
        self._has_fault = None


@contextmanager
def device_stand_ins() -> Iterator[None]:
    """A model runner that is created inside needs no device; its outputs are `CpuOutput`s from then on."""
    gpu_model_runner.AsyncGPUModelRunnerOutput = CpuOutput
    event, torch.cuda.Event = torch.cuda.Event, CompletedEvent  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch.cuda.Event = event  # type: ignore[misc]
