"""What a policy that picks an instance answers."""

import msgspec

from shared.domain.instance import InstanceView
from shared.domain.route import InstanceRef, Reason, Work


class Choice(msgspec.Struct, frozen=True):
    """The chosen instance and why it was chosen. A struct, because it is made once a decision and cheaply.

    A placement may name the decode instance that belongs to it, too, and the work to count until the job is complete.
    """

    instance: InstanceView
    reasons: tuple[Reason, ...] = ()
    decode: InstanceView | None = None
    work: Work | None = None

    @property
    def ref(self) -> InstanceRef:
        """The chosen instance as a route names it."""
        return ref_of(self.instance)


def ref_of(view: InstanceView) -> InstanceRef:
    """An instance as a route names it."""
    info = view.info
    return InstanceRef(info.instance_id, info.generation, info.rpc)
