"""The cluster file: shipped files, names and defaults of instances, and which keys a section accepts."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.launcher.cluster_file import (
    CLUSTER_KEYS,
    CLUSTERS,
    Cluster,
    GatewaySection,
    InstanceSection,
    KeyKind,
    MonitorSection,
    PredictorSection,
    Section,
    load_cluster,
)
from services.launcher.plan import make_plan
from shared.cost.catalogue import Catalogue
from shared.errors import InvalidRequest

SMALL: dict[str, Any] = {
    "name": "small",
    "model": "org/some-model",
    "instances": [{"id": "p", "role": "prefill"}, {"id": "d", "role": "decode", "count": 2}],
}


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "c.yaml"
    file.write_text(yaml.safe_dump({**SMALL, **changes}))
    return file


@pytest.mark.parametrize("file", sorted(CLUSTERS.glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_clusters_load_and_plan(file: Path, tmp_path: Path) -> None:
    cluster = load_cluster(file)
    plan = make_plan(cluster, tmp_path)
    assert set(plan.instance_ids) == set(cluster.instance_ids)
    assert {entry.role.value for entry in cluster.instances} == {"prefill", "decode"}


def test_a_bare_name_means_a_shipped_cluster() -> None:
    assert load_cluster(Path("laptop")).name == "laptop"


def test_the_emulated_cluster_says_so_and_has_32_known_accelerators() -> None:
    cluster = load_cluster(Path("emulated-mixed"))
    assert "emulated" in cluster.name
    assert len(cluster.instance_ids) == 32
    known = Catalogue.built_in()
    for entry in cluster.instances:
        assert entry.extra["engine"] == "emulated"
        assert known.get(entry.extra["accelerator"])


def test_count_names_each_instance(tmp_path: Path) -> None:
    assert load_cluster(write(tmp_path)).instance_ids == ("p", "d-0", "d-1")


def test_defaults_apply_and_an_instance_overrides_them(tmp_path: Path) -> None:
    instances = [{"id": "p", "role": "prefill"}, {"id": "d", "role": "decode", "block_size": 128}]
    cluster = load_cluster(write(tmp_path, instance_defaults={"block_size": 64}, instances=instances))
    assert [entry.extra["block_size"] for entry in cluster.instances] == [64, 128]


@pytest.mark.parametrize(
    ("section", "key", "kind"),
    [
        (GatewaySection, "port", KeyKind.OWN),  # also a setting, which the launcher passes on
        (PredictorSection, "port", KeyKind.DERIVED),
        (GatewaySection, "env", KeyKind.OWN),
        (GatewaySection, "drain_s", KeyKind.SETTING),
        (GatewaySection, "max_model_len", KeyKind.DERIVED),
        (InstanceSection, "max_model_len", KeyKind.SETTING),
        (InstanceSection, "curve_file", KeyKind.DERIVED),
        (MonitorSection, "policies", KeyKind.DERIVED),
        (MonitorSection, "database_url", KeyKind.CLUSTER),
        (MonitorSection, "role_flip_parameters", KeyKind.POLICY),
        (MonitorSection, "monitor_url", None),
    ],
)
def test_a_key_of_a_section_has_one_kind(section: type[Section], key: str, kind: KeyKind | None) -> None:
    assert section.key_kinds().get(key) is kind


def test_sections_name_existing_settings() -> None:
    for section in Section.__subclasses__():
        assert set(section.derived) <= set(section.settings.model_fields)
    assert set(CLUSTER_KEYS) <= set(Cluster.model_fields)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1\n", "", "just words"])
def test_a_file_that_is_no_mapping_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=r"c\.yaml"):
        load_cluster(file)
