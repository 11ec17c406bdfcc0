"""Whether an instance fits the cluster, and if not, exactly why."""

from collections.abc import Sequence

from shared.domain.instance import Compatibility, InstanceInfo
from shared.errors import Incompatible
from shared.runtime.wire_version import WireVersions


def check(newcomer: InstanceInfo, members: Sequence[InstanceInfo], fingerprint: str = "") -> None:
    """Let `newcomer` in or raise Incompatible with each field that differs and both values.

    Model fingerprint and KV geometry must agree with every member, the engine's version with members of the same
    engine, and wire versions must be compatible, see `shared.runtime.wire_version`. dtype, block size, tensor and
    pipeline parallelism and context length may differ.
    With no members anything goes, but for a `fingerprint` that the settings pin.
    """
    if fingerprint and newcomer.compatibility.fingerprint != fingerprint:
        found = newcomer.compatibility.fingerprint
        raise Incompatible(
            f"{newcomer.instance_id} does not fit this cluster: fingerprint is {found!r}, "
            f"the settings pin {fingerprint!r}"
        )
    alike = {member.compatibility: member for member in members}
    for member in alike.values():
        if differences := _differences(newcomer, member):
            raise Incompatible(
                f"{newcomer.instance_id} does not fit this cluster: {'; '.join(differences)} "
                f"(as {member.instance_id} has it)"
            )


def _differences(newcomer: InstanceInfo, member: InstanceInfo) -> list[str]:
    ours, theirs = newcomer.compatibility, member.compatibility
    pairs: list[tuple[str, object, object]] = [
        ("fingerprint", ours.fingerprint, theirs.fingerprint),
        ("geometry.layers", ours.geometry.layers, theirs.geometry.layers),
        ("geometry.kv_heads", ours.geometry.kv_heads, theirs.geometry.kv_heads),
        ("geometry.head_dim", ours.geometry.head_dim, theirs.geometry.head_dim),
    ]
    if ours.engine == theirs.engine:  # engines may mix where the model agrees; versions of one engine may not
        pairs.append(("engine_version", ours.engine_version, theirs.engine_version))
    if not _wire(ours).speaks_with(_wire(theirs)):
        pairs += [
            ("wire_version", ours.wire_version, theirs.wire_version),
            ("min_wire_version", ours.min_wire_version, theirs.min_wire_version),
        ]
    return [f"{name} is {mine!r}, the cluster has {its!r}" for name, mine, its in pairs if mine != its]


def _wire(compatibility: Compatibility) -> WireVersions:
    return WireVersions(compatibility.wire_version, compatibility.min_wire_version or compatibility.wire_version)
