"""Small clusters for tests of the simulator."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.cost.network import Link
from shared.cost.step import Batch
from shared.domain.instance import Role
from shared.sim.spec import EngineLimits, InstanceSpec


@dataclass(frozen=True)
class Linear:
    """Step times that can be worked out by hand."""

    base_s: float = 0.010
    prefill_s: float = 0.001  # a prompt token
    decode_s: float = 0.001  # a decode
    context_s: float = 0.0  # a token of a decode's context

    def step_time_s(self, batch: Batch) -> float:
        tokens = sum(tokens for tokens, _ in batch.prefill)
        decodes = self.decode_s * batch.decode_count + self.context_s * batch.decode_context_tokens
        return self.base_s + self.prefill_s * tokens + decodes

    def decode_time_s(self, count: int, context_tokens: int) -> float:
        return self.step_time_s(Batch((), count, context_tokens))

    def decode_segments(self, count: int, context_tokens: int, steps: int) -> tuple[tuple[int, float, float], ...]:
        last = self.decode_time_s(count, context_tokens + (steps - 1) * count)
        return ((steps, self.decode_time_s(count, context_tokens), last),)


def instance(
    name: str,
    role: Role,
    model: Linear | None = None,
    *,
    kv_tokens: int = 16_000,
    limits: EngineLimits | None = None,
    **more: object,
) -> InstanceSpec:
    """An instance with a link of 1 MB/s and KV of 100 bytes a token: 0.1 ms a token."""
    return InstanceSpec(
        name,
        model or Linear(),
        role,
        kv_tokens,
        100.0,
        limits or EngineLimits(batched_tokens=256, sequences=64),
        Link(1e6, 0.0, 1.0),
        accelerator=name,
        **more,  # type: ignore[arg-type]
    )


def pair(**more: object) -> list[InstanceSpec]:
    """One prefill and one decode instance."""
    return [instance("p", Role.PREFILL, **more), instance("d", Role.DECODE, **more)]  # type: ignore[arg-type]


def several(prefills: int, decodes: int, **more: object) -> list[InstanceSpec]:
    """Alike instances."""
    named: Sequence[tuple[str, Role]] = [(f"p{i}", Role.PREFILL) for i in range(prefills)]
    named = [*named, *((f"d{i}", Role.DECODE) for i in range(decodes))]
    return [instance(name, role, **more) for name, role in named]  # type: ignore[arg-type]
