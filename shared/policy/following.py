"""How a process follows the policies that broadcasts name: it goes by the newest of them that it can make."""

from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from shared.domain.policies import PolicySet
from shared.errors import PolyphaseError

Made = TypeVar("Made")


class Following(Generic[Made]):
    """Follows the policies of some `kinds`; `make` makes them, and raises InvalidRequest for those that it cannot.

    made: what `make` gave last; it is called only when a policy of those kinds is another one, since policies may have
    a state. policies: what was heard when that was done. trouble: why what was heard last is not followed, or nothing.
    """

    def __init__(
        self, kinds: Collection[str], make: Callable[[PolicySet], Made], first: PolicySet = PolicySet()
    ) -> None:
        self._kinds = tuple(kinds)
        self._make = make
        self._refused: PolicySet | None = None
        self.policies = first
        self.made = make(self.policies)
        self.trouble = ""

    def hear(self, policies: PolicySet) -> None:
        """What a broadcast says. An older revision than the one followed is that of a monitor that remembers nothing
        yet: nothing changes. Nor does anything when it cannot be made: another version of the suite may know more.
        """
        if policies == self.policies:
            self._refused, self.trouble = None, ""
            return
        if policies.revision < self.policies.revision or policies == self._refused:
            return
        if any(policies.of(kind) != self.policies.of(kind) for kind in self._kinds):
            try:
                self.made = self._make(policies)
            except PolyphaseError as error:
                self._refused, self.trouble = policies, error.message
                return
        self.policies, self._refused, self.trouble = policies, None, ""
