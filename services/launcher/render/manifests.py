"""All objects of a cluster file, in the order in which they are needed, and how they are written."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from services.launcher.cluster_file import Cluster
from services.launcher.render.configuration import config, secret, secret_keys
from services.launcher.render.groups import groups_of
from services.launcher.render.monitors import monitor
from services.launcher.render.network import policies
from services.launcher.render.objects import Manifest
from services.launcher.render.options import RenderOptions
from services.launcher.render.services import services
from services.launcher.render.storage import postgres
from services.launcher.render.workloads import budget, workload

_HEAD = "# Made by `polyphase render kubernetes`; change the cluster file, not this.\n"


@dataclass(frozen=True, slots=True)
class Rendered:
    """Objects by the file that they go into, and the keys that the Secret has to hold."""

    files: Mapping[str, list[Manifest]]
    secret_keys: list[str]

    @property
    def objects(self) -> list[Manifest]:
        """All of them, in order."""
        return [each for several in self.files.values() for each in several]


def render(cluster: Cluster, options: RenderOptions, where: str, *, with_secrets: bool = False) -> Rendered:
    """Raises InvalidRequest that names `where` and the key at fault.

    with_secrets: keys and passwords in clear, from the cluster file.
    """
    groups = groups_of(cluster, options, where)
    namespace: Manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": options.namespace}}
    files: dict[str, list[Manifest]] = {"00-namespace": [namespace]}
    if with_secrets:
        files["10-secret"] = [secret(cluster, options, groups, secrets.token_urlsafe(24), where)]
    if options.postgres.enabled:
        files["20-postgres"] = postgres(options)
    files["30-services"] = services(options, groups)
    if options.network_policies:
        files["40-network"] = policies(options, groups)
    if options.monitors:
        files["50-metrics"] = [monitor(options)]
    for group in groups:
        own = [config(options, group), workload(cluster, options, group, where), budget(options, group)]
        files[f"60-{group.name}"] = own
    return Rendered(files, secret_keys(options, groups))


def as_text(objects: list[Manifest]) -> str:
    """A stream of YAML documents."""
    return _HEAD + "".join(f"---\n{yaml.dump(each, Dumper=_Plain, sort_keys=False, width=110)}" for each in objects)


def write(rendered: Rendered, folder: Path) -> list[Path]:
    """A file each; the Secret's is readable by its owner only. What was rendered there before and is no more goes."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("[0-9][0-9]-*.yaml"):
        if old.read_text().startswith(_HEAD):
            old.unlink()
    written = []
    for name, objects in rendered.files.items():
        file = folder / f"{name}.yaml"
        file.touch(mode=0o600 if "secret" in name else 0o644)
        file.write_text(as_text(objects))
        written.append(file)
    return written


class _Plain(yaml.SafeDumper):
    """Without anchors, which people read badly."""

    def ignore_aliases(self, data: object) -> bool:
        return True
