"""An instance: one engine with its accelerators, as other processes of the cluster see it."""

from enum import StrEnum

import msgspec

from shared.domain.policies import PolicySet
from shared.domain.rates import Rates


class Role(StrEnum):
    """The present role of an instance; every instance can have either."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> "Role":
        """The role that a flip leads to."""
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


def rank_names(instance: str, data_parallel: int) -> tuple[str, ...]:
    """The names of an instance's data-parallel ranks, by which each is known as an instance; its own for one rank."""
    return tuple(f"{instance}.{rank}" for rank in range(data_parallel)) if data_parallel > 1 else (instance,)


class InstanceState(StrEnum):
    """State of an instance. Only READY instances get new work."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    UNRESPONSIVE = "unresponsive"  # silent for too long; READY again with its next heartbeat
    DEAD = "dead"  # its connection is gone


ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1}


class KvKind(StrEnum):
    """What layers keep for a request."""

    HEADS = "heads"  # K and V of each head, for each token
    LATENT = "latent"  # one row for all heads, for each token (MLA); every tensor-parallel rank has it
    STATE = "state"  # what a recurrent layer remembers after the last token


class KvComponent(msgspec.Struct, frozen=True):
    """Layers of a model that keep the same for a request: `sides` rows of `head_dim` values for each of `heads`, for a
    token or, of a state, in all. `layers` are numbered over the model.
    """

    kind: KvKind
    layers: tuple[int, ...]
    sides: int
    heads: int
    head_dim: int
    window: int = 0  # of the tokens before the one that is computed next, the last ones that are read; 0: all
    part: str = ""  # of a state
    dtype: str = ""  # of a state, which the model prescribes

    @property
    def values(self) -> int:
        """Of a token, or of a state, over all layers and heads."""
        return len(self.layers) * self.sides * self.heads * self.head_dim

    def __str__(self) -> str:
        size = f"{self.sides} x {self.heads} x {self.head_dim}{f' {self.dtype}' if self.dtype else ''}"
        window = f" within {self.window} tokens" if self.window and self.kind is not KvKind.STATE else ""
        return f"{self.part or self.kind.value} of {size}{window} in layers {', '.join(map(str, self.layers))}"


class KvGeometry(msgspec.Struct, frozen=True):
    """What a model keeps for a request, over all ranks: K and V of one shape in all layers, where no `components` are
    named.
    """

    layers: int
    kv_heads: int
    head_dim: int
    components: tuple[KvComponent, ...] = ()

    @property
    def parts(self) -> tuple[KvComponent, ...]:
        """Its components, also where none are named."""
        alike = KvComponent(KvKind.HEADS, tuple(range(self.layers)), 2, self.kv_heads, self.head_dim)
        return self.components or (alike,)

    @property
    def has_codecs(self) -> bool:
        """Whether all of it is K and V, for which there are lossy codecs; the rest would be sent unchanged."""
        return all(part.kind is KvKind.HEADS and part.sides == 2 for part in self.components)

    def bytes_per_token(self, bytes_per_element: float) -> float:
        """KV bytes of one token within all windows, all layers and heads; without states."""
        if not self.components:
            return 2.0 * self.layers * self.kv_heads * self.head_dim * bytes_per_element
        held = sum(each.values for each in self.components if each.kind is not KvKind.STATE)
        return float(held) * bytes_per_element


class Compatibility(msgspec.Struct, frozen=True):
    """The properties that must agree before KV may be transferred between two instances.

    dtype, block size, tensor- and pipeline-parallel degrees may differ: the wire format of KV is independent of them.
    """

    fingerprint: str  # digest of the model's configuration and weights
    engine: str  # "vllm" or "emulated"
    engine_version: str
    wire_version: int
    geometry: KvGeometry
    min_wire_version: int = 0  # the oldest version that it speaks with; 0: its own


class InstanceInfo(msgspec.Struct, frozen=True):
    """The properties of an instance that do not change while it lives, except its rates and chunk size, which it
    learns, and its adapters.

    Addresses are `tcp://host:port` and `http://host:port`. adapters: digests of the LoRA adapters that it serves, by
    key (`shared.domain.adapters`); they change where loads_adapters says that it loads adapters while it serves.
    precision: of weights that are quantised otherwise than the cluster's model, such as fp8, with a digest where they
    are a checkpoint of their own; KV of one precision is not what another precision would have computed.
    media: the modalities of media items that it processes.
    rank_of: the instance of which it is one data-parallel rank. Ranks get jobs, hold KV and register one by one; what
    operators and policies do to one, they do to all of them.
    """

    instance_id: str
    generation: int  # nanoseconds since the epoch at start: distinguishes a restarted instance from its predecessor
    model: str
    compatibility: Compatibility
    accelerator: str
    dtype: str
    tensor_parallel: int
    block_size: int  # tokens
    total_blocks: int
    max_model_len: int
    chunk_size: int  # tokens of a step, prefill and decode together
    rpc: str
    http: str
    kv_endpoints: tuple[str, ...]  # one a rank: those of the first pipeline stage, then of the next
    max_seqs: int = 0  # requests that its engine runs at once; 0: not known
    rates: Rates = Rates()
    pipeline_parallel: int = 1
    kv_dtype: str = ""  # in which KV is stored; empty: `dtype`
    adapters: dict[str, str] = {}
    precision: str = ""  # empty: that of the cluster's model
    loads_adapters: bool = False
    media: tuple[str, ...] = ()
    rank_of: str = ""  # empty: it is an instance of its own

    @property
    def whole(self) -> str:
        """The name of the instance, also where this is one of its data-parallel ranks."""
        return self.rank_of or self.instance_id

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV that one token takes on this instance, over all its ranks."""
        return self.compatibility.geometry.bytes_per_token(self.kv_element_bytes)

    @property
    def kv_element_bytes(self) -> float:
        """Bytes of one stored element of KV."""
        return float(ELEMENT_BYTES.get(self.kv_dtype or self.dtype, 1))


class Promised(msgspec.Struct, frozen=True, array_like=True):
    """A decode that a scheduler has bound to an instance while its prompt is computed elsewhere. Tokens as in
    `shared.policy.ledger.Assignment`. mark: of the job's id (`shared.policy.ledger.mark_of`).
    """

    mark: int
    decode_tokens: int
    answer_tokens: int
    lead_steps: int = 0
    saved_tokens: int = 0
    import_tokens: int = 0
    prefill_tokens: int = 0
    heavy: bool = False


DRIFT = 0.02  # of an instance's capacity: a smaller change of a sliding figure waits for the next repetition
DRIFT_OF_FREE = 0.25  # of the free KV blocks, likewise
DRIFT_OF_TIME = 0.05  # of a share of the last seconds, likewise


class InstanceLoad(msgspec.Struct, frozen=True, array_like=True):
    """The load that an instance reports, up to every 100 ms; a list on the wire, because there are many."""

    time_s: float = 0.0  # unix time at the instance
    queued_prefill: int = 0  # jobs whose prefill is not done, in our queue and in the engine
    queued_prefill_tokens: int = 0  # prompt tokens of those
    running: int = 0  # requests the engine is stepping
    waiting: int = 0  # requests in the engine's queue, KV waiters included
    decoding: int = 0  # decode jobs accepted and not finished
    heavy_decodes: int = 0  # of those, predicted long (TetriInfer: more than 128 tokens)
    context_tokens: int = 0  # total context of the decode jobs
    coming: int = 0  # of `decoding`, decodes on their way, as counted by a scheduler; instances do not report them
    coming_tokens: int = 0  # of `context_tokens`, the context of these
    waiting_tokens: int = 0  # context of decode jobs that hold no KV blocks: they wait for some, or for a place
    free_blocks: int = 0
    staged_bytes: int = 0  # of KV that is not pulled yet
    inbound_bytes: int = 0  # of KV that is being pulled
    inflight: int = 0  # jobs of any kind accepted and not finished; 0 means drained
    prefill_share: float = 0.0  # of the last seconds' steps with decodes, the share that also computed prompts
    # Tokens of KV that the decode jobs will hold at most, by stretch of steps: see `shared.policy.decode_admission`.
    kv_ahead: tuple[int, ...] = ()
    accepted: tuple[int, ...] | None = None  # marks of recently accepted jobs; None: not reported
    promised: tuple[Promised, ...] = ()  # announced decodes that have not arrived
    busy_share: float = 0.0  # of the last seconds, the share in which steps computed prompts
    # Of `queued_prefill_tokens`, those that a scheduler expects to be computed by `time_s`. Instances report none.
    done_tokens: int = 0

    def is_news(self, known: "InstanceLoad", capacity_blocks: int, block_size: int) -> bool:
        """Whether a process that knows the load `known` needs this one at once, and not with the next repetition.

        It does when a count differs, a job was accepted that `known` does not list, or a figure that slides with each
        step moved by more than `DRIFT` of the instance's KV blocks (`capacity_blocks` of `block_size` tokens), or a
        share of its time by more than `DRIFT_OF_TIME`. Free blocks may move by `DRIFT_OF_FREE` of what was free at
        most, so that an instance whose memory becomes full is known as full.
        """
        if (
            self.running != known.running or self.inflight != known.inflight
        ):  # also below: the usual case, found quickly
            return True
        same = msgspec.structs.replace(
            self,
            time_s=known.time_s,
            context_tokens=known.context_tokens,
            free_blocks=known.free_blocks,
            prefill_share=known.prefill_share,
            busy_share=known.busy_share,
            kv_ahead=known.kv_ahead,
            accepted=known.accepted,
        )
        if same != known or (self.accepted is None) != (known.accepted is None):
            return True
        if self.accepted != known.accepted and not set(self.accepted or ()) <= set(known.accepted or ()):
            return True
        blocks = DRIFT * capacity_blocks
        tokens = blocks * block_size
        return (
            abs(self.free_blocks - known.free_blocks) > min(blocks, DRIFT_OF_FREE * known.free_blocks)
            or abs(self.context_tokens - known.context_tokens) > tokens
            or abs(self.prefill_share - known.prefill_share) > DRIFT_OF_TIME
            or abs(self.busy_share - known.busy_share) > DRIFT_OF_TIME
            or len(self.kv_ahead) != len(known.kv_ahead)
            or any(abs(now - was) > tokens for now, was in zip(self.kv_ahead, known.kv_ahead, strict=True))
        )

    def kv_used_share(self, total_blocks: int) -> float:
        """Share of the instance's `total_blocks` KV blocks that are in use, 0 to 1; 0 for an instance without blocks.

        A load from before the first heartbeat (`time_s` is 0) has no free blocks, so that its share is 1: callers that
        can meet such a load check `time_s` first.
        """
        return (total_blocks - self.free_blocks) / total_blocks if total_blocks else 0.0


class InstanceView(msgspec.Struct, frozen=True):
    """An instance as policies see it: its properties, role and state, and its load at the last broadcast."""

    info: InstanceInfo
    role: Role
    state: InstanceState
    load: InstanceLoad = InstanceLoad()

    @property
    def instance_id(self) -> str:
        return self.info.instance_id


class ClusterView(msgspec.Struct, frozen=True):
    """All instances at one moment, and the policies in force, by the monitor's broadcasts. `sequence` rises by one with
    each broadcast (see `shared.domain.cluster`).
    """

    sequence: int
    time_s: float
    instances: tuple[InstanceView, ...] = ()
    policies: PolicySet = PolicySet()

    def get(self, instance_id: str) -> InstanceView | None:
        """The instance of that id, if known."""
        return next((view for view in self.instances if view.instance_id == instance_id), None)

    def ready(self, role: Role) -> tuple[InstanceView, ...]:
        """Instances of that role that may get new work."""
        return tuple(v for v in self.instances if v.role is role and v.state is InstanceState.READY)
