"""The route of a job, and the reasons for it."""

from enum import StrEnum
from typing import Any

import msgspec

from shared.domain.estimated import Estimated
from shared.domain.numbers import Finite


class Reason(msgspec.Struct, frozen=True):
    """One step of a decision, for people: `what` was considered, with the `figures` that it rests on."""

    what: str
    figures: dict[str, float | str] = {}

    @property
    def line(self) -> str:
        figures = (
            f"{name}={one:.4g}" if isinstance(one, float) else f"{name}={one}" for name, one in self.figures.items()
        )
        return f"{self.what}: {', '.join(figures)}" if self.figures else self.what


class InstanceRef(msgspec.Struct, frozen=True):
    """The address of an instance, its generation, which distinguishes it from its predecessor, and its precision."""

    instance_id: str
    generation: int
    rpc: str
    precision: str = ""  # InstanceInfo.precision


class Work(msgspec.Struct, frozen=True):
    """The work that a placement counts on its instance until the job is complete, in the unit of its policy."""

    score: float
    tokens: int  # of KV: prompt and predicted output


class PrefixPull(msgspec.Struct, frozen=True):
    """The instance that computes the beginning of the prompt pulls the KV of the first `tokens` from the `holder`."""

    holder: InstanceRef
    tokens: int


class Affinity(StrEnum):
    """Whether a job goes to an instance of its session's last turn."""

    BACK = "back"
    ELSEWHERE = "elsewhere"  # which costs less
    IMPOSSIBLE = "impossible"  # none of them can take it


class PolicySpec(msgspec.Struct, frozen=True):
    """A policy by its name in `shared.policy.registry`, with its parameters."""

    name: str
    parameters: dict[str, Any] = {}


class Route(msgspec.Struct, frozen=True):
    """A placement. `split` is the number of prompt tokens that the prefill instance computes.

    split == 0: the decode instance computes the whole job, and `prefill` is None. decode: None when the dispatcher of
    the prefill instance is to choose it from fresher loads, by the policy `dispatch`, which a live scheduler sets.
    work: for the scheduler's ledger, if its policy needs one. wants_prefix: the scheduler's policy uses
    `JobView.prefix`, so that the next job should have one. prefill_saved, decode_saved: prompt tokens of either
    instance's part whose KV it is known to hold. answer_tokens: tokens of the answer for which room is kept, from
    `lead_steps` steps of the decode instance on. hold_s: seconds after which the job should begin, because there will
    be room for its KV then; a scheduler answers such a route with Delayed. ttft_s: predicted, without that wait.
    has_room: placement expects that the KV finds room at `decode` to the end of the answer. pull: for `prefill`, or
    for `decode` where that computes the whole job. affinity: None for a job without a session, or for its first turn.
    estimated: of an estimate that includes the wait for room; None where no estimate was made.
    keep_tokens: more than 0 where `decode` is a prefill instance, which computes the whole job and keeps so many tokens
    of its answer; with the rest of a longer one, the job migrates to a decode instance.
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
    pull: PrefixPull | None = None
    affinity: Affinity | None = None
    keep_tokens: int = 0
    estimated: Estimated | None = None

    @property
    def pulled_tokens(self) -> int:
        """Of the tokens that `pull` names, those that the instance does not hold itself."""
        if self.pull is None:
            return 0
        return max(0, self.pull.tokens - (self.prefill_saved if self.prefill is not None else self.decode_saved))
