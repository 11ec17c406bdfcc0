"""A cluster file or a simulation file as the simulator's instances and run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from services.worker.engines.emulated import fixed_step_rates
from shared.cost.catalogue import Accelerator, bytes_of
from shared.cost.geometry import ModelGeometry
from shared.cost.kinds import HOP_LATENCY_S, EngineKind, Stage, Workshop, even_layers
from shared.cost.library import Library
from shared.cost.network import INSIDE_EFFICIENCY, Link, LinkEntry, Network
from shared.cost.rates_file import CalibratedKind, ScaledSteps, merged_rates, scaled_rates
from shared.cost.step import Batch, StepTimes
from shared.cost.step_rates import step_rates_of
from shared.domain.job import Slo
from shared.domain.kv import default_staging
from shared.domain.rates import Rates
from shared.errors import Incompatible, InvalidRequest, PolyphaseError
from shared.policy.registry import from_file
from shared.policy.step_budget import ChunkBounds, chunk_tokens
from shared.sim.prediction import Prediction
from shared.sim.spec import EngineLimits, Flip, InstanceSpec, Loss, RunSpec, with_policies
from tools.simulate.from_cluster import read_cluster
from tools.simulate.sim_file import InstanceEntry, SimFile, find_file, is_sim_file, load_sim_file, places_of


@dataclass(frozen=True, slots=True)
class Deployment:
    """A cluster to simulate. run: of the file; the command line may change it."""

    name: str
    model: str
    instances: tuple[InstanceSpec, ...]
    run: RunSpec


def load_deployment(file: Path, calibration: Path | None = None) -> Deployment:
    """Read a cluster file or a simulation file; a bare name is that of a shipped one.

    calibration: efficiencies instead of the file's. Raises InvalidRequest or NotFound that name file and key, and
    Incompatible for an instance that the model does not fit.
    """
    file = find_file(file)
    cluster = None if is_sim_file(file) else read_cluster(file)
    read = load_sim_file(file) if cluster is None else cluster.sim
    if calibration is not None:
        read = read.model_copy(update={"calibration": calibration})
    builder = _Builder(read, file, {} if cluster is None else cluster.measured)
    instances = builder.instances()
    try:
        network = builder.network()
    except InvalidRequest as error:
        raise InvalidRequest(places_of(file).tell("network", error.message.removeprefix("network: "))) from error
    return Deployment(read.name or file.stem, read.model, instances, replace(_run(read, file), network=network))


def _run(read: SimFile, file: Path) -> RunSpec:
    prediction = read.prediction
    run = RunSpec(
        label=read.name or file.stem,
        prediction=Prediction(**prediction.model_dump()) if prediction else None,
        slo=Slo(
            ttft_s=read.slo.ttft_s,
            tpot_s=read.slo.tpot_s,
            when_full=read.slo.when_full,
            lossy_kv=read.slo.lossy_kv,
            itl_s=read.slo.itl_s or 0.0,
            first_token=read.slo.first_token,
        ),
        delay_s=read.slo.queue_s,
        losses=tuple(Loss(entry.instance, entry.at_s, entry.back_s) for entry in read.losses),
        flips=tuple(Flip(entry.instance, entry.at_s) for entry in read.flips),
        **dict(read.run),
    )
    try:
        return with_policies(run, from_file(read.policies))
    except InvalidRequest as error:
        kind, _, text = error.message.partition(": ")
        raise InvalidRequest(places_of(file).tell(f"policies.{kind}", text)) from error


class _Builder:
    """Builds the instances; instances of a kind share a step model, which caches its results."""

    def __init__(self, read: SimFile, file: Path, measured: Mapping[str, CalibratedKind | None]) -> None:
        self._read = read
        self._measured = measured
        self._file = file
        self._library = Library.built_in(read.accelerators, read.calibration)
        try:
            self._shop = Workshop(self._library, self._library.geometry(read.model))
        except PolyphaseError as error:
            raise type(error)(places_of(file).tell("model", error.message)) from error

    def instances(self) -> tuple[InstanceSpec, ...]:
        """In the order of the file."""
        specs: list[InstanceSpec] = []
        for index, entry in enumerate(self._read.instances):
            try:
                spec = self._instance(entry)
            except PolyphaseError as error:
                message = places_of(self._file).tell(f"instances.{index}", error.message)
                raise type(error)(message) from error
            specs += [spec.renamed(name) for name in entry.ids]
        return tuple(specs)

    def network(self) -> Network:
        """The network between the nodes of instances; inside a node the scale-up link, unless the file gives one."""
        if self._read.network is None:
            return Network()
        nodes = {entry.node: entry for entry in self._read.instances if entry.node}
        devices = {name: self._shop.device(entry.accelerator) for name, entry in nodes.items()}
        inside = {
            name: Link(device.links.scale_up, HOP_LATENCY_S, INSIDE_EFFICIENCY) for name, device in devices.items()
        }
        network = self._read.network.network(sorted(nodes), inside)
        slowdowns = {entry.slowdown for entry in self._read.instances if entry.node}
        if len(slowdowns) > 1:
            raise InvalidRequest("network: instances on its nodes must have the same slowdown, which applies to links")
        return network if slowdowns <= {1.0} else network.slower(slowdowns.pop())

    def _instance(self, entry: InstanceEntry) -> InstanceSpec:
        kind = _kind(entry, self._shop)
        device, ranks = self._shop.device(kind.stages[0].accelerator), kind.accelerators
        price = self._shop.price_usd_hour(kind) if entry.price_usd_hour is None else ranks * entry.price_usd_hour
        geometry = self._shop.geometry
        longest = entry.max_model_len or self._read.max_model_len or geometry.max_position
        kv_bytes = geometry.kv_bytes_per_token(bytes_of(self._shop.kv_dtype(kind)))
        kv_tokens = _kv_tokens(entry, kind, self._shop, kv_bytes, longest)
        times = self._times(entry, kind)
        chunk = _chunk_size(entry, times)
        return InstanceSpec(
            instance_id=entry.name,
            model=times,
            role=entry.role,
            kv_tokens=kv_tokens,
            kv_bytes_per_token=kv_bytes,
            limits=EngineLimits(
                batched_tokens=chunk,
                sequences=max(1, entry.max_seqs // kind.lanes),
                block_tokens=entry.block_size,
                max_model_len=longest,
                prefill_first=entry.prefill_first,
                reserves_output=entry.reserves_output,
                prefix_cache=entry.prefix_cache,
            ),
            link=_link(entry, device, self._read.links),
            node=entry.node,
            accelerator="+".join(dict.fromkeys(self._shop.device(stage.accelerator).name for stage in kind.stages)),
            accelerators=ranks,
            price_per_hour=price,
            lanes=kind.lanes,
            staging_tokens=_staging_tokens(entry, geometry, kv_bytes, kv_tokens, longest),
            max_prefills=entry.max_prefills,
            rates=self._reported(entry, kind, price, chunk),
        )

    def _times(self, entry: InstanceEntry, kind: EngineKind) -> StepTimes:
        """An emulated engine has the times of its settings, a real one those that were measured."""
        if entry.step_s:
            return FixedSteps(entry.slowdown * entry.step_s, entry.slowdown * entry.prefill_s_per_token)
        found = self._measured.get(entry.name)
        if found is not None and found.kind.engine != "emulated":
            return found.step_times(self._library)
        model = self._shop.times(kind)
        return model if entry.slowdown == 1.0 else ScaledSteps(model, entry.slowdown)

    def _reported(self, entry: InstanceEntry, kind: EngineKind, price: float, chunk: int) -> Rates:
        """The rates that policies know of an instance."""
        if entry.name not in self._measured:
            return self._fitted(entry, kind, price, chunk)
        found, known = self._measured[entry.name], Rates(price_per_hour=price, weight=entry.weight)
        return known if found is None else merged_rates(known, found.rates)

    def _fitted(self, entry: InstanceEntry, kind: EngineKind, price: float, chunk: int) -> Rates:
        if entry.step_s:
            rates = fixed_step_rates(entry.step_s, entry.prefill_s_per_token, chunk)
            rates = msgspec.structs.replace(rates, price_per_hour=price, weight=entry.weight)
            return scaled_rates(rates, entry.slowdown)
        return scaled_rates(self._shop.rates(kind, chunk, price, entry.weight), entry.slowdown)


def _kind(entry: InstanceEntry, shop: Workshop) -> EngineKind:
    names = entry.stage_accelerators or (entry.accelerator,) * entry.pipeline_parallel
    layers = entry.pipeline_layers or even_layers(shop.geometry.layers, entry.pipeline_parallel)
    stages = tuple(Stage(shop.device(name).name, count) for name, count in zip(names, layers, strict=True))
    hop = entry.hop.link if entry.hop is not None else None
    return EngineKind(stages, entry.tensor_parallel, entry.dtype, entry.kv_dtype, hop)


def _chunk_size(entry: InstanceEntry, times: StepTimes) -> int:
    """The entry's chunk size; for `auto` the one of a worker that has learned these times."""
    if isinstance(entry.chunk_size, int):
        return entry.chunk_size
    form = step_rates_of(times.step_time_s, entry.max_chunk_size).prefill
    return chunk_tokens(form, ChunkBounds.of(entry.max_chunk_size, entry.max_seqs, entry.block_size))


def _kv_tokens(entry: InstanceEntry, kind: EngineKind, shop: Workshop, kv_bytes_per_token: float, longest: int) -> int:
    """KV capacity: the entry's, if it fits beside the weights; by default what the weights leave."""
    if entry.kv_cache_bytes is None:
        return shop.require_fit(kind, longest, entry.memory_utilisation, entry.reserve_bytes)
    geometry = shop.geometry
    weights = geometry.weight_bytes(bytes_of(entry.dtype or geometry.dtype))
    room = sum(entry.tensor_parallel * shop.device(stage.accelerator).memory_bytes for stage in kind.stages)
    if weights + entry.kv_cache_bytes > room:
        raise Incompatible(
            f"{geometry.name} does not fit {kind}: weights of {weights / 1e9:.1f} GB and "
            f"kv_cache_bytes of {entry.kv_cache_bytes / 1e9:.1f} GB in {room / 1e9:.1f} GB"
        )
    tokens = _tokens_in(entry.kv_cache_bytes, entry, geometry, kv_bytes_per_token)
    if tokens < longest:
        raise Incompatible(f"kv_cache_bytes hold {tokens} tokens, and one request may need {longest} (max_model_len)")
    return tokens


def _staging_tokens(
    entry: InstanceEntry, geometry: ModelGeometry, kv_bytes: float, kv_tokens: int, longest: int
) -> int | None:
    if entry.staging_bytes is None:
        return None
    if entry.staging_bytes == "auto":
        return default_staging(kv_tokens, longest)
    return _tokens_in(entry.staging_bytes, entry, geometry, kv_bytes)


def _tokens_in(size: int, entry: InstanceEntry, geometry: ModelGeometry, kv_bytes_per_token: float) -> int:
    """Tokens whose KV fits in `size` bytes over all ranks."""
    copies = float(entry.tensor_parallel) if geometry.latent else max(1.0, entry.tensor_parallel / geometry.kv_heads)
    return int(size // (kv_bytes_per_token * copies))


def _link(entry: InstanceEntry, device: Accelerator, links: Mapping[str, LinkEntry]) -> Link:
    link = entry.link or links.get("default")
    if isinstance(link, str):
        link = links[link]
    if link is None:
        return Link(device.links.network * entry.tensor_parallel * entry.pipeline_parallel / entry.slowdown)
    return Link(link.gbps * 1e9 / 8.0 / entry.slowdown, link.latency_s, link.efficiency)


@dataclass(frozen=True, slots=True)
class FixedSteps:
    """Steps of `step_s`, and `prefill_s_per_token` for each prefill token: an emulated engine without a cost model."""

    step_s: float
    prefill_s_per_token: float = 0.0

    def step_time_s(self, batch: Batch) -> float:
        return self.step_s + self.prefill_s_per_token * sum(tokens for tokens, _ in batch.prefill)

    def decode_time_s(self, count: int, context_tokens: int) -> float:
        return self.step_s

    def decode_segments(self, count: int, context_tokens: int, steps: int) -> tuple[tuple[int, float, float], ...]:
        return ((steps, self.step_s, self.step_s),)
