"""Kinds of engines, by how they are built: their step times, KV capacity and rates, each worked out once.

The planner, `polyphase simulate` and emulated engines make their step times here, so that all predict the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.cost.catalogue import Accelerator, bytes_of, kv_precision
from shared.cost.geometry import RESERVE_BYTES, UTILISATION, ModelGeometry, kv_capacity_tokens
from shared.cost.library import Library
from shared.cost.network import Link
from shared.cost.pipeline import Pipeline
from shared.cost.step import Batch, StepModel
from shared.cost.step_rates import step_rates_of
from shared.domain.rates import StepRates
from shared.errors import Incompatible, InvalidRequest

HOP_LATENCY_S = 1e-4  # default latency of activations from stage to stage
HOST_EFFICIENCY = 0.8  # of the link to host memory, which copies of whole blocks reach: ours, not measured
_ACTIVATION_BYTES = 2.0  # of an element that goes from stage to stage


@dataclass(frozen=True, slots=True)
class Stage:
    """`layers` of the model's layers on accelerators of one type."""

    accelerator: str
    layers: int


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine: its pipeline stages in order, with `tensor_parallel` accelerators and one batch in flight for each.

    hop: the path from a stage to the next; by default the first accelerator's scale-up link.
    """

    stages: tuple[Stage, ...]
    tensor_parallel: int = 1
    dtype: str | None = None
    kv_dtype: str | None = None
    hop: Link | None = None

    @property
    def lanes(self) -> int:
        return len(self.stages)

    @property
    def accelerators(self) -> int:
        return self.tensor_parallel * len(self.stages)

    def __str__(self) -> str:
        names = list(dict.fromkeys(stage.accelerator for stage in self.stages))
        counts = [sum(stage.accelerator == name for stage in self.stages) for name in names]
        return " + ".join(f"{self.tensor_parallel * n} x {name}" for n, name in zip(counts, names, strict=True))


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage as vLLM divides them: the remainder goes to the stages before the last."""
    each, over = divmod(layers, stages)
    counts = [each] * stages
    for at in range(over):
        counts[-2 - at] += 1
    return tuple(counts)


class EngineModels:
    """Makes and keeps what engines of one model are simulated with: equal engines share their step times."""

    def __init__(self, library: Library, geometry: ModelGeometry) -> None:
        self.library = library
        self.geometry = geometry
        self._models: dict[tuple[object, ...], StepModel] = {}
        self._times: dict[EngineKind, StepModel | Pipeline] = {}
        self._rates: dict[tuple[EngineKind, int, int], StepRates] = {}

    def device(self, name: str) -> Accelerator:
        return self.library.catalogue.get(name)

    def times(self, kind: EngineKind) -> StepModel | Pipeline:
        """Step times: the accelerator's alone, or those of a pipeline with a batch in flight for each stage."""
        found = self._times.get(kind)
        if found is None:
            self._check(kind)
            stages = tuple(self._model(kind, stage) for stage in kind.stages)
            found = self._times[kind] = stages[0] if len(stages) == 1 else self._pipeline(kind, stages)
        return found

    def kv_dtype(self, kind: EngineKind) -> str:
        return kv_precision(kind.dtype or self.geometry.dtype, kind.kv_dtype)

    def kv_tokens(
        self, kind: EngineKind, utilisation: float = UTILISATION, reserve_bytes: float = RESERVE_BYTES
    ) -> int:
        """KV capacity of the tightest stage, as each holds its layers of each token. Negative: weights do not fit."""
        return min(
            kv_capacity_tokens(
                self.device(stage.accelerator),
                self.geometry.part(stage.layers),
                tensor_parallel=kind.tensor_parallel,
                dtype=kind.dtype,
                kv_dtype=kind.kv_dtype,
                utilisation=utilisation,
                reserve_bytes=reserve_bytes,
            )
            for stage in kind.stages
        )

    def require_fit(
        self,
        kind: EngineKind,
        longest_tokens: int,
        utilisation: float = UTILISATION,
        reserve_bytes: float = RESERVE_BYTES,
    ) -> int:
        """The KV capacity; raises Incompatible when not one request of `longest_tokens` fits (Huawei eq. 2)."""
        tokens = self.kv_tokens(kind, utilisation, reserve_bytes)
        if tokens >= longest_tokens * kind.lanes:
            return tokens
        weights = self.geometry.weight_bytes(bytes_of(kind.dtype or self.geometry.dtype)) / 1e9
        room = sum(kind.tensor_parallel * self.device(stage.accelerator).memory_bytes for stage in kind.stages)
        raise Incompatible(
            f"{self.geometry.name} does not fit {kind}: weights of {weights:.1f} GB in {utilisation * room / 1e9:.1f} "
            f"GB leave KV for {max(0, tokens) // kind.lanes} tokens of a request, which may need {longest_tokens}"
        )

    def host_token_s(self, kind: EngineKind) -> float:
        """Seconds to copy the KV of a token between the accelerators and host memory: those of the slowest stage."""
        width = bytes_of(self.kv_dtype(kind))

        def of_stage(stage: Stage) -> float:
            part = self.geometry.part(stage.layers)
            share = 1.0 if part.latent else max(1.0 / kind.tensor_parallel, 1.0 / part.kv_heads)  # of one rank
            rate = HOST_EFFICIENCY * self.device(stage.accelerator).links.pcie
            return part.kv_bytes_per_token(width) * share / rate

        return max(map(of_stage, kind.stages))

    def step_rates(self, kind: EngineKind, chunk: int, decodes: int = 128) -> StepRates:
        """The step cost that policies know, over steps of up to `chunk` tokens and `decodes` decodes."""
        key = (kind, chunk, decodes)
        if key not in self._rates:
            times, lanes = self.times(kind), kind.lanes

            def step_s(batch: Batch) -> float:
                """Seconds of a lane's step by the decodes of the whole engine, of which each lane has its share."""
                count, context = -(-batch.decode_count // lanes), batch.decode_context_tokens // lanes
                return times.step_time_s(Batch(batch.prefill, count, context))

            self._rates[key] = step_rates_of(step_s, chunk, decodes)
        return self._rates[key]

    def price_usd_hour(self, kind: EngineKind) -> float:
        return sum(kind.tensor_parallel * self.device(stage.accelerator).price_usd_hour for stage in kind.stages)

    def _check(self, kind: EngineKind) -> None:
        layers = [stage.layers for stage in kind.stages]
        if min(layers) < 1 or sum(layers) != self.geometry.layers:
            raise InvalidRequest(
                f"the layers of the stages, {layers}, must be at least 1 each and sum to the {self.geometry.layers} of "
                f"{self.geometry.name}"
            )

    def _model(self, kind: EngineKind, stage: Stage) -> StepModel:
        device = self.device(stage.accelerator)
        key = (device.name, stage.layers, kind.tensor_parallel, kind.dtype, kind.kv_dtype)
        if key not in self._models:
            self._models[key] = StepModel(
                device,
                self.geometry.part(stage.layers),
                kind.tensor_parallel,
                1,
                kind.dtype,
                self.library.efficiencies.for_device(device.name),
                kind.kv_dtype,
            )
        return self._models[key]

    def _pipeline(self, kind: EngineKind, stages: Sequence[StepModel]) -> Pipeline:
        hop = kind.hop or Link(stages[0].accelerator.links.scale_up, HOP_LATENCY_S)
        per_token_s = self.geometry.hidden * _ACTIVATION_BYTES / (hop.bandwidth_bytes_s * hop.efficiency)
        return Pipeline(tuple(stages), len(stages), hop.latency_s, per_token_s)
