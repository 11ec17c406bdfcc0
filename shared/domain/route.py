"""Where a job runs, and why."""

from typing import Any

import msgspec

from shared.domain.numbers import Finite


class Reason(msgspec.Struct, frozen=True):
    """One step of a decision, for people: `what` was weighed, with the `figures` it rested on."""

    what: str
    figures: dict[str, float | str] = {}

    @property
    def line(self) -> str:
        """As one line of text."""
        figures = (
            f"{name}={one:.4g}" if isinstance(one, float) else f"{name}={one}" for name, one in self.figures.items()
        )
        return f"{self.what}: {', '.join(figures)}" if self.figures else self.what


class InstanceRef(msgspec.Struct, frozen=True):
    """Enough to reach an instance and to tell it from its predecessor."""

    instance_id: str
    generation: int
    rpc: str


class Work(msgspec.Struct, frozen=True):
    """What a placement counts on its instance until the job is complete, in the unit of the policy that chose it."""

    score: float
    tokens: int  # of KV: prompt and predicted output


class PolicySpec(msgspec.Struct, frozen=True):
    """A policy by its name in `shared.policy.registry`, with its parameters."""

    name: str
    parameters: dict[str, Any] = {}


class Route(msgspec.Struct, frozen=True):
    """A placement. `split` is the number of prompt tokens that the prefill instance computes.

    split == 0: the decode instance does it all, `prefill` is None. `decode` is None when the prefill instance's
    dispatcher is to choose it from fresher loads, by the policy `dispatch`: a live scheduler names the one in force in
    each route. `work` is for the ledger of whoever placed the job, if its policy keeps one. `wants_prefix`: the
    scheduler's policy looks at `JobView.prefix`, so that it is worth computing for the next job. prefill_saved,
    decode_saved: prompt tokens of either instance's part whose KV it is known to hold. answer_tokens: for which room
    is kept (see `JobView`), from `lead_steps` steps of the decode instance on. ttft_s: predicted, without that wait.
    hold_s: seconds after which the job should begin, because there will be room for its KV then; a scheduler answers
    such a route with Delayed. has_room: placement looked, and expects that its KV finds room at `decode` to the end of
    the answer.
    """

    prefill: InstanceRef | None
    decode: InstanceRef | None
    split: int
    policy: str
    reasons: tuple[Reason, ...] = ()
    work: Work | None = None
    dispatch: PolicySpec | None = None
    wants_prefix: bool = False
    prefill_saved: int = 0
    decode_saved: int = 0
    answer_tokens: int = 0
    lead_steps: int = 0
    ttft_s: Finite = 0.0
    hold_s: Finite = 0.0
    has_room: bool = False
