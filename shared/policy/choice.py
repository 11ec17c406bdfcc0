"""What a policy that picks an instance answers."""

from dataclasses import dataclass

from shared.domain.instance import InstanceView
from shared.domain.route import InstanceRef, Reason


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen instance and why it was chosen."""

    instance: InstanceView
    reasons: tuple[Reason, ...] = ()

    @property
    def ref(self) -> InstanceRef:
        """The chosen instance as a route names it."""
        info = self.instance.info
        return InstanceRef(info.instance_id, info.generation, info.rpc)
