"""Dispatch: which decode instance a job gets."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Protocol

from shared.domain.instance import InstanceView, Role
from shared.domain.job import JobView
from shared.domain.route import Reason
from shared.errors import InvalidRequest
from shared.policy.availability import fits, why_none
from shared.policy.choice import Choice
from shared.policy.index import ClusterIndex
from shared.policy.lengths import PredictedEnd, is_heavy, predicted_tokens

DRAWS = 8  # random looks before all instances are looked at


class DispatchPolicy(Protocol):
    """Picks one of `candidates` (ready decode instances), or None when none of them can take the job."""

    name: ClassVar[str]

    def choose(
        self,
        job: JobView,
        candidates: Sequence[InstanceView],
        exclude: Collection[str],
        now: float,
        rng: Random,
    ) -> Choice | None:
        """Decide. `now` is unix seconds; the same `rng` state gives the same choice."""
        ...


def choose_decode(
    policy: DispatchPolicy,
    job: JobView,
    index: ClusterIndex,
    exclude: Collection[str],
    now: float,
    rng: Random,
) -> Choice:
    """The decode instance for `job`. Raises Busy, Unavailable or InvalidRequest: why there is none."""
    choice = policy.choose(job, index.decode.views, exclude, now, rng)
    if choice is None:
        raise why_none(job, Role.DECODE, index, exclude)
    return choice


@dataclass(frozen=True, slots=True)
class RandomDispatch:
    """Any decode instance that can hold the context, each as likely."""

    name: ClassVar[str] = "random"

    def choose(
        self,
        job: JobView,
        candidates: Sequence[InstanceView],
        exclude: Collection[str],
        now: float,
        rng: Random,
    ) -> Choice | None:
        """See `DispatchPolicy`."""
        drawn = _draw(candidates, 1, lambda view: _usable(job, view, exclude), rng)
        if not drawn:
            return None
        return Choice(drawn[0], (Reason("dispatch:random", {"chosen": drawn[0].instance_id}),))


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
    unpredicted_tokens: int = 128

    def __post_init__(self) -> None:
        if self.unpredicted_tokens < 0:
            raise InvalidRequest("power_of_two: unpredicted_tokens must not be negative")

    def choose(
        self,
        job: JobView,
        candidates: Sequence[InstanceView],
        exclude: Collection[str],
        now: float,
        rng: Random,
    ) -> Choice | None:
        """See `DispatchPolicy`."""
        need = job.prompt_tokens + predicted_tokens(job, self.end, self.unpredicted_tokens)
        pair = _draw(candidates, 2, lambda view: _usable(job, view, exclude) and free_tokens(view) >= need, rng)
        if not pair:
            return self._fullest_of_beta(job, candidates, exclude, need)
        heavy = is_heavy(job)
        ranked = sorted(pair, key=lambda view: _rank(view, heavy))
        figures: dict[str, float | str] = {
            "need_tokens": need,
            "heavy": "yes" if heavy else "no",
            "chosen": ranked[0].instance_id,
            "ratio": round(interference(ranked[0], heavy), 4),
        }
        if len(ranked) > 1:
            figures["runner_up"] = ranked[1].instance_id
            figures["runner_up_ratio"] = round(interference(ranked[1], heavy), 4)
        return Choice(ranked[0], (Reason("dispatch:power_of_two", figures),))

    def _fullest_of_beta(
        self, job: JobView, candidates: Sequence[InstanceView], exclude: Collection[str], need: int
    ) -> Choice | None:
        beta = [view for view in candidates if _usable(job, view, exclude)]
        if not beta:
            return None
        chosen = max(beta, key=lambda view: (free_tokens(view), view.instance_id))
        figures: dict[str, float | str] = {
            "need_tokens": need,
            "chosen": chosen.instance_id,
            "free_tokens": free_tokens(chosen),
        }
        return Choice(chosen, (Reason("dispatch:power_of_two, none has the memory: most free", figures),))


def free_tokens(view: InstanceView) -> int:
    """Tokens of KV that fit into the free blocks."""
    return view.load.free_blocks * view.info.block_size


def interference(view: InstanceView, heavy: bool) -> float:
    """Ratio of heavy to light decodes if the job came here.

    Source: TetriInfer 3.3.4, with the "+1" of FORMULAS 2 (F).
    """
    load = view.load
    return (load.heavy_decodes + int(heavy)) / (load.light_decodes + int(not heavy) + 1)


def _rank(view: InstanceView, heavy: bool) -> tuple[float, int, int]:
    return (interference(view, heavy), view.load.decoding, -free_tokens(view))


def _usable(job: JobView, view: InstanceView, exclude: Collection[str]) -> bool:
    return view.instance_id not in exclude and fits(job, view, Role.DECODE)


def _draw(candidates: Sequence[InstanceView], count: int, accept: "_Accept", rng: Random) -> list[InstanceView]:
    """Up to `count` accepted instances, uniformly at random. Looks at all only when few looks succeed."""
    drawn = rng.sample(range(len(candidates)), min(DRAWS, len(candidates)))
    accepted = [candidates[at] for at in drawn if accept(candidates[at])]
    if len(accepted) < count and len(candidates) > len(drawn):
        accepted = [view for view in candidates if accept(view)]
        return rng.sample(accepted, min(count, len(accepted)))
    return accepted[:count]


class _Accept(Protocol):
    def __call__(self, view: InstanceView, /) -> bool: ...
