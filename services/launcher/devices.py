"""The assignment of a host's devices to instances.

Devices have the numbers of the host or, if the launcher's environment makes only some visible, their positions among
those. An instance gets the devices that its entry names (`devices`, or a variable in `env`); the others get the next
free ones, in the order of the file. Two instances share a device only if both name it by `devices` and set
`kv_cache_bytes`.
"""

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from services.launcher.cluster_file import LOCAL, Cluster
from services.launcher.cluster_sections import InstanceSection
from services.launcher.ports import ranks_of
from shared.cost.catalogue import VISIBLE_BY, Catalogue
from shared.errors import PolyphaseError
from shared.files.faults import Fault

CUDA, HIP, _ASCEND = VISIBLE_BY["NVIDIA"], VISIBLE_BY["AMD"], VISIBLE_BY["Huawei"]
VISIBLE = (*VISIBLE_BY.values(), "ROCR_VISIBLE_DEVICES")
_ORDER = "CUDA_DEVICE_ORDER"  # the default order of CUDA numbers unequal devices differently from nvidia-smi

Visible = Callable[[str], Sequence[str] | None]


class Device(NamedTuple):
    """One device: its host, the variable that chooses among devices of its kind there, and its number or name."""

    host: str
    variable: str
    name: str


@dataclass(frozen=True, slots=True)
class Assignment:
    """The variables of each instance, the users of each device, and the faults of the file."""

    env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    users: Mapping[Device, Sequence[str]] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()


def assign(cluster: Cluster, here: str, visible: Visible | None = None) -> Assignment:
    """The assignment for all instances of the file; devices are counted only on `here`, this host."""
    return _Assigner(cluster, here, visible or visible_here).assign()


def visible_here(variable: str) -> tuple[str, ...] | None:
    """The devices that our processes see; None if unknown."""
    for name in (variable, CUDA) if variable == HIP else (variable,):
        if (listed := os.environ.get(name)) is not None:
            return tuple(each.strip() for each in listed.split(",") if each.strip() not in ("", "-1"))
    count = {CUDA: _nvidia, HIP: _amd, _ASCEND: _ascend}.get(variable, int)()
    return tuple(map(str, range(count))) or None


@dataclass(frozen=True, slots=True)
class _Need:
    """An instance that computes on devices, and those that the file chooses for it."""

    entry: InstanceSection
    name: str
    host: str
    variable: str
    ranks: int
    key: str  # of the entry, which chooses the devices; empty: the launcher chooses the next free ones
    chosen: tuple[str, ...]

    def on(self, device: str) -> Device:
        return Device(self.host, self.variable, device)

    @property
    def shares(self) -> bool:
        """Whether its entry allows sharing a device."""
        return self.key == "devices" and "kv_cache_bytes" in self.entry.extra


class _Assigner:
    def __init__(self, cluster: Cluster, here: str, visible: Visible) -> None:
        self._cluster = cluster
        self._here = here
        self._visible = visible
        self._faults: list[Fault] = []
        self._users: dict[Device, list[str]] = {}
        self._env: dict[str, Mapping[str, str]] = {}

    def assign(self) -> Assignment:
        needs = [need for entry in self._cluster.instances for need in self._needs_of(entry)]
        explicit = [need for need in needs if need.key]
        for need in explicit:
            self._give(need, need.chosen)
        self._check_overlaps(explicit)
        for need in needs:
            if not need.key:
                self._give(need, self._next_free(need))
        return Assignment(self._env, self._users, tuple(dict.fromkeys(self._faults)))

    def _needs_of(self, entry: InstanceSection) -> Iterator[_Need]:
        host, variable = entry.host or self._cluster.control or LOCAL, _variable(entry)
        at = f"instances.{entry.id}.devices"
        if not variable and entry.devices:
            emulated = entry.extra.get("engine") == "emulated"
            on = "an emulated engine" if emulated else f"accelerator {entry.extra.get('accelerator', 'cpu')!r}"
            self._faults.append(Fault(at, f"{on} has no numbered devices: leave it out"))
        if not variable or not entry.enabled:
            return
        ranks = ranks_of(entry.extra)
        in_env = next((name for name in VISIBLE if entry.env.get(name)), "")
        if in_env and entry.devices:
            text = f"env.{in_env} already chooses the devices: leave one of the two out"
            self._faults.append(Fault(at, text))
        for index, name in enumerate(entry.ids):
            key, chosen = "", tuple[str, ...]()
            if entry.devices:
                key, chosen = "devices", self._named(entry, at, host, variable, ranks, index)
            elif in_env:
                listed = [part.strip() for part in entry.env[in_env].split(",")]
                key, chosen = f"env.{in_env}", tuple(listed[:ranks])
            yield _Need(entry, name, host, variable, ranks, key, chosen)

    def _named(
        self, entry: InstanceSection, at: str, host: str, variable: str, ranks: int, index: int
    ) -> tuple[str, ...]:
        """The devices of an entry's instance with this index among the entry's `devices`."""
        numbers, count = entry.devices, len(entry.ids)
        if len(numbers) == ranks * count:
            numbers = numbers[index * ranks : (index + 1) * ranks]
        elif len(numbers) != ranks:
            each = f" for each of {count} instances: {ranks * count}, or {ranks} that they share" if count > 1 else ""
            text = f"{ranks} are needed (tensor_parallel x pipeline_parallel){each}; got {len(numbers)}"
            self._faults.append(Fault(at, text))
            return ()
        visible = self._visible(variable) if host == self._here else None
        if visible is None:
            return tuple(map(str, numbers))
        if missing := [number for number in numbers if number >= len(visible)]:
            count = len(visible)
            known = f"{count} (0 to {count - 1})" if count > 1 else "one (0)"
            self._faults.append(Fault(at, f"there is no device {missing[0]}: host {host!r} has {known}"))
            return ()
        return tuple(visible[number] for number in numbers)

    def _next_free(self, need: _Need) -> tuple[str, ...]:
        visible = self._visible(need.variable) if need.host == self._here else None
        names = visible if visible is not None else tuple(map(str, range(len(self._users) + need.ranks)))
        free = [name for name in names if need.on(name) not in self._users]
        if len(free) < need.ranks:
            text = (
                f"{need.name} needs {need.ranks} device{'s' if need.ranks > 1 else ''} (tensor_parallel x "
                f"pipeline_parallel), and host {need.host!r} has {len(free)} free of {len(names)}: run fewer instances "
                "there, or let two share a device: `devices: [0]` and `kv_cache_bytes` in both"
            )
            self._faults.append(Fault(f"instances.{need.entry.id}", text))
        return tuple(free[: need.ranks])

    def _give(self, need: _Need, devices: Sequence[str]) -> None:
        for device in devices:
            self._users.setdefault(need.on(device), []).append(need.name)
        if need.key.startswith("env.") or not devices:
            return
        value = ",".join(devices)
        env = {need.variable: value}
        if need.variable == HIP and os.environ.get(CUDA):
            env[CUDA] = value  # vLLM refuses two that differ
        if need.variable == CUDA and not (os.environ.get(CUDA) or os.environ.get(_ORDER)):
            env[_ORDER] = "PCI_BUS_ID"
        self._env[need.name] = env

    def _check_overlaps(self, explicit: Sequence[_Need]) -> None:
        by_name = {need.name: need for need in explicit}
        for device, names in self._users.items():
            first, *others = (by_name[name] for name in names)
            for need in others:
                if first.shares and need.shares:
                    continue
                text = f"device {device.name} of host {device.host!r} is also assigned to {first.name}: "
                if first.key == need.key == "devices":
                    text += "to share it, set `kv_cache_bytes` in both"
                else:
                    text += (
                        f"choose another, or let them share it: `devices: [{device.name}]` and `kv_cache_bytes` in "
                        "both, in place of `env`"
                    )
                self._faults.append(Fault(f"instances.{need.entry.id}.{need.key}", text))


def _variable(entry: InstanceSection) -> str:
    """The variable that chooses its devices; empty for an instance without devices to choose."""
    named = str(entry.extra.get("accelerator", "cpu"))
    if entry.extra.get("engine") == "emulated" or named == "cpu":
        return ""
    try:
        return catalogue().get(named).visible_by
    except PolyphaseError:
        return CUDA  # unknown accelerator: libraries of other vendors ignore this variable


@functools.cache
def catalogue() -> Catalogue:
    return Catalogue.built_in()


def _nvidia() -> int:
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _amd() -> int:
    count = 0
    for node in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        with suppress(OSError):
            count += re.search(r"^simd_count [1-9]", node.read_text(), re.MULTILINE) is not None
    return count


def _ascend() -> int:
    return len([each for each in Path("/dev").glob("davinci*") if each.name.removeprefix("davinci").isdecimal()])
