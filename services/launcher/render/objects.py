"""What all objects have: kind, name, labels."""

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from services.launcher.render.groups import Group

Manifest = dict[str, Any]
SUITE = "polyphase"
METRICS = "polyphase/metrics"  # the label of Services that Prometheus goes by


def manifest(
    api: str, kind: str, name: str, namespace: str, body: Mapping[str, Any], labels: Mapping[str, str] | None = None
) -> Manifest:
    """One object of a namespace."""
    metadata = {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/part-of": SUITE, **(labels or {})}}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **body}


def labels(group: "Group") -> dict[str, str]:
    """Of the pods of a group."""
    return {"app.kubernetes.io/part-of": SUITE, **selector(group)}


def selector(group: "Group") -> dict[str, str]:
    """By which the pods of a group are found, and no others."""
    return {"app.kubernetes.io/name": group.component, "app.kubernetes.io/instance": group.name}


def checksum(config: Mapping[str, str]) -> str:
    """Another one when anything in it changes."""
    return hashlib.sha256(json.dumps(dict(config), sort_keys=True).encode()).hexdigest()[:16]
