"""Which policies this instance's engine goes by: those that the monitor's broadcasts name."""

from services.worker.engines.base import Engine
from services.worker.engines.policies import EnginePolicies
from shared.domain.policies import ENGINE, PolicySet
from shared.domain.route import PolicySpec
from shared.policy.decider import Following
from shared.runtime.logs import get_log

log = get_log(__name__)
_NOT_YET = "the engine has not come to its next step yet"


class FollowedPolicies:
    """Hands the engine other policies; what it goes by is what the engine itself says."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Until the first broadcast: what every engine can do.
        self._following = Following(ENGINE, self._set, PolicySet(step_budget=PolicySpec("off")))
        self._reached = 0

    def hear(self, policies: PolicySet) -> None:
        """What a broadcast says."""
        following = self._following
        made, trouble = following.made, following.trouble
        following.hear(policies)
        if following.made is not made:
            log.info("other policies for the engine", revision=policies.revision, **following.made.names())
        if following.trouble not in ("", trouble):
            log.error("other policies are not followed", revision=policies.revision, reason=following.trouble)

    @property
    def revision(self) -> int:
        """Of the policies that the engine goes by."""
        if self._taken:
            self._reached = self._following.policies.revision
        return self._reached

    @property
    def trouble(self) -> str:
        """Why the engine does not go by the newest that were heard of; empty when it does."""
        return self._following.trouble or ("" if self._taken else _NOT_YET)

    def describe(self) -> dict[str, int | str]:
        """Both as JSON."""
        return {"revision": self.revision, "trouble": self.trouble}

    @property
    def _taken(self) -> bool:
        return self._engine.policies == self._following.made

    def _set(self, policies: PolicySet) -> EnginePolicies:
        made = EnginePolicies.of(policies)
        self._engine.set_policies(made)
        return made
