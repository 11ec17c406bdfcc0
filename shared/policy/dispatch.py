"""Dispatch: which decode instance a job gets."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Protocol

import msgspec

from shared.domain.instance import InstanceState, InstanceView, Role
from shared.domain.job import JobView
from shared.domain.route import InstanceRef, Reason, Work
from shared.errors import InvalidRequest, PolyphaseError, Unavailable
from shared.policy.decode_admission import PredictedEnd, is_heavy, predicted_tokens
from shared.policy.index import ClusterIndex

# MERGED choice.py
# Which instances can take a job, what a policy that picks one answers, and the error that says why there is none.
#
# Nobody there (503) and *impossible* (400) are told apart.


RETRY_S = 0.2


class Choice(msgspec.Struct, frozen=True):
    """The chosen instance and why it was chosen. A struct, because it is made once a decision and cheaply.

    A placement may name the decode instance that belongs to it, too, the split between both, and the work to count
    until the job is complete. lead_steps, ttft_s, hold_s, has_room: see `Route`.
    """

    instance: InstanceView
    reasons: tuple[Reason, ...] = ()
    decode: InstanceView | None = None
    work: Work | None = None
    split: int | None = None
    lead_steps: int = 0
    ttft_s: float = 0.0
    hold_s: float = 0.0
    has_room: bool = False

    @property
    def ref(self) -> InstanceRef:
        """The chosen instance as a route names it."""
        return ref_of(self.instance)


def ref_of(view: InstanceView) -> InstanceRef:
    """An instance as a route names it."""
    info = view.info
    return InstanceRef(info.instance_id, info.generation, info.rpc)


def context_of(job: JobView, role: Role) -> int:
    """Tokens of context that an instance of that role must be able to hold for `job`."""
    return job.prompt_tokens + (job.max_tokens if role is Role.DECODE else 0)


def usable(view: InstanceView, context_tokens: int, exclude: Collection[str]) -> bool:
    """Whether the instance's context is long enough and nobody excluded it."""
    info = view.info
    return info.max_model_len >= context_tokens and not (exclude and info.instance_id in exclude)


def why_none(job: JobView, role: Role, index: ClusterIndex, exclude: Collection[str]) -> PolyphaseError:
    """The error that says why no instance of `role` can take `job`.

    InvalidRequest when the job is too long for all that are ready, Unavailable else. Never Busy: that is a limit which
    the client itself has reached.
    """
    ready = index.view.ready(role)
    left = [view for view in ready if view.instance_id not in exclude]
    if left:
        return _too_long(job, role, left)
    states = index.states
    counts = {state: states[(role, state)] for state in InstanceState if states[(role, state)]}
    seen = ", ".join(f"{count} {state.value}" for state, count in counts.items()) or "none registered"
    if ready:
        failed = ", ".join(sorted(view.instance_id for view in ready))
        return Unavailable(f"every ready {role.value} instance just failed this job ({failed})", retry_after_s=RETRY_S)
    return Unavailable(f"no {role.value} instance is ready ({seen})", retry_after_s=RETRY_S)


def _too_long(job: JobView, role: Role, views: Iterable[InstanceView]) -> PolyphaseError:
    longest = max(view.info.max_model_len for view in views)
    return InvalidRequest(
        f"the job needs a context of {context_of(job, role)} tokens; "
        f"the longest of the ready {role.value} instances is {longest}"
    )


DRAWS = 8  # random looks before all instances are looked at
UNPREDICTED_TOKENS = 128

Accept = Callable[[InstanceView], bool]
Figures = dict[str, float | str]


class DispatchPolicy(Protocol):
    """Picks one of `candidates` (ready decode instances), or None when none of them can take the job."""

    name: ClassVar[str]

    def choose(
        self, job: JobView, candidates: Sequence[InstanceView], exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """Decide. `now` is unix seconds; the same `rng` state gives the same choice."""
        ...


def choose_decode(
    policy: DispatchPolicy, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
) -> Choice:
    """The decode instance for `job`. Raises Unavailable or InvalidRequest: why there is none."""
    choice = policy.choose(job, index.decode.views, exclude, now, rng)
    if choice is None:
        raise why_none(job, Role.DECODE, index, exclude)
    return choice


@dataclass(frozen=True, slots=True)
class RandomDispatch:
    """Any decode instance that can hold the context, each as likely."""

    name: ClassVar[str] = "random"

    def choose(
        self, job: JobView, candidates: Sequence[InstanceView], exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `DispatchPolicy`."""
        drawn = _draw(candidates, 1, _beta(job, exclude), rng)
        return _chosen("dispatch:random", drawn[0], {}) if drawn else None


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """Two random instances with enough memory; of them the one with the least interference.

    alpha: instances with free KV for prompt + predicted tokens, by the last broadcast. Of two drawn from
    alpha at random the one with the smaller (H + [heavy]) / (L + [light] + 1) wins, H and L being its heavy
    and light decodes.
    Source: TetriInfer 3.3.4. F: the "+1"; ties go to fewer decodes, then to more free memory;
    when alpha is empty, the instance with the most free memory takes the job and lets it wait there.
    """

    name: ClassVar[str] = "power_of_two"
    end: PredictedEnd = PredictedEnd.LOWER
    unpredicted_tokens: int = UNPREDICTED_TOKENS

    def __post_init__(self) -> None:
        _check(self.name, self.unpredicted_tokens)

    def choose(
        self, job: JobView, candidates: Sequence[InstanceView], exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `DispatchPolicy`."""
        need = job.prompt_tokens + predicted_tokens(job, self.end, self.unpredicted_tokens)
        pair = _draw(candidates, 2, _alpha(job, exclude, need), rng)
        if not pair:
            return _fullest_of_beta(self.name, job, candidates, exclude, need)
        heavy = is_heavy(job)
        best, rank = pair[0], _rank(pair[0], heavy)
        figures: Figures = {"need_tokens": need, "heavy": "yes" if heavy else "no"}
        if len(pair) > 1:
            other, its_rank = pair[1], _rank(pair[1], heavy)
            if its_rank < rank:
                best, rank, other, its_rank = other, its_rank, best, rank
            figures["runner_up"] = other.info.instance_id
            figures["runner_up_ratio"] = round(its_rank[0], 4)
        figures["ratio"] = round(rank[0], 4)
        return _chosen("dispatch:power_of_two", best, figures)


@dataclass(frozen=True, slots=True)
class Spread:
    """Two random instances with enough memory: a heavy decode goes to the one with fewer heavy ones, a light decode to
    the one with fewer decodes.

    Ours: it does what TetriInfer 3.3.4 says it wants, heavy decodes spread evenly, where the ratio of `power_of_two`
    draws all decodes to instances that have many light ones already.
    """

    name: ClassVar[str] = "spread"
    end: PredictedEnd = PredictedEnd.LOWER
    unpredicted_tokens: int = UNPREDICTED_TOKENS

    def __post_init__(self) -> None:
        _check(self.name, self.unpredicted_tokens)

    def choose(
        self, job: JobView, candidates: Sequence[InstanceView], exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `DispatchPolicy`."""
        need = job.prompt_tokens + predicted_tokens(job, self.end, self.unpredicted_tokens)
        pair = _draw(candidates, 2, _alpha(job, exclude, need), rng)
        if not pair:
            return _fullest_of_beta(self.name, job, candidates, exclude, need)
        heavy = is_heavy(job)
        best = min(pair, key=lambda view: _count(view, heavy))
        figures: Figures = {
            "need_tokens": need,
            "heavy": "yes" if heavy else "no",
            "heavy_decodes": best.load.heavy_decodes,
            "decodes": best.load.decoding,
        }
        return _chosen("dispatch:spread", best, figures)


@dataclass(frozen=True, slots=True)
class LeastInterference:
    """As `power_of_two`, with all instances looked at instead of two. A decision costs O(instances)."""

    name: ClassVar[str] = "least_interference"
    end: PredictedEnd = PredictedEnd.LOWER
    unpredicted_tokens: int = UNPREDICTED_TOKENS

    def __post_init__(self) -> None:
        _check(self.name, self.unpredicted_tokens)

    def choose(
        self, job: JobView, candidates: Sequence[InstanceView], exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `DispatchPolicy`."""
        need = job.prompt_tokens + predicted_tokens(job, self.end, self.unpredicted_tokens)
        heavy = is_heavy(job)
        alpha = list(filter(_alpha(job, exclude, need), candidates))
        if not alpha:
            return _fullest_of_beta(self.name, job, candidates, exclude, need)
        best = min(alpha, key=lambda view: _rank(view, heavy))
        figures: Figures = {"need_tokens": need, "looked_at": len(alpha), "ratio": round(interference(best, heavy), 4)}
        return _chosen("dispatch:least_interference", best, figures)


@dataclass(frozen=True, slots=True)
class WorstCase:
    """Every heavy decode goes to the same instance, the first by id, until its memory is full, then to the next.

    Source: TetriInfer 5.2.3, "imbalance", a worst case to compare with. F: light decodes go anywhere at random.
    """

    name: ClassVar[str] = "worst_case"
    end: PredictedEnd = PredictedEnd.LOWER
    unpredicted_tokens: int = UNPREDICTED_TOKENS

    def __post_init__(self) -> None:
        _check(self.name, self.unpredicted_tokens)

    def choose(
        self, job: JobView, candidates: Sequence[InstanceView], exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `DispatchPolicy`."""
        need = job.prompt_tokens + predicted_tokens(job, self.end, self.unpredicted_tokens)
        alpha = _alpha(job, exclude, need)
        heavy = is_heavy(job)
        found = next(filter(alpha, candidates), None) if heavy else next(iter(_draw(candidates, 1, alpha, rng)), None)
        if found is None:
            return _fullest_of_beta(self.name, job, candidates, exclude, need)
        return _chosen("dispatch:worst_case", found, {"need_tokens": need, "heavy": "yes" if heavy else "no"})


def free_tokens(view: InstanceView) -> int:
    """Tokens of KV that fit into the free blocks."""
    return view.load.free_blocks * view.info.block_size


def interference(view: InstanceView, heavy: bool) -> float:
    """Ratio of heavy to light decodes if the job came here.

    Source: TetriInfer 3.3.4, with the "+1" of FORMULAS 2 (F).
    """
    load = view.load
    lights = max(0, load.decoding - load.heavy_decodes)
    return (load.heavy_decodes + 1) / (lights + 1) if heavy else load.heavy_decodes / (lights + 2)


def _rank(view: InstanceView, heavy: bool) -> tuple[float, int, int]:
    return interference(view, heavy), view.load.decoding, -free_tokens(view)


def _count(view: InstanceView, heavy: bool) -> tuple[int, int, int]:
    load = view.load
    return load.heavy_decodes if heavy else load.decoding, load.decoding, -free_tokens(view)


def _alpha(job: JobView, exclude: Collection[str], need: int) -> Accept:
    """The job's context fits there, and so do `need` tokens now."""
    context = context_of(job, Role.DECODE)

    def accept(view: InstanceView) -> bool:
        return view.load.free_blocks * view.info.block_size >= need and usable(view, context, exclude)

    return accept


def _beta(job: JobView, exclude: Collection[str]) -> Accept:
    context = context_of(job, Role.DECODE)
    return lambda view: usable(view, context, exclude)


def _fullest_of_beta(
    name: str, job: JobView, candidates: Sequence[InstanceView], exclude: Collection[str], need: int
) -> Choice | None:
    beta = list(filter(_beta(job, exclude), candidates))
    if not beta:
        return None
    chosen = max(beta, key=lambda view: (free_tokens(view), view.info.instance_id))
    figures: Figures = {"need_tokens": need, "free_tokens": free_tokens(chosen)}
    return _chosen(f"dispatch:{name}, none has the memory: most free", chosen, figures)


def _chosen(what: str, view: InstanceView, figures: Figures) -> Choice:
    figures["chosen"] = view.info.instance_id
    return Choice(view, (Reason(what, figures),))


def _draw(candidates: Sequence[InstanceView], count: int, accept: Accept, rng: Random) -> list[InstanceView]:
    """Up to `count` accepted instances, uniformly at random. Looks at all only when few looks succeed."""
    total, seen, found = len(candidates), [], []
    for _ in range(DRAWS if total > count else 0):
        at = int(rng.random() * total)
        if at in seen:
            continue
        seen.append(at)
        view = candidates[at]
        if accept(view):
            found.append(view)
            if len(found) == count:
                return found
    found = list(filter(accept, candidates))
    return rng.sample(found, min(count, len(found)))


def _check(name: str, unpredicted_tokens: int) -> None:
    if unpredicted_tokens < 0:
        raise InvalidRequest(f"{name}: unpredicted_tokens must not be negative")
