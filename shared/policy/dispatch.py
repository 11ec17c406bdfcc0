"""Dispatch: the choice of the decode instance of a job.

A dispatch policy gets the ready decode instances and picks one of those that are usable: not excluded, and with a
context long enough (`index.usable`). Policies below `MemoryAware` also prefer instances with enough free KV memory.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Protocol

import msgspec

from shared.domain.instance import InstanceState, InstanceView, Role
from shared.domain.job import JobView
from shared.domain.route import Affinity, InstanceRef, Reason, Work
from shared.errors import InvalidRequest, PolyphaseError, Unavailable
from shared.policy.decode_admission import ByPrediction, is_heavy
from shared.policy.estimate import Option
from shared.policy.index import ClusterIndex, InstanceIds, context_of, usable

DRAWS = 8  # random draws before all instances are searched
RETRY_S = 0.2

Accept = Callable[[InstanceView], bool]
Figures = dict[str, float | str]


class Choice(msgspec.Struct, frozen=True):
    """The chosen instance and the reasons for it.

    A placement policy may also fix the decode instance, the split between both, and the work to count on the instance
    until the job is complete. estimate: of the whole route, from a placement policy that makes one. has_room, affinity,
    keep_tokens: see `Route`.
    """

    instance: InstanceView
    reasons: tuple[Reason, ...] = ()
    decode: InstanceView | None = None
    work: Work | None = None
    split: int | None = None
    estimate: Option | None = None
    has_room: bool = False
    affinity: Affinity | None = None
    keep_tokens: int = 0

    @property
    def ref(self) -> InstanceRef:
        """The chosen instance as a route names it."""
        info = self.instance.info
        return InstanceRef(info.instance_id, info.generation, info.rpc, info.precision)


class DispatchPolicy(Protocol):
    """Picks one of `candidates` (ready decode instances), or None when none of them can take the job.

    `now` is unix seconds; the same state of `rng` gives the same choice.
    """

    name: ClassVar[str]

    def choose(
        self, job: JobView, candidates: Sequence[InstanceView], exclude: InstanceIds, now: float, rng: Random
    ) -> Choice | None: ...


def choose_decode(
    policy: DispatchPolicy, job: JobView, index: ClusterIndex, exclude: InstanceIds, now: float, rng: Random
) -> Choice:
    """The decode instance for `job`. Raises what `why_none` returns when no instance can take the job."""
    choice = policy.choose(job, index.decode.views, exclude, now, rng)
    if choice is None:
        raise why_none(job, Role.DECODE, index, exclude)
    return choice


def why_none(job: JobView, role: Role, index: ClusterIndex, exclude: InstanceIds) -> PolyphaseError:
    """The error that says why no instance of `role` can take `job`.

    InvalidRequest when the job is too long for all ready instances, else Unavailable.
    """
    ready = index.view.ready(role)
    allowed = [view for view in ready if view.instance_id not in exclude]
    if allowed:
        longest = max(view.info.max_model_len for view in allowed)
        return InvalidRequest(
            f"the job needs a context of {context_of(job, role)} tokens; "
            f"the longest of the ready {role.value} instances is {longest}"
        )
    if ready and all(view.instance_id in index.lacking(job) for view in ready):
        wanted = [f"the adapter {job.adapter!r}"] if job.adapter else []
        wanted += [f"prompts with {' and '.join(job.media)} items"] if job.media else []
        return Unavailable(f"no ready {role.value} instance serves {' and '.join(wanted)}", retry_after_s=RETRY_S)
    if ready and job.one_precision and all(view.instance_id in index.unable(job) for view in ready):
        return Unavailable(f"no ready {role.value} instance has the precision of this request", retry_after_s=RETRY_S)
    if ready:
        failed = ", ".join(sorted(view.instance_id for view in ready))
        return Unavailable(f"every ready {role.value} instance just failed this job ({failed})", retry_after_s=RETRY_S)
    states = Counter(view.state for view in index.view.instances if view.role is role)
    counts = [f"{states[state]} {state.value}" for state in InstanceState if states[state]]
    return Unavailable(
        f"no {role.value} instance is ready ({', '.join(counts) or 'none registered'})", retry_after_s=RETRY_S
    )


@dataclass(frozen=True, slots=True)
class RandomDispatch:
    """Any decode instance whose context is long enough, each with the same probability."""

    name: ClassVar[str] = "random"

    def choose(
        self, job: JobView, candidates: Sequence[InstanceView], exclude: InstanceIds, now: float, rng: Random
    ) -> Choice | None:
        context = context_of(job, Role.DECODE)
        drawn = draw(candidates, 1, lambda view: usable(view, context, exclude), rng)
        return _choice("dispatch:random", drawn[0], {}) if drawn else None


@dataclass(frozen=True, slots=True)
class MemoryAware(ByPrediction):
    """Base of the policies that pick among the instances with free KV memory for the prompt and the predicted answer.

    If the last broadcast shows no instance with that much free memory, the policy picks the instance with the most free
    memory, where the job waits until there is room. TetriInfer does not say what happens then; this rule is ours.
    """

    def choose(
        self, job: JobView, candidates: Sequence[InstanceView], exclude: InstanceIds, now: float, rng: Random
    ) -> Choice | None:
        need = self.length_tokens(job)
        context = context_of(job, Role.DECODE)

        def has_memory(view: InstanceView) -> bool:
            return view.load.free_blocks * view.info.block_size >= need and usable(view, context, exclude)

        figures: Figures = {"need_tokens": need}
        picked = self._pick(candidates, has_memory, is_heavy(job), rng, figures)
        if picked is not None:
            return _choice(f"dispatch:{self.name}", picked, figures)
        emptiest = max(
            (view for view in candidates if usable(view, context, exclude)),
            key=lambda view: (free_tokens(view), view.info.instance_id),
            default=None,
        )
        if emptiest is None:
            return None
        figures = {"need_tokens": need, "free_tokens": free_tokens(emptiest)}
        return _choice(f"dispatch:{self.name}, none has the memory: most free", emptiest, figures)

    def _pick(
        self, candidates: Sequence[InstanceView], has_memory: Accept, heavy: bool, rng: Random, figures: Figures
    ) -> InstanceView | None:
        """One of the candidates with memory; adds what the choice rests on to `figures`. heavy: see `is_heavy`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class PowerOfTwo(MemoryAware):
    """Of two random instances with enough memory, the one with less interference.

    The smaller (H + [heavy]) / (L + [light] + 1) wins, where H and L count the heavy and light decodes of an instance.
    Source: TetriInfer 3.3.4. Ours: the "+1"; ties go to fewer decodes, then to more free memory.
    """

    name: ClassVar[str] = "power_of_two"

    def _pick(
        self, candidates: Sequence[InstanceView], has_memory: Accept, heavy: bool, rng: Random, figures: Figures
    ) -> InstanceView | None:
        drawn = draw(candidates, 2, has_memory, rng)
        if not drawn:
            return None
        figures["heavy"] = "yes" if heavy else "no"
        best, rank = drawn[0], _rank(drawn[0], heavy)
        for other in drawn[1:]:
            other_rank = _rank(other, heavy)
            if other_rank < rank:
                best, rank, other, other_rank = other, other_rank, best, rank
            figures["runner_up"] = other.info.instance_id
            figures["runner_up_ratio"] = round(other_rank[0], 4)
        figures["ratio"] = round(rank[0], 4)
        return best


@dataclass(frozen=True, slots=True)
class Spread(MemoryAware):
    """Of two random instances with enough memory, the one with fewer heavy decodes for a heavy decode, and the one with
    fewer decodes for a light one.

    Source: ours. TetriInfer 3.3.4 wants heavy decodes to be spread evenly; the ratio of `power_of_two` sends all
    decodes to the instances that have many light decodes already.
    """

    name: ClassVar[str] = "spread"

    def _pick(
        self, candidates: Sequence[InstanceView], has_memory: Accept, heavy: bool, rng: Random, figures: Figures
    ) -> InstanceView | None:
        def count(view: InstanceView) -> tuple[int, int, int]:
            load = view.load
            return load.heavy_decodes if heavy else load.decoding, load.decoding, -free_tokens(view)

        best = min(draw(candidates, 2, has_memory, rng), key=count, default=None)
        if best is not None:
            figures["heavy"] = "yes" if heavy else "no"
            figures["heavy_decodes"] = best.load.heavy_decodes
            figures["decodes"] = best.load.decoding
        return best


def free_tokens(view: InstanceView) -> int:
    """Tokens of KV that fit into the free blocks."""
    return view.load.free_blocks * view.info.block_size


def interference(view: InstanceView, heavy: bool) -> float:
    """Ratio of heavy to light decodes with the job on this instance. Source: TetriInfer 3.3.4; ours: the "+1"."""
    load = view.load
    lights = max(0, load.decoding - load.heavy_decodes)
    return (load.heavy_decodes + 1) / (lights + 1) if heavy else load.heavy_decodes / (lights + 2)


def _rank(view: InstanceView, heavy: bool) -> tuple[float, int, int]:
    return interference(view, heavy), view.load.decoding, -free_tokens(view)


def _choice(what: str, view: InstanceView, figures: Figures) -> Choice:
    figures["chosen"] = view.info.instance_id
    return Choice(view, (Reason(what, figures),))


def draw(candidates: Sequence[InstanceView], count: int, accept: Accept, rng: Random) -> list[InstanceView]:
    """Up to `count` accepted instances, uniformly at random. All are searched only when a few draws find too few."""
    total = len(candidates)
    drawn: list[int] = []
    found: list[InstanceView] = []
    for _ in range(DRAWS if total > count else 0):
        at = int(rng.random() * total)
        if at in drawn:
            continue
        drawn.append(at)
        if accept(candidates[at]):
            found.append(candidates[at])
            if len(found) == count:
                return found
    found = list(filter(accept, candidates))
    return rng.sample(found, min(count, len(found)))
