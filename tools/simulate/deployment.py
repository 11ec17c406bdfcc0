"""A cluster file or a simulation file as the simulator's instances and run."""

from dataclasses import dataclass, replace
from pathlib import Path

from services.worker.engines.emulated import fixed_steps
from shared.cost.catalogue import bytes_of
from shared.cost.kinds import HOP_LATENCY_S, EngineKind, EngineModels, Stage, even_layers
from shared.cost.library import Library
from shared.cost.network import INSIDE_EFFICIENCY, Link, Network
from shared.cost.step import Batch, StepTimes
from shared.cost.step_rates import step_rates_of
from shared.cost.step_variants import ScaledSteps
from shared.domain.job import Slo
from shared.domain.kv import default_staging
from shared.domain.precision import QUANTISED
from shared.domain.rates import Rates
from shared.errors import Incompatible, InvalidRequest
from shared.files.yaml_file import read_document
from shared.policy.registry import from_file
from shared.policy.step_budget import ChunkBounds, chunk_tokens
from shared.sim.prediction import Prediction
from shared.sim.spec import EngineLimits, Flip, HostTier, InstanceSpec, Loss, RunSpec, with_policies
from tools.simulate.from_cluster import Measured, read_cluster
from tools.simulate.sim_file import InstanceEntry, SimFile, at_key, find_file, is_sim_file, load_sim_file


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
    read, measured = (load_sim_file(file), {}) if is_sim_file(file) else read_cluster(file)
    places = read_document(file).places
    with at_key(places, "model"):
        library = Library.built_in(read.accelerators, calibration or read.calibration)
        models = EngineModels(library, library.geometry(read.model))
    instances: list[InstanceSpec] = []
    for index, entry in enumerate(read.instances):
        with at_key(places, f"instances.{index}"):
            spec = _Instance(entry, read, models, measured).spec()
        instances += [spec.renamed(name) for name in entry.ids]
    with at_key(places, ""):
        network = _network(read, models)
    with at_key(places, ""):
        prediction = Prediction(**read.prediction.model_dump()) if read.prediction else None
    name = read.name or file.stem
    run = replace(_run(read), label=name, prediction=prediction, network=network)
    with at_key(places, "policies"):
        run = with_policies(run, from_file(read.policies))
    return Deployment(name, read.model, tuple(instances), run)


def _run(read: SimFile) -> RunSpec:
    slo = {**read.slo.model_dump(exclude={"queue_s"}), "itl_s": read.slo.itl_s or 0.0}
    return RunSpec(
        slo=Slo(**slo),
        delay_s=read.slo.queue_s,
        losses=tuple(Loss(entry.instance, entry.at_s, entry.back_s) for entry in read.losses),
        flips=tuple(Flip(entry.instance, entry.at_s) for entry in read.flips),
        **dict(read.run),
    )


def _network(read: SimFile, models: EngineModels) -> Network:
    """The network between the nodes of instances; inside a node the scale-up link, unless the file gives one."""
    if read.network is None:
        return Network()
    nodes = {entry.node: models.device(entry.accelerator) for entry in read.instances if entry.node}
    inside = {name: Link(device.links.scale_up, HOP_LATENCY_S, INSIDE_EFFICIENCY) for name, device in nodes.items()}
    network = read.network.network(sorted(nodes), inside)
    slowdowns = {entry.slowdown for entry in read.instances if entry.node}
    if len(slowdowns) > 1:
        raise InvalidRequest("network: instances on its nodes must have the same slowdown, which applies to links")
    return network if slowdowns <= {1.0} else network.slower(slowdowns.pop())


class _Instance:
    """An entry of the file on its way to the simulator."""

    def __init__(self, entry: InstanceEntry, read: SimFile, models: EngineModels, measured: Measured) -> None:
        self._entry, self._read, self._models, self._measured = entry, read, models, measured
        names = entry.stage_accelerators or (entry.accelerator,) * entry.pipeline_parallel
        layers = entry.pipeline_layers or even_layers(models.geometry.layers, entry.pipeline_parallel)
        stages = tuple(Stage(models.device(name).name, count) for name, count in zip(names, layers, strict=True))
        hop = entry.hop.link if entry.hop is not None else None
        self._kind = EngineKind(stages, entry.tensor_parallel, entry.dtype, entry.kv_dtype, hop)
        self._devices = [models.device(stage.accelerator) for stage in stages]
        self._longest = entry.max_model_len or read.max_model_len or models.geometry.max_position
        self._kv_bytes = models.geometry.kv_bytes_per_token(bytes_of(models.kv_dtype(self._kind)))

    def spec(self) -> InstanceSpec:
        entry, kind = self._entry, self._kind
        ranks = kind.accelerators
        price = self._models.price_usd_hour(kind) if entry.price_usd_hour is None else ranks * entry.price_usd_hour
        kv_tokens = self._kv_tokens()
        times = self._times()
        chunk = self._chunk_size(times)
        return InstanceSpec(
            instance_id=entry.name,
            model=times,
            role=entry.role,
            kv_tokens=kv_tokens,
            kv_bytes_per_token=self._kv_bytes,
            limits=EngineLimits(
                batched_tokens=chunk,
                sequences=max(1, entry.max_seqs // kind.lanes),
                block_tokens=entry.block_size,
                max_model_len=self._longest,
                prefill_first=entry.prefill_first,
                reserves_output=entry.reserves_output,
                prefix_cache=entry.prefix_cache,
                host=self._host(),
                session_keep_s=entry.session_keep_s if entry.prefix_cache else 0.0,
                session_share=entry.session_share if entry.prefix_cache else 0.0,
            ),
            link=self._link(),
            node=entry.node,
            accelerator="+".join(dict.fromkeys(device.name for device in self._devices)),
            accelerators=ranks,
            price_per_hour=price,
            lanes=kind.lanes,
            staging_tokens=self._staging_tokens(kv_tokens),
            max_prefills=entry.max_prefills,
            rates=self._rates(price, chunk),
            precision=kind.dtype if kind.dtype in QUANTISED else "",
        )

    def _times(self) -> StepTimes:
        """An emulated engine has the times of its settings, a real one those that were measured."""
        entry = self._entry
        if entry.step_s:
            return FixedSteps(entry.slowdown * entry.step_s, entry.slowdown * entry.prefill_s_per_token)
        found = self._measured.get(entry.name)
        if found is not None and found.kind.engine != "emulated":
            return found.step_times(self._models.library)
        model = self._models.times(self._kind)  # shared by instances of a kind, whose results it caches
        return model if entry.slowdown == 1.0 else ScaledSteps(model, entry.slowdown)

    def _rates(self, price: float, chunk: int) -> Rates:
        """The rates that policies know of the instance."""
        entry = self._entry
        if entry.name in self._measured:
            found, known = self._measured[entry.name], Rates(price_per_hour=price, weight=entry.weight)
            return known if found is None else found.applied_to(known)
        if entry.step_s:
            steps = fixed_steps(entry.step_s, entry.prefill_s_per_token)
        else:
            steps = self._models.step_rates(self._kind, chunk)
        return Rates(steps.scaled(entry.slowdown), price_per_hour=price, weight=entry.weight)

    def _chunk_size(self, times: StepTimes) -> int:
        """The entry's chunk size; for `auto` the one of a worker that has learned these times."""
        entry = self._entry
        if isinstance(entry.chunk_size, int):
            return entry.chunk_size
        form = step_rates_of(times.step_time_s, entry.max_chunk_size).prefill
        return chunk_tokens(form, ChunkBounds.for_seats(entry.max_chunk_size, entry.max_seqs, entry.block_size))

    def _kv_tokens(self) -> int:
        """KV capacity: the entry's, if it fits beside the weights; by default what the weights leave."""
        entry, kind, geometry = self._entry, self._kind, self._models.geometry
        if entry.kv_cache_bytes is None:
            return self._models.require_fit(kind, self._longest, entry.memory_utilisation, entry.reserve_bytes)
        weights = geometry.weight_bytes(bytes_of(entry.dtype or geometry.dtype))
        room = sum(entry.tensor_parallel * device.memory_bytes for device in self._devices)
        if weights + entry.kv_cache_bytes > room:
            raise Incompatible(
                f"{geometry.name} does not fit {kind}: weights of {weights / 1e9:.1f} GB and "
                f"kv_cache_bytes of {entry.kv_cache_bytes / 1e9:.1f} GB in {room / 1e9:.1f} GB"
            )
        tokens = self._tokens_in(entry.kv_cache_bytes)
        if tokens < self._longest:
            needed = f"one request may need {self._longest} (max_model_len)"
            raise Incompatible(f"kv_cache_bytes hold {tokens} tokens, and {needed}")
        return tokens

    def _staging_tokens(self, kv_tokens: int) -> int | None:
        size = self._entry.staging_bytes
        if size == "auto":
            return default_staging(kv_tokens, self._longest)
        return None if size is None else self._tokens_in(size)

    def _host(self) -> HostTier | None:
        entry, kind = self._entry, self._kind
        if not entry.host_kv_bytes:
            return None
        tokens = self._tokens_in(entry.host_kv_bytes) // kind.lanes
        return HostTier.of_kind(self._models, kind, tokens, entry.slowdown)

    def _tokens_in(self, size: int) -> int:
        """Tokens whose KV fits in `size` bytes over all ranks."""
        ranks, geometry = self._entry.tensor_parallel, self._models.geometry
        copies = float(ranks) if geometry.latent else max(1.0, ranks / geometry.kv_heads)
        return int(size // (self._kv_bytes * copies))

    def _link(self) -> Link:
        entry, links = self._entry, self._read.links
        link = links[entry.link] if isinstance(entry.link, str) else entry.link or links.get("default")
        if link is not None:
            return Link(link.gbps * 1e9 / 8.0 / entry.slowdown, link.latency_s, link.efficiency)
        return Link(self._devices[0].links.network * self._kind.accelerators / entry.slowdown)


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
