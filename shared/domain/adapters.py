"""LoRA adapters that were loaded while the cluster serves, and the keys by which instances know adapters.

An adapter of the cluster file has its name as its key. One that was loaded at run time has a key of its name and the
digest of its weights, so that a name that is loaded again with other weights is another adapter for placement, prefix
hashes, prefix caches and KV handles, while requests under way go on with the former one.
"""

import re
from collections.abc import Mapping

import msgspec

DIGEST_CHARS = 32
_VERSIONED = re.compile(rf"(.+)@([0-9a-f]{{{DIGEST_CHARS}}})", re.DOTALL)


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter that was loaded at run time. path: of its folder on the instances' hosts. since_s: unix time."""

    name: str
    path: str
    digest: str
    who: str = ""
    since_s: float = 0.0

    @property
    def key(self) -> str:
        """By which instances know it."""
        return version_key(self.name, self.digest)


class AdapterSet(msgspec.Struct, frozen=True):
    """All adapters that were loaded at run time and not unloaded. The cluster monitor owns it, and `revision` rises
    with each change, also over restarts of the monitor; 0: not known yet.
    """

    revision: int = 0
    adapters: tuple[LoadedAdapter, ...] = ()

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(each.key for each in self.adapters)

    def get(self, name: str) -> LoadedAdapter | None:
        return next((each for each in self.adapters if each.name == name), None)


def version_key(name: str, digest: str) -> str:
    return f"{name}@{digest}"


def is_version(key: str) -> bool:
    """Whether it is the key of an adapter that was loaded at run time."""
    return _VERSIONED.fullmatch(key) is not None


def digest_of_key(key: str, of_file: Mapping[str, str]) -> str:
    """The digest of an adapter; empty for an empty key, which is the base model's. of_file: digests of the cluster
    file's adapters, by name. Raises KeyError for another key.
    """
    if not key:
        return ""
    if (found := _VERSIONED.fullmatch(key)) is not None:
        return found[2]
    return of_file[key]
