"""The messages of faulty cluster files, word for word, and that they repeat no secret."""

import re
from pathlib import Path

import pytest
import yaml

from services.launcher.cluster_file import load_cluster
from services.launcher.cluster_sections import GatewaySection, MonitorSection, Section
from services.launcher.plan import make_plan
from services.launcher.preflight import preflight
from services.launcher.up import UpOptions, cluster_of
from shared.errors import InvalidRequest, PolyphaseError

HEAD = "name: bad\nmodel: models/demo\n"
CASES: dict[str, dict[str, str]] = yaml.safe_load((Path(__file__).parent / "bad_cluster_files.yaml").read_text())
TAIL = "instances:\n  - {id: p, role: prefill}\n  - {id: d, role: decode}\n"


def message_of(folder: Path, text: str) -> str:
    """The error of `polyphase up`, without the folder; empty for a sound file."""
    file = folder / "c.yaml"
    file.write_text(("" if text.startswith("name:") else HEAD) + text + ("" if "instances:" in text else TAIL))
    try:
        cluster = load_cluster(file)
        preflight(cluster, make_plan(cluster, folder / "data", next(iter(cluster.hosts), ""), str(file)), str(file))
    except PolyphaseError as error:
        return error.message.replace(f"{folder}/", "")
    return ""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_message_of_a_faulty_file(tmp_path: Path, case: dict[str, str]) -> None:
    found = message_of(tmp_path, case["file"]).split("\n")
    assert "\n".join(line if line in case["message"] else shortened(line) for line in found) == case["message"]


def shortened(line: str) -> str:
    """The line without lists that grow with the settings."""
    line = re.sub(r"must be one of apertus, .*, not", "must be one of …, not", line)  # of vLLM's parsers
    line = re.sub(r"known: .*; did", "known: …; did", line)
    head, known, _ = line.partition(" Known: ")
    return f"{head}{known}…" if known else head


SECRETS = [
    # Of a value of the wrong kind.
    "gateway: {env: {HF_TOKEN: 271828}}\n",
    "gateway: {env: HF_TOKEN=271828}\n",
    "gateway: {env: [HF_TOKEN=271828]}\n",
    "gateway:\n  - env: {HF_TOKEN: x-271828}\n",
    "instance_defaults: {env: {HF_TOKEN: 271828}}\n",
    "cluster_token: 271828\n",
    "cluster_token: [x-271828]\n",
    "cluster_token: x-271828\n",
    "curve_secret: 271828\n",
    "curve_public: x\ncurve_secret: x-271828\n",
    "database_url: 271828\n",
    "database_url: postgresql//user:x-271828@host/db\n",
    "database_url: postgresql://user:x-271828/db\n",
    "database_url: postgresql://user:x-271828@host:port/db\n",
    "database_url: mysql://user:x-271828@host/db\n",
    "database_url: [postgresql://user:x-271828@host/db]\n",
    "tracing: {endpoint: http//user:x-271828@host}\n",
    "tracing: {endpoint: http://user:x-271828@host:port}\n",
    "tracing: {endpoint: grpc://user:x-271828@host:4317}\n",
    "tracing: http://user:x-271828@host\n",
    "monitor: {silence_s: http://user:x-271828@host}\n",
    # A space is missing after the colon: the value is a part of the key.
    "gateway: {env: {HF_TOKEN:271828}}\n",
    "gateway: {env: {HF_TOKEN:271828, HF_TOKEN:271828}}\n",
    "gateway: {vllm_args: {}, hf_token:271828}\n",
    "? cluster_token:x-271828\n",
    "? cluster_token=x-271828\n",
    # Letters that mean something else in YAML, and no quotes.
    "curve_secret: *x-271828\n",
    "curve_secret: !x-271828 y\n",
    "curve_secret: !x!271828 y\n",
    "curve_secret: &x-271828 y\ncurve_public: &x-271828 y\n",
    "curve_secret: {x-271828[\n",
    "curve_secret: @x-271828\n",
    "curve_secret: 'x-271828\n",
    'curve_secret: "\\qx-271828"\n',
    "cluster_token: 2026-99-99 # 271828\n",
    # What is wrong is in the line beside it.
    "gateway: {prot: 1, env: {HF_TOKEN: x-271828}}\n",
]


@pytest.mark.parametrize("text", SECRETS)
def test_no_message_repeats_a_secret(tmp_path: Path, text: str) -> None:
    message = message_of(tmp_path, text)
    assert message.startswith("c.yaml")
    assert "271828" not in message


def test_a_sound_file_has_no_message(tmp_path: Path) -> None:
    assert message_of(tmp_path, "") == ""


@pytest.mark.parametrize("section", [GatewaySection, MonitorSection])
def test_all_keys_that_may_be_given_are_listed(tmp_path: Path, section: type[Section]) -> None:
    name = section.__name__.removesuffix("Section").lower()
    listed = message_of(tmp_path, f"{name}: {{prot: 1}}\n").partition(" Known: ")[2].split(", ")
    assert listed == sorted(listed)
    assert set(listed) == section.accepted_keys()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("instances:\n  - id: p.0\n    role: prefill\n    chunk_size: big\n", "6: instances.p.0.chunk_size"),
        (
            "instances:\n  - &one\n    id: p\n    role: prefill\n    chunk_size: big\n  - <<: *one\n    id: d\n",
            "7: instances.p.chunk_size",
        ),
        (
            "instances:\n  - &one\n    id: p\n    role: prefill\n  - <<: *one\n    id: d\n    role: both\n",
            "9: instances.d.role",
        ),
    ],
)
def test_the_place_of_a_key_with_dots_or_from_an_anchor(tmp_path: Path, text: str, place: str) -> None:
    assert message_of(tmp_path, text).startswith(f"c.yaml:{place}: ")


def test_a_model_of_the_command_line_has_the_option_as_its_place(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(HEAD + TAIL)
    cluster = cluster_of(UpOptions(file, model="models/hole"))
    with pytest.raises(InvalidRequest, match=r"^--model: there is no folder"):
        preflight(cluster, make_plan(cluster, tmp_path / "data"), str(file))


def test_a_missing_file_names_similar_ones() -> None:
    with pytest.raises(InvalidRequest, match=r"^laptp: there is no such file; did you mean laptop. Shipped files: "):
        load_cluster(Path("laptp"))
