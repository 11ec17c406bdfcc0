"""Where a job runs, and why."""

import msgspec


class Reason(msgspec.Struct, frozen=True):
    """One step of a decision, for people: `what` was weighed, with the `figures` it rested on."""

    what: str
    figures: dict[str, float | str] = {}


class InstanceRef(msgspec.Struct, frozen=True):
    """Enough to reach an instance and to tell it from its predecessor."""

    instance_id: str
    generation: int
    rpc: str


class Route(msgspec.Struct, frozen=True):
    """A placement. `split` is the number of prompt tokens that the prefill instance computes.

    split == 0: the decode instance does it all, `prefill` is None. `decode` is None when the prefill
    instance's dispatcher is to choose it from fresher loads.
    """

    prefill: InstanceRef | None
    decode: InstanceRef | None
    split: int
    policy: str
    reasons: tuple[Reason, ...] = ()
