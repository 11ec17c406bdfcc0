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
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from services.launcher.cluster_file import LOCAL, Cluster, InstanceSection
from services.launcher.ports import ranks_of
from shared.cost.catalogue import VISIBLE_BY, Catalogue
from shared.errors import PolyphaseError

CUDA, HIP, _ASCEND = VISIBLE_BY["NVIDIA"], VISIBLE_BY["AMD"], VISIBLE_BY["Huawei"]
VISIBLE = (*VISIBLE_BY.values(), "ROCR_VISIBLE_DEVICES")
_ORDER = "CUDA_DEVICE_ORDER"  # the default order of CUDA numbers unequal devices differently from nvidia-smi

Visible = Callable[[str], Sequence[str] | None]
Fault = tuple[str, str]  # the key of the file, and what is wrong with it


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
    return _Assigning(cluster, here, visible or visible_here).all()


def visible_here(variable: str) -> tuple[str, ...] | None:
    """The devices that our processes see; None if unknown."""
    for name in (variable, CUDA) if variable == HIP else (variable,):
        if (said := os.environ.get(name)) is not None:
            return tuple(each.strip() for each in said.split(",") if each.strip() not in ("", "-1"))
    count = {CUDA: _nvidia, HIP: _amd, _ASCEND: _ascend}.get(variable, int)()
    return tuple(map(str, range(count))) or None


@dataclass(frozen=True, slots=True)
class _Wanting:
    """An instance that computes on devices. key: the key of the file that chooses them, if one does."""

    entry: InstanceSection
    name: str
    host: str
    variable: str
    ranks: int
    key: str = ""
    chosen: tuple[str, ...] = ()

    def on(self, device: str) -> Device:
        return Device(self.host, self.variable, device)

    @property
    def shares(self) -> bool:
        """Whether its entry allows sharing a device."""
        return self.key == "devices" and "kv_cache_bytes" in self.entry.extra


class _Assigning:
    def __init__(self, cluster: Cluster, here: str, visible: Visible) -> None:
        self._cluster = cluster
        self._here = here
        self._visible = visible
        self._faults: list[Fault] = []
        self._users: dict[Device, list[str]] = {}
        self._env: dict[str, Mapping[str, str]] = {}

    def all(self) -> Assignment:
        waiting: list[_Wanting] = []
        explicit: list[_Wanting] = []
        for each in self._wanting():
            (explicit if each.key else waiting).append(each)
        for each in explicit:
            self._take(each, each.chosen)
        self._faults += self._overlaps(explicit)
        for each in waiting:
            self._take(each, self._next_free(each))
        return Assignment(self._env, self._users, tuple(dict.fromkeys(self._faults)))

    def _wanting(self) -> Iterator[_Wanting]:
        for entry in self._cluster.instances:
            host, at = entry.host or self._cluster.control or LOCAL, f"instances.{entry.id}"
            variable = _variable(entry)
            if not variable:
                if entry.devices:
                    emulated = entry.extra.get("engine") == "emulated"
                    on = "an emulated engine" if emulated else f"accelerator {entry.extra.get('accelerator', 'cpu')!r}"
                    self._faults.append((f"{at}.devices", f"{on} has no numbered devices: leave it out"))
                continue
            if not entry.enabled:
                continue
            ranks = ranks_of(entry.extra)
            said = next((name for name in VISIBLE if entry.env.get(name)), "")
            if said and entry.devices:
                self._faults.append(
                    (f"{at}.devices", f"env.{said} already chooses the devices: leave one of the two out")
                )
            for index, name in enumerate(entry.ids):
                each = _Wanting(entry, name, host, variable, ranks)
                if entry.devices:
                    chosen = self._named(entry, at, host, variable, ranks, index)
                    yield _Wanting(entry, name, host, variable, ranks, "devices", chosen)
                elif said:
                    seen = tuple(part.strip() for part in entry.env[said].split(","))[:ranks]
                    yield _Wanting(entry, name, host, variable, ranks, f"env.{said}", seen)
                else:
                    yield each

    def _named(
        self, entry: InstanceSection, at: str, host: str, variable: str, ranks: int, index: int
    ) -> tuple[str, ...]:
        """The devices of this instance among the entry's `devices`."""
        given, many = entry.devices, len(entry.ids)
        if len(given) == ranks * many:
            given = given[index * ranks : (index + 1) * ranks]
        elif len(given) != ranks:
            each = f" for each of {many} instances: {ranks * many}, or {ranks} that they share" if many > 1 else ""
            text = f"{ranks} are needed (tensor_parallel x pipeline_parallel){each}; got {len(given)}"
            self._faults.append((f"{at}.devices", text))
            return ()
        base = self._visible(variable) if host == self._here else None
        if base is None:
            return tuple(map(str, given))
        if missing := [number for number in given if number >= len(base)]:
            text = f"there is no device {missing[0]}: host {host!r} has {_counted(len(base))}"
            self._faults.append((f"{at}.devices", text))
            return ()
        return tuple(base[number] for number in given)

    def _next_free(self, each: _Wanting) -> tuple[str, ...]:
        base = self._visible(each.variable) if each.host == self._here else None
        taken = len(self._users)
        names = base if base is not None else tuple(map(str, range(taken + each.ranks)))
        free = [name for name in names if each.on(name) not in self._users]
        if len(free) < each.ranks:
            text = (
                f"{each.name} needs {_devices(each.ranks)} (tensor_parallel x pipeline_parallel), and host "
                f"{each.host!r} has {len(free)} free of {len(names)}: run fewer instances there, or let two share a "
                "device: `devices: [0]` and `kv_cache_bytes` in both"
            )
            self._faults.append((f"instances.{each.entry.id}", text))
        return tuple(free[: each.ranks])

    def _take(self, each: _Wanting, devices: Sequence[str]) -> None:
        for device in devices:
            self._users.setdefault(each.on(device), []).append(each.name)
        if each.key.startswith("env.") or not devices:
            return
        said = ",".join(devices)
        found = {each.variable: said}
        if each.variable == HIP and os.environ.get(CUDA):
            found[CUDA] = said  # vLLM refuses two that differ
        if each.variable == CUDA and not (os.environ.get(CUDA) or os.environ.get(_ORDER)):
            found[_ORDER] = "PCI_BUS_ID"
        self._env[each.name] = found

    def _overlaps(self, explicit: Sequence[_Wanting]) -> Iterator[Fault]:
        by_name = {each.name: each for each in explicit}
        for device, names in self._users.items():
            first, *others = (by_name[name] for name in names)
            for each in others:
                if first.shares and each.shares:
                    continue
                at, label = f"instances.{each.entry.id}.{each.key}", f"device {device.name} of host {device.host!r}"
                if first.key == each.key == "devices":
                    yield at, f"{label} is also assigned to {first.name}: to share it, set `kv_cache_bytes` in both"
                else:
                    yield (
                        at,
                        f"{label} is also assigned to {first.name}: choose another, or let them share it: "
                        f"`devices: [{device.name}]` and `kv_cache_bytes` in both, in place of `env`",
                    )


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
    """The built-in catalogue, read once."""
    return Catalogue.built_in()


def _devices(count: int) -> str:
    return f"{count} device" + ("s" if count > 1 else "")


def _counted(count: int) -> str:
    return f"{count} (0 to {count - 1})" if count > 1 else "one (0)"


def _nvidia() -> int:
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _amd() -> int:
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    return sum(re.search(r"^simd_count [1-9]", _text(node), re.MULTILINE) is not None for node in nodes)


def _ascend() -> int:
    return len([each for each in Path("/dev").glob("davinci*") if each.name.removeprefix("davinci").isdecimal()])


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
