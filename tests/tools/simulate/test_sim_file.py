"""The simulation file: what it says, and how it fails."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.launcher.cluster_file import CLUSTERS
from shared.domain.kv import Codec
from shared.errors import InvalidRequest
from tools.simulate.sim_file import find_file, is_sim_file, load_sim_file

SMALL: dict[str, Any] = {
    "model": "Llama-3-8B",
    "instances": [
        {"accelerator": "A100-SXM-80", "count": 2, "role": "prefill"},
        {"accelerator": "A10", "role": "decode", "id": "d"},
    ],
}


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "sim.yaml"
    file.write_text(yaml.safe_dump({**SMALL, **changes}))
    return file


def instances(**changes: Any) -> list[dict[str, Any]]:
    return [{**SMALL["instances"][0], **changes}, SMALL["instances"][1]]


def test_ids_follow_from_what_an_instance_is(tmp_path: Path) -> None:
    read = load_sim_file(write(tmp_path))
    assert [name for entry in read.instances for name in entry.ids] == [
        "prefill-a100-sxm-80-0",
        "prefill-a100-sxm-80-1",
        "d",
    ]


def test_defaults_apply_to_every_instance(tmp_path: Path) -> None:
    read = load_sim_file(write(tmp_path, instance_defaults={"chunk_size": 512, "max_seqs": 32}))
    assert {entry.chunk_size for entry in read.instances} == {512}


def test_everything_at_once(tmp_path: Path) -> None:
    read = load_sim_file(
        write(
            tmp_path,
            links={"default": {"gbps": 100}, "slow": {"gbps": 10, "efficiency": 0.5}},
            policies={"placement": "round_robin", "split": {"name": "fraction", "fraction": 0.5}},
            slo={"ttft_s": 0.5},
            losses=[{"instance": "d", "at_s": 3, "back_s": 9}],
            flips=[{"instance": "d", "at_s": 1}],
            run={"codec": "int8", "first_token": "decode"},
            prediction={"accuracy": 0.749},
        )
    )
    assert read.policies["split"] == {"name": "fraction", "fraction": 0.5}
    assert (read.slo.ttft_s, read.slo.tpot_s) == (0.5, 0.2)
    assert read.run.codec is Codec.INT8


def test_paths_are_taken_from_the_files_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    read = load_sim_file(write(tmp_path, calibration="own.yaml", model="config.json"))
    assert read.calibration == tmp_path / "own.yaml"
    assert read.model == str(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"instances": instances(chunk=3)}, r"sim\.yaml:\d+: instances\.0\.chunk: unknown key 'chunk'; did you mean"),
        ({"instances": instances(role="both")}, r"instances\.0\.role"),
        ({"instances": instances(count=0)}, r"instances\.0\.count"),
        ({"instances": instances(link="fast")}, r"instances\.0\.link: unknown link 'fast'\. Known: none"),
        ({"instances": instances(link={"gbps": 0})}, r"gbps"),
        ({"instances": instances(id="d", count=1)}, r"'d' is used twice"),
        ({"instances": []}, r"instances"),
        ({"losses": [{"instance": "x", "at_s": 1}]}, r"losses.0.instance: unknown instance 'x'. Known: d, prefill"),
        ({"flips": [{"instance": "x", "at_s": 1}]}, r"flips.0.instance: unknown instance 'x'"),
        ({"run": {"flip_s": -1}}, r"run\.flip_s"),
        ({"slo": {"ttft_s": 0}}, r"slo\.ttft_s"),
        ({"prediction": {"accuracy": 2}}, r"prediction\.accuracy"),
        ({"model": None}, r"model"),
    ],
)
def test_errors_name_file_and_key(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as error:
        load_sim_file(write(tmp_path, **changes))
    assert "sim.yaml" in error.value.message


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        load_sim_file(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(InvalidRequest, match="not valid YAML"):
        load_sim_file(tmp_path / "bad.yaml")


def test_the_two_forms_are_told_apart(tmp_path: Path) -> None:
    assert is_sim_file(write(tmp_path))
    assert is_sim_file(write(tmp_path, name="x"))
    for file in CLUSTERS.glob("*.yaml"):
        assert not is_sim_file(file)
    bare = [{"id": "p", "role": "prefill"}]
    assert not is_sim_file(write(tmp_path, name="small", instances=bare))


def test_a_bare_name_means_a_shipped_file() -> None:
    assert find_file(Path("emulated-mixed")) == CLUSTERS / "emulated-mixed.yaml"
    assert find_file(Path("nothing.yaml")) == Path("nothing.yaml")
