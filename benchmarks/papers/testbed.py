"""The common base of the reproduced papers: step times and admission of the engines of their time (vLLM V0), request
lengths from public tables, simulated instances, and figures of a simulated run."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from shared.cost.catalogue import Accelerator, Catalogue
from shared.cost.efficiency import Efficiencies
from shared.cost.geometry import ModelGeometry, kv_capacity_tokens
from shared.cost.layers import LayerCost
from shared.cost.library import Library
from shared.cost.network import Link
from shared.cost.operators import Collective
from shared.cost.pipeline import Pipeline
from shared.cost.step import Batch, StepModel
from shared.cost.step_rates import step_rates_of
from shared.cost.step_variants import ScaledSteps
from shared.domain.instance import Role
from shared.domain.job import JobView
from shared.domain.rates import Rates
from shared.errors import NotFound
from shared.files.yaml_file import read_yaml
from shared.policy.decode_admission import DecodeAdmission, DecodeMemory
from shared.sim.outcomes import SimResult
from shared.sim.spec import EngineLimits, InstanceSpec
from shared.sim.traces import read_trace
from shared.sim.workload import Workload

ACCELERATORS = Path(__file__).with_name("accelerators.yaml")
COEFFICIENTS = Path(__file__).with_name("coefficients.yaml")

# Step times.


class EngineSteps(StepModel):
    """Step times of vLLM V0: prefill chunks and decodes of one step have attention kernels of their own.

    shares_heads: query heads that share a KV head read its KV once. The paged-attention kernel, which is all that GPUs
    before Ampere can run, reads it for each of them.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        geometry: ModelGeometry,
        tensor_parallel: int,
        efficiencies: Efficiencies,
        shares_heads: bool = True,
    ) -> None:
        super().__init__(accelerator, geometry, tensor_parallel, efficiencies=efficiencies)
        self.shares_heads = shares_heads
        if not shares_heads and geometry.kv_heads < geometry.heads:
            options = tensor_parallel, 1, self.dtype, self.kv_dtype, efficiencies
            self._layers = _DecodeApart(accelerator, geometry, *options)
            self._layers.decodes = LayerCost(accelerator, replace(geometry, kv_heads=geometry.heads), *options)

    def step_time_s(self, batch: Batch) -> float:
        count, contexts = batch.decode_count, batch.decode_context_tokens
        if not batch.prefill or not count:
            return super().step_time_s(batch)
        apart = self._layers.mixed_attention_s(batch.prefill, 0, 0) + self._layers.decode_attention_s(count, contexts)
        return self._dense_s(batch.tokens) + apart + self._head_s(count + len(batch.prefill))


class _DecodeApart(LayerCost):
    decodes: LayerCost

    def decode_attention_s(self, count: int, context_tokens: float) -> float:
        return self.decodes.decode_attention_s(count, context_tokens)


class Shares(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shares of the predicted compute and bandwidth that the papers' engines reach."""

    compute: float = 1.0
    bandwidth: float = 1.0


class EngineCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cost of a step besides its kernels, and of each sequence in it."""

    step_s: float
    sequence_s: float


class PcieCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    collective: Collective
    devices: tuple[str, ...]


class Coefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `coefficients.yaml`, which explains each."""

    engine: EngineCost
    default: Shares
    devices: Mapping[str, Shares]
    pcie: PcieCost
    before_ampere: tuple[str, ...]
    like: Mapping[str, str]

    @classmethod
    def from_file(cls) -> "Coefficients":
        return msgspec.convert(read_yaml(COEFFICIENTS), cls, strict=False)


@dataclass(slots=True)
class Testbed:
    """Step models of the papers' GPUs; each is made once."""

    coefficients: Coefficients = field(default_factory=Coefficients.from_file)
    library: Library = field(default_factory=lambda: Library.built_in(ACCELERATORS))
    _models: dict[tuple[str, str, int, int], StepModel] = field(default_factory=dict)

    @property
    def catalogue(self) -> Catalogue:
        """The shipped accelerators and those of the papers."""
        return self.library.catalogue

    def geometry(self, model: str) -> ModelGeometry:
        return self.library.geometry(model)

    def model(self, accelerator: str, model: str, tensor_parallel: int = 1, layers: int = 0) -> StepModel:
        """Step times as the papers' engines have them. layers: of a pipeline stage, the output projection included."""
        device, whole = self.catalogue.get(accelerator), self.geometry(model)
        key = (device.name, model, tensor_parallel, layers or whole.layers)
        if key not in self._models:
            known = self.coefficients
            fitted = self.library.efficiencies.for_device(known.like.get(device.name, device.name))
            pcie = known.pcie.collective if device.name in known.pcie.devices else fitted.pcie_collective
            shares = known.devices.get(device.name, known.default)
            reached = replace(
                device,
                bandwidth_bytes_s=device.bandwidth_bytes_s * shares.bandwidth,
                matrix_flops={precision: rate * shares.compute for precision, rate in device.matrix_flops.items()},
            )
            self._models[key] = EngineSteps(
                reached,
                replace(whole, layers=key[3]),
                tensor_parallel,
                replace(fitted, pcie_collective=pcie, step_s=known.engine.step_s, sequence_s=known.engine.sequence_s),
                shares_heads=device.name not in known.before_ampere,
            )
        return self._models[key]

    def kv_tokens(self, accelerator: str, model: str, tensor_parallel: int = 1, layers: int = 0) -> int:
        geometry = self.geometry(model)
        part = replace(geometry, layers=layers or geometry.layers)
        return kv_capacity_tokens(self.catalogue.get(accelerator), part, tensor_parallel=tensor_parallel)


# Admission of vLLM V0: some blocks stay free for requests that run.


@dataclass(frozen=True, slots=True)
class Watermark:
    """Admit iff `share` of all blocks is left free beside the whole prompt, which prevents preemptions.

    Source: vLLM's block manager up to 0.8, `watermark` = 0.01. An empty instance admits any prompt that fits.
    """

    name: ClassVar[str] = "watermark"
    needs_running: ClassVar[bool] = False
    share: float = 0.01

    def admit(self, job: JobView, memory: DecodeMemory, now: float) -> bool:
        need = -(-job.prompt_tokens // memory.block_size)
        left = memory.free_blocks - need
        empty = memory.free_blocks == memory.total_blocks and left >= 0
        return empty or left >= self.share * memory.total_blocks


@dataclass(frozen=True, slots=True)
class AtopWatermark:
    """A further policy in such an engine: both must admit."""

    name: ClassVar[str] = "atop_watermark"
    needs_running: ClassVar[bool] = True
    inner: DecodeAdmission

    def admit(self, job: JobView, memory: DecodeMemory, now: float) -> bool:
        return Watermark().admit(job, memory, now) and self.inner.admit(job, memory, now)


# Lengths of requests.

SHAREGPT = Path("traces/token_counts/sharegpt_8k_filtered_stats_llama2_tokenizer.csv")
CODING = Path("traces/azure2023/AzureLLMInferenceTrace_code.csv")
CONVERSATION = Path("traces/azure2023/AzureLLMInferenceTrace_conv.csv")


def sharegpt(data: Path, count: int, seed: int = 0) -> Workload:
    """`count` requests like the first turns of ShareGPT, at most 2048 tokens in all; all at time 0.

    The public table counts the conversation so far as the prompt. Its prompts of up to 512 tokens have a mean of 162,
    that of ShareGPT's first turns (161, with outputs of 338: vLLM, SOSP 2023, Fig 11); outputs are longer here (414).
    """
    table = read_trace(_file(data, SHAREGPT))
    prompt, output = table.prompt_tokens, table.output_tokens
    fits = np.flatnonzero((prompt >= 4) & (prompt <= 512) & (output >= 4))
    at = np.random.default_rng(seed).choice(fits, count, replace=count > len(fits))
    return Workload("ShareGPT", np.zeros(count), prompt[at], output[at])


def azure(data: Path, which: Path, count: int, longest_tokens: int | None = None) -> Workload:
    """The first `count` requests of an Azure trace; prompts cut so that a request has at most `longest_tokens`."""
    trace = read_trace(_file(data, which)).head(count)
    if longest_tokens is None:
        return trace
    output = np.minimum(trace.output_tokens, longest_tokens // 2)
    return replace(trace, prompt_tokens=np.minimum(trace.prompt_tokens, longest_tokens - output), output_tokens=output)


def _file(data: Path, path: Path) -> Path:
    if not (data / path).is_file():
        raise NotFound(f"no {path} below {data}; give the folder that holds `traces/`")
    return data / path


# Simulated instances.


@dataclass(frozen=True, slots=True)
class Kind:
    """Instances of one kind. slowed: factor on every step (a second model on the same accelerator)."""

    accelerator: str
    model: str
    tensor_parallel: int = 1
    limits: EngineLimits = field(default_factory=EngineLimits)
    link: Link = field(default_factory=lambda: Link(12.5e9))
    slowed: float = 1.0


def instances(testbed: Testbed, kind: Kind, role: Role, count: int = 1, prefix: str = "") -> tuple[InstanceSpec, ...]:
    """`count` instances of one kind; ids are `prefix` (by default the role) and a number."""
    model = testbed.model(kind.accelerator, kind.model, kind.tensor_parallel)
    device = testbed.catalogue.get(kind.accelerator)
    price = device.price_usd_hour * kind.tensor_parallel
    first = InstanceSpec(
        instance_id="",
        model=model if kind.slowed == 1.0 else ScaledSteps(model, kind.slowed),
        role=role,
        kv_tokens=testbed.kv_tokens(kind.accelerator, kind.model, kind.tensor_parallel),
        kv_bytes_per_token=model.geometry.kv_bytes_per_token(),
        limits=kind.limits,
        link=kind.link,
        accelerator=device.name,
        accelerators=kind.tensor_parallel,
        price_per_hour=price,
        rates=Rates(step_rates_of(model.step_time_s, min(kind.limits.batched_tokens, 2048)), price_per_hour=price),
    )
    return tuple(first.renamed(f"{prefix or role.value}-{at}") for at in range(count))


def weighed(spec: InstanceSpec, weight: float) -> InstanceSpec:
    return replace(spec, rates=msgspec.structs.replace(spec.rates, weight=weight))


@dataclass(frozen=True, slots=True)
class Stage:
    """`layers` layers on `tensor_parallel` accelerators: a part of an instance with pipeline parallelism."""

    accelerator: str
    layers: int
    tensor_parallel: int = 1


def staged(
    testbed: Testbed,
    name: str,
    model: str,
    stages: tuple[Stage, ...],
    role: Role,
    limits: EngineLimits,
    link: Link,
    hop: Link,
) -> InstanceSpec:
    """An instance of several stages, with as many batches in flight. hop: the path from a stage to the next."""
    geometry = testbed.geometry(model)
    models = tuple(testbed.model(s.accelerator, model, s.tensor_parallel, s.layers) for s in stages)
    lanes = len(stages)
    per_token_s = geometry.hidden * 2.0 / (hop.bandwidth_bytes_s * hop.efficiency)
    price = sum(testbed.catalogue.get(s.accelerator).price_usd_hour * s.tensor_parallel for s in stages)

    def alone_s(batch: Batch) -> float:
        """Seconds of a batch that passes the stages alone."""
        return sum(one.step_time_s(batch) for one in models)

    return InstanceSpec(
        instance_id=name,
        model=models[0] if lanes == 1 else Pipeline(models, lanes, hop.latency_s, per_token_s),
        role=role,
        kv_tokens=min(testbed.kv_tokens(s.accelerator, model, s.tensor_parallel, s.layers) for s in stages),
        kv_bytes_per_token=geometry.kv_bytes_per_token(),
        limits=limits,
        link=link,
        accelerator="+".join(f"{s.tensor_parallel}x{s.accelerator}" for s in stages),
        accelerators=sum(s.tensor_parallel for s in stages),
        price_per_hour=price,
        lanes=lanes,
        rates=Rates(step_rates_of(alone_s, min(limits.batched_tokens, 2048)), price_per_hour=price),
    )


def in_turn(spec: InstanceSpec) -> InstanceSpec:
    """An instance of stages whose lanes take turns: a step waits for a pass of every other lane."""
    pipeline = spec.model
    assert isinstance(pipeline, Pipeline)
    passes = float(spec.lanes)
    stages = tuple(ScaledSteps(stage, passes) for stage in pipeline.stages if isinstance(stage, StepModel))
    return replace(spec, model=Pipeline(stages, 1, passes * pipeline.hop_s, passes * pipeline.hop_s_per_token))


# Figures of a run, of its completed requests.


def mean_ttft_s(result: SimResult) -> float:
    return float(result.outcomes.ttft_s[result.outcomes.completed].mean())


def mean_jct_s(result: SimResult) -> float:
    return float(result.outcomes.jct_s[result.outcomes.completed].mean())


def p99_ttft_s(result: SimResult) -> float:
    return float(np.percentile(result.outcomes.ttft_s[result.outcomes.completed], 99))


def requests_per_s(result: SimResult) -> float:
    return float(result.outcomes.completed.sum()) / result.duration_s


def tokens_per_s(result: SimResult) -> float:
    """Prompt and output tokens over the run."""
    done = result.outcomes.completed
    total = result.outcomes.prompt_tokens[done].sum() + result.outcomes.output_tokens[done].sum()
    return float(total) / result.duration_s


def change(ours: float, baseline: float) -> float:
    """Percent by which `ours` differs from `baseline`."""
    return 100.0 * (ours / baseline - 1.0)
