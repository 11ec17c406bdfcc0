"""Where the key of a suite on one host is kept: in the data folder, beside the cluster's secret."""

from pathlib import Path

from services.launcher import cluster_token
from services.launcher.cluster_file import Cluster
from shared.runtime.keys import new_key, read_pair

NAME = "curve-key"


def file_in(data_dir: Path) -> Path:
    """The file; processes get its path, so that the key is in no environment."""
    return data_dir.resolve() / NAME


def keep(cluster: Cluster, data_dir: Path) -> None:
    """Have the file, readable by its owner only, unless the cluster file has a pair: a new key if there is none.

    Raises InvalidRequest for a file that has none.
    """
    if cluster.curve_public:
        return
    file = file_in(data_dir)
    if file.exists():
        file.chmod(0o600)
        read_pair(file)
        return
    data_dir.mkdir(parents=True, exist_ok=True)
    cluster_token.write(file, new_key())
