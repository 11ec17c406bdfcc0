"""The cluster file: shipped files, names and defaults of instances, and which keys a section accepts."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.launcher.cluster_file import CLUSTERS, Cluster, load_cluster
from services.launcher.cluster_sections import (
    CLUSTER_KEYS,
    GatewaySection,
    InstanceSection,
    MonitorSection,
    PlannerSection,
    PredictorSection,
    SchedulerSection,
    Section,
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
    ("section", "key"),
    [
        (GatewaySection, "port"),  # also a setting, which the launcher passes on
        (GatewaySection, "env"),
        (GatewaySection, "drain_s"),
        (InstanceSection, "max_model_len"),
    ],
)
def test_a_section_accepts_its_fields_and_the_settings_that_only_it_gives(section: type[Section], key: str) -> None:
    assert key in section.accepted_keys()


DERIVED = "it is derived from the rest of the file: leave it out"
AT_THE_TOP = "it belongs to the whole cluster: write it at the top of the file"


@pytest.mark.parametrize(
    ("section", "key", "text"),
    [
        (PredictorSection, "port", DERIVED),
        (GatewaySection, "max_model_len", DERIVED),
        (InstanceSection, "curve_file", DERIVED),
        (MonitorSection, "policies", DERIVED),
        (MonitorSection, "database_url", AT_THE_TOP),
        (MonitorSection, "role_flip_parameters", "write `policies: {role_flip: …}` at the top"),
        (MonitorSection, "monitor_url", "unknown key 'monitor_url'"),
    ],
)
def test_a_section_says_why_it_refuses_a_key(section: type[Section], key: str, text: str) -> None:
    assert key not in section.accepted_keys()
    assert text in section.refusal(key)


def test_a_section_that_derives_an_unknown_setting_is_an_error_at_import() -> None:
    with pytest.raises(TypeError, match=r"Faulty\.derived: PlannerSettings has no htp_port"):
        type("Faulty", (PlannerSection,), {"__module__": __name__, "derived": ("http_host", "htp_port")})


@pytest.mark.parametrize(
    "section", [GatewaySection, SchedulerSection, MonitorSection, PredictorSection, PlannerSection, InstanceSection]
)
def test_no_derived_setting_is_also_a_field_of_the_section(section: type[Section]) -> None:
    assert not set(section.derived) & set(section.model_fields)


def test_adapters_are_folders_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "sql").mkdir()
    cluster = load_cluster(write(tmp_path, lora={"adapters": {"sql": "sql", "org/poems": "/poems"}, "max_rank": 16}))
    assert cluster.lora.adapters == {"sql": str(tmp_path / "sql"), "org/poems": "/poems"}
    plan = make_plan(cluster, tmp_path)
    served = {name: spec.settings.lora for spec in plan.processes if (name := spec.name) in ("gateway", "p", "d-0")}  # type: ignore[union-attr]
    assert served == dict.fromkeys(served, cluster.lora)
    assert len(served) == 3


def test_quantised_weights_are_a_folder_beside_the_file_or_a_name(tmp_path: Path) -> None:
    (tmp_path / "int8").mkdir()
    rows = [{"id": name, "role": "prefill", "weights": weights} for name, weights in (("p", "int8"), ("q", "org/fp8"))]
    cluster = load_cluster(write(tmp_path, instances=[*rows, {"id": "d", "role": "decode"}], mixed_precision=True))
    assert [each.extra.get("weights") for each in cluster.instances] == [str(tmp_path / "int8"), "org/fp8", None]
    assert cluster.mixed_precision


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"engine": "emulated", "weights": "org/fp8"}, "weights: an emulated engine loads none"),
        ({"emulated_precision": "fp8"}, "emulated_precision: only emulated engines have it"),
        ({"mixed_precision": True}, "mixed_precision: it belongs to the whole cluster"),
    ],
)
def test_precisions_that_an_instance_cannot_have(tmp_path: Path, row: dict[str, Any], fault: str) -> None:
    file = write(tmp_path, instances=[{"id": "p", "role": "prefill", **row}])
    with pytest.raises(InvalidRequest, match=fault):
        make_plan(load_cluster(file), tmp_path)


@pytest.mark.parametrize(
    ("lora", "fault"),
    [
        ({"adapters": {"small-model": "/a"}}, "lora.adapters.small-model: the base model has this name"),
        ({"max_rank": 8}, "lora.adapters: there is no adapter"),
        ({"adapters": {"a": "/a"}, "max_rank": 7}, "lora.max_rank: must be one of 1, 8, 16, .*, got 7"),
        ({"adapters": {"a b": "/a"}}, "lora.adapters"),
        ({"adapter": {"a": "/a"}}, "lora.adapter"),
    ],
)
def test_adapters_that_cannot_be_served_are_refused(tmp_path: Path, lora: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvalidRequest, match=fault):
        load_cluster(write(tmp_path, served_model_name="small-model", lora=lora))


def test_emulated_engines_have_no_adapters(tmp_path: Path) -> None:
    file = write(tmp_path, lora={"adapters": {"a": "/a"}}, instance_defaults={"engine": "emulated"})
    with pytest.raises(InvalidRequest, match="lora: an emulated engine has no adapters"):
        make_plan(load_cluster(file), tmp_path)


def test_the_keys_of_the_whole_cluster_are_fields_of_it() -> None:
    assert set(Cluster.model_fields) >= CLUSTER_KEYS


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1\n", "", "just words"])
def test_a_file_that_is_no_mapping_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=r"c\.yaml"):
        load_cluster(file)
