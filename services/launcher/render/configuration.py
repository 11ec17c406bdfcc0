"""ConfigMaps of what anybody may read, and the Secret of the rest."""

from collections.abc import Sequence
from pathlib import Path

from services.launcher.cluster_file import Cluster
from services.launcher.render.groups import KEYS_FILE, Group
from services.launcher.render.objects import Manifest, manifest
from services.launcher.render.options import RenderOptions
from services.launcher.render.pods import config_name, extra_environment
from shared.errors import InvalidRequest

_HOW = {
    "curve-public": "curve_public, curve_secret: `polyphase keys curve` makes a pair",
    "curve-secret": "curve_public, curve_secret: `polyphase keys curve` makes a pair",
    "cluster-token": "cluster_token: `polyphase keys token` makes one",
    "database-url": "database_url: postgresql://USER:PASSWORD@HOST/NAME, or --with-postgres",
    "keys.yaml": "gateway.api_keys_file: `polyphase keys add NAME --file keys.yaml` makes one",
}


def config(options: RenderOptions, group: Group) -> Manifest:
    """The environment of a group's pods, but for secrets."""
    plain = {key: value for key, value in group.environment.items() if "$(" not in value}
    data = {**extra_environment(), **plain}
    body = {"data": {key: data[key] for key in sorted(data)}}
    return manifest("v1", "ConfigMap", config_name(group), options.namespace, body)


def secret_keys(options: RenderOptions, groups: Sequence[Group]) -> list[str]:
    """What the Secret has to hold."""
    keys = {key for group in groups for key in group.secrets.values()}
    own = {"postgres-password"} if options.postgres.enabled else set()
    return sorted(keys | own | {KEYS_FILE.rpartition("/")[2]})


def secret(cluster: Cluster, options: RenderOptions, groups: Sequence[Group], password: str, where: str) -> Manifest:
    """In clear: whoever asks for it looks after it. Raises InvalidRequest that names all that the file lacks."""
    said = _values(groups, where)
    said["database-url"] = cluster.database_url
    said["cluster-token"] = cluster.cluster_token.get_secret_value()
    said["postgres-password"] = password
    file = cluster.gateway.extra.get("api_keys_file")
    try:
        said["keys.yaml"] = Path(file).read_text() if file else ""
    except OSError as error:
        raise InvalidRequest(f"{where}: gateway.api_keys_file: {error}") from error
    keys = secret_keys(options, groups)
    if missing := [key for key in keys if not said.get(key)]:
        lines = dict.fromkeys(f"{where}: the Secret needs {_HOW.get(key, key)}" for key in missing)
        raise InvalidRequest("\n".join(lines))
    if "database-url" in keys and not said["database-url"].startswith("postgres"):
        raise InvalidRequest(f"{where}: database_url: pods share no file: it has to be postgresql://…")
    body = {"type": "Opaque", "stringData": {key: said[key] for key in keys}}
    return manifest("v1", "Secret", options.secret, options.namespace, body)


def _values(groups: Sequence[Group], where: str) -> dict[str, str]:
    """What the file says of secrets. Raises InvalidRequest for a key of two values."""
    found: dict[str, str] = {}
    for group in groups:
        for key, value in group.secret_values.items():
            if found.setdefault(key, value) != value:
                raise InvalidRequest(
                    f"{where}: {group.name}: {key} differs from another group's, and the Secret has one {key} for all"
                )
    return found
