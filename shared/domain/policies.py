"""The policies in force: one of each kind, for the whole cluster."""

import msgspec

from shared.domain.route import PolicySpec


class PolicySet(msgspec.Struct, frozen=True):
    """One policy of each kind, by its name in `shared.policy.registry`.

    The cluster monitor owns it and broadcasts changes. `revision` rises with each change, also over restarts of the
    monitor; 0: no changes are known, so that processes with a higher revision keep theirs.
    """

    revision: int = 0
    placement: PolicySpec = PolicySpec("adaptive")
    split: PolicySpec = PolicySpec("adaptive")
    dispatch: PolicySpec = PolicySpec("adaptive")
    prefill_order: PolicySpec = PolicySpec("fcfs")
    decode_admission: PolicySpec = PolicySpec("greedy")
    step_budget: PolicySpec = PolicySpec("on")
    role_flip: PolicySpec = PolicySpec("off")

    def spec(self, kind: str) -> PolicySpec:
        """The policy of a kind, one of `KINDS`."""
        spec: PolicySpec = getattr(self, kind)
        return spec


KINDS: tuple[str, ...] = tuple(name for name in PolicySet.__struct_fields__ if name != "revision")
ROUTING = ("placement", "split", "dispatch")  # of schedulers, and through their routes of prefill instances
ENGINE = ("prefill_order", "decode_admission", "step_budget")  # of engines
