"""vLLM's CPU worker, which survives a seeded request whose prompt takes several steps, and soon sleeps when idle."""

from contextlib import nullcontext
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.v1.worker.cpu_worker import CPUWorker

from services.worker.engines.vllm_forced import ForcedTokens

# How long a rank looks for its next step without sleeping. vLLM's second keeps a core per rank from those that compute,
# while being woken takes a tenth of a millisecond.
_SPIN_S = 0.002
SpinCondition.__init__.__defaults__ = (_SPIN_S,)


class SeededCpuWorker(CPUWorker):  # type: ignore[misc]  # vLLM is untyped here
    """A row of a prompt that goes on in the next step takes no random numbers of its request.

    vLLM 0.32 samples such rows too, drops the token, and winds the request's generator back by an offset, which a CPU
    generator does not have: the engine died of it.
    """

    def init_device(self) -> None:
        """As vLLM, also with asynchronous scheduling."""
        from services.worker.engines.vllm_cpu_async import stand_ins

        with stand_ins() if self.scheduler_config.async_scheduling else nullcontext():
            super().init_device()
        # `ForcedTokens` needs the number of a request's tokens, not which they are: a step need not wait for the last.
        processors = self.model_config.logits_processors or ()
        if all(one is ForcedTokens for one in processors):
            self.model_runner.input_batch.logitsprocs_need_output_token_ids = False

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As vLLM, with those rows drawn from everybody's generator."""
        runner = self.model_runner
        generators, batch = runner.input_batch.generators, runner.input_batch.num_reqs
        unfinished = runner.discard_request_mask.np[:batch].nonzero()[0].tolist()
        kept = {row: generators.pop(row) for row in unfinished if row in generators}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(kept)
