"""Bad cluster files: what is said of each, word for word. What a person reads is the point of them."""

# ruff: noqa: E501  (what is said is one line)

import re
from pathlib import Path

import pytest

from services.launcher.cluster_file import ACCEPTED, GatewaySection, MonitorSection, Section, load_cluster
from services.launcher.plan import make_plan
from services.launcher.preflight import preflight
from services.launcher.up import UpOptions, cluster_of
from shared.errors import InvalidRequest, PolyphaseError
from shared.policy.registry import DISPATCH, KINDS

HEAD = "name: bad\nmodel: models/demo\n"
TAIL = "instances:\n  - {id: p, role: prefill}\n  - {id: d, role: decode}\n"


def said_of(folder: Path, text: str) -> str:
    """What `polyphase up` would say, the folder left out; nothing if nothing is wrong."""
    file = folder / "c.yaml"
    file.write_text(text)
    try:
        cluster = load_cluster(file)
        preflight(cluster, make_plan(cluster, folder / "data", next(iter(cluster.hosts), ""), str(file)), str(file))
    except PolyphaseError as error:
        return error.message.replace(f"{folder}/", "")
    return ""


BAD: dict[str, tuple[str, str]] = {  # "Known: …" stands for a list that grows with the settings
    "unknown_at_the_top": (
        HEAD + "modell: x\n" + TAIL,
        "c.yaml:3: modell: unknown key 'modell'; did you mean model? Known: …",
    ),
    "two": (
        HEAD + "gateway: {prot: 1, hots: a}\nmonitor:\n  silense_s: 1\n" + TAIL,
        (
            "c.yaml:3: gateway.prot: unknown key 'prot'; did you mean port? Known: …\n"
            "c.yaml:3: gateway.hots: unknown key 'hots'; did you mean host?\n"
            "c.yaml:5: monitor.silense_s: unknown key 'silense_s'; did you mean silence_s? Known: …"
        ),
    ),
    "derived": (
        HEAD + "gateway:\n  schedulers: []\n" + TAIL,
        "c.yaml:4: gateway.schedulers: it is derived from the rest of the file: leave it out",
    ),
    "at_the_top": (
        HEAD + "monitor:\n  database_url: sqlite:///x\n" + TAIL,
        "c.yaml:4: monitor.database_url: it belongs to the whole cluster: write it at the top of the file",
    ),
    "moved": (
        HEAD + "scheduler:\n  dispatch: random\n" + TAIL,
        "c.yaml:4: scheduler.dispatch: it belongs to the whole cluster: write `policies: {dispatch: …}` at the top",
    ),
    "range": (HEAD + "gateway:\n  port: 0\n" + TAIL, "c.yaml:4: gateway.port: must be greater than 0, not 0"),
    "type": (
        HEAD + "scheduler:\n  count: many\n" + TAIL,
        "c.yaml:4: scheduler.count: must be a whole number, not 'many'",
    ),
    "late_type": (
        HEAD + "monitor:\n  silence_s: soon\n" + TAIL,
        "c.yaml:4: monitor.silence_s: must be a number, not 'soon'",
    ),
    "late_range": (
        HEAD + "monitor:\n  silence_s: -1\n" + TAIL,
        "c.yaml:4: monitor.silence_s: must be greater than 0, not -1",
    ),
    "role": (
        HEAD + "instances:\n  - id: p\n    role: prefil\n",
        "c.yaml:5: instances.p.role: must be one of prefill, decode, not 'prefil'; did you mean prefill?",
    ),
    "no_role": (HEAD + "instances:\n  - id: p\n", "c.yaml:4: instances.p.role: it is missing"),
    "instance_key": (
        HEAD + "instances:\n  - id: p\n    role: prefill\n    blok_size: 16\n",
        "c.yaml:6: instances.p.blok_size: unknown key 'blok_size'; did you mean block_size? Known: …",
    ),
    "default_key": (
        HEAD + "instance_defaults:\n  engin: emulated\n" + TAIL,
        "c.yaml:4: instance_defaults.engin: unknown key 'engin'; did you mean engine? Known: …",
    ),
    "default_type": (
        HEAD + "instance_defaults:\n  tensor_parallel: two\n" + TAIL,
        "c.yaml:4: instance_defaults.tensor_parallel: must be a whole number, not 'two'",
    ),
    "engine": (
        HEAD + "instance_defaults:\n  engine: emulatd\n" + TAIL,
        "c.yaml:4: instance_defaults.engine: must be one of vllm, emulated, not 'emulatd'; did you mean emulated?",
    ),
    "twice": (
        HEAD + "instances:\n  - {id: d, role: prefill, count: 2}\n  - {id: d-1, role: decode}\n",
        "c.yaml:5: instances.d-1.id: another instance already has the name 'd-1'",
    ),
    "key_twice": (
        HEAD + "gateway: {port: 1}\nmonitor: {}\ngateway: {port: 2}\n" + TAIL,
        "c.yaml:5: gateway: it is here twice, first in line 3",
    ),
    "host": (
        HEAD + "hosts: {left: 10.0.0.1}\ncontrol: left\ninstances:\n  - {id: p, role: prefill, host: lefft}\n",
        "c.yaml:6: instances.p.host: unknown host 'lefft'; did you mean left? Known: left",
    ),
    "control": (
        HEAD + "hosts: {left: 10.0.0.1}\ncontrol: rigth\n" + TAIL,
        "c.yaml:4: control: must name the control plane's host, one of `hosts` (left).",
    ),
    "curve": (
        HEAD + "hosts: {a: 127.0.0.1, b: 10.0.0.2}\ncontrol: a\n" + TAIL,
        "c.yaml:3: hosts: several hosts need curve_public and curve_secret: `polyphase keys curve` creates them\n"
        "c.yaml:3: hosts: several hosts need cluster_token: `polyphase keys token` creates one",
    ),
    "accelerator": (
        HEAD
        + "instances:\n  - {id: p, role: prefill, engine: emulated}\n  - id: d\n    role: decode\n    engine: emulated\n    accelerator: A1OO\n",
        "c.yaml:8: instances.d.accelerator: unknown accelerator 'A1OO'; did you mean A10, A10G, A100-SXM-80? Add your own in a YAML file of the catalogue's form.",
    ),
    "policy": (
        HEAD + "policies:\n  dispatch: rndom\n" + TAIL,
        f"c.yaml:4: policies.dispatch: unknown dispatch policy 'rndom'; known: {', '.join(sorted(DISPATCH))}; did you mean random?",
    ),
    "policy_kind": (
        HEAD + "policies:\n  dispach: random\n" + TAIL,
        f"c.yaml:4: policies.dispach: no kind of policy 'dispach'; known: {', '.join(KINDS)}; did you mean dispatch?",
    ),
    "policy_parameter": (
        HEAD + "policies:\n  split: {name: fraction, fracton: 0.5}\n" + TAIL,
        "c.yaml:4: policies.split: split policy 'fraction' has no parameter 'fracton'; it takes fraction",
    ),
    "env": (
        HEAD + "gateway:\n  env: {LEVEL: 3}\n" + TAIL,
        "c.yaml:4: gateway.env.LEVEL: must be text, not a number: write it in quotes",
    ),
    "slo": (
        HEAD + "gateway:\n  slo:\n    fast:\n      tpott_s: 1\n" + TAIL,
        "c.yaml:6: gateway.slo.fast.tpott_s: unknown key 'tpott_s'; did you mean tpot_s? Known: …",
    ),
    "slo_list": (HEAD + "gateway:\n  slo: [1]\n" + TAIL, "c.yaml:4: gateway.slo: must be a mapping, not a list"),
    "tier": (
        HEAD + "gateway:\n  service_tiers: {flex: slow}\n" + TAIL,
        "c.yaml:4: gateway.service_tiers.flex: unknown SLO class 'slow'; known: batch, default",
    ),
    "engine_args": (
        HEAD + "instances:\n  - id: p\n    role: prefill\n    engine_args:\n      pipeline_parallel_size: 2\n",
        "c.yaml:7: instances.p.engine_args.pipeline_parallel_size: it is a setting of its own, `pipeline_parallel`",
    ),
    "network_key": (
        HEAD + "network:\n  between: {gbsp: 1}\n" + TAIL,
        (
            "c.yaml:4: network.between.gbps: it is missing\n"
            "c.yaml:4: network.between.gbsp: unknown key 'gbsp'; did you mean gbps? Known: efficiency, gbps, latency_s"
        ),
    ),
    "node": (
        HEAD + "instances:\n  - {id: p, role: prefill, node: n}\n",
        "c.yaml:4: instances.p.node: the file has no `network`",
    ),
    "yaml": (
        HEAD + "gateway: {port: 1\n" + TAIL,
        "c.yaml:4: not valid YAML: while parsing a flow mapping, did not find expected ',' or '}'",
    ),
    "tag": (
        HEAD + "gateway: {host: !secret x}\n" + TAIL,
        "c.yaml:3: gateway.host: a tag (`!name`) is not read: write text that begins with ! in quotes",
    ),
    "list_as_key": (HEAD + "? [a]\n: 1\n" + TAIL, "c.yaml:3: a key must be text, not a list"),
    "recursive": (
        HEAD + "gateway: &g {env: *g}\n" + TAIL,
        "c.yaml:3: an alias inside of what it names would never end",
    ),
    "infinite": (HEAD + "policies: {split: {x: .inf}}\n" + TAIL, "c.yaml:3: policies.split.x: must be a finite number"),
    "number_as_key": (HEAD + "gateway: {1: x}\n" + TAIL, "c.yaml:3: gateway.1: a key must be text: write it in quotes"),
    "link_to_itself": (
        HEAD + "network: {pairs: [{nodes: [a, a], gbps: 1}]}\n" + TAIL,
        "c.yaml:3: network.pairs.0: a pair needs two nodes, not 'a' twice; `nodes` has links inside nodes",
    ),
    "link_twice": (
        HEAD + "network: {pairs: [{nodes: [a, b], gbps: 1}, {nodes: [b, a], gbps: 1}]}\n" + TAIL,
        "c.yaml:3: network.pairs.1: the link of 'a' and 'b' is given twice",
    ),
    "vllm_args": (
        HEAD + "gateway:\n  vllm_args:\n    no_such_option: 1\n    tool_call_parser: hermess\n    seed: [1]\n" + TAIL,
        "c.yaml:5: gateway.vllm_args.no_such_option: vLLM 0.32.0 has no such option\n"
        "c.yaml:6: gateway.vllm_args.tool_call_parser: must be one of …, not 'hermess'; did you mean hermes?\n"
        "c.yaml:7: gateway.vllm_args.seed: must be a whole number, not a list",
    ),
    "vllm_args_file": (
        HEAD + "gateway: {vllm_args: {chat-template: nowhere.jinja, tool_parser_plugin: no.py}}\n" + TAIL,
        "c.yaml:3: gateway.vllm_args.chat-template: there is no file nowhere.jinja\n"
        "c.yaml:3: gateway.vllm_args.tool_parser_plugin: there is no file no.py",
    ),
    "vllm_args_own": (
        HEAD + "gateway: {vllm_args: {served-model-name: x}}\n" + TAIL,
        "c.yaml:3: gateway.vllm_args.served-model-name: it is a setting of its own, `served_model_name` at the top of the file",
    ),
    "ranks": (
        HEAD + "instances:\n  - {id: p, role: prefill, tensor_parallel: 18446744073709551615}\n",
        "c.yaml:4: instances.p.tensor_parallel: must be less than or equal to 1024, not 18446744073709551615",
    ),
    "empty_instances": (HEAD + "instances: []\n", "c.yaml:3: instances: at least one is needed"),
    "instances_map": (HEAD + "instances: {a: 1}\n", "c.yaml:3: instances: must be a list, not a mapping"),
    "id": (
        HEAD + "instances:\n  - {id: 'a b', role: prefill}\n",
        "c.yaml:4: instances.a b.id: 'a b' will not do: letters, digits, '_', '.' and '-', the first a letter or digit",
    ),
    "launcher": (
        HEAD + "launcher: {start: 3}\n" + TAIL,
        "c.yaml:3: launcher.start: unknown key 'start'; did you mean start_s? Known: hang_s, start_s",
    ),
    "section_list": (HEAD + "gateway: [1]\n" + TAIL, "c.yaml:3: gateway: must be a mapping, not a list"),
    "section_null": (HEAD + "gateway:\n" + TAIL, "c.yaml:3: gateway: nothing is given: give it, or leave the key out"),
    "checkpoint": (
        HEAD + "predictor: {checkpoint: 5}\n" + TAIL,
        "c.yaml:3: predictor.checkpoint: must be a path, not 5",
    ),
    "entry_str": (HEAD + "instances:\n  - prefill\n", "c.yaml:4: instances.0: must be a mapping, not 'prefill'"),
    "name_int": ("name: 5\nmodel: models/demo\n" + TAIL, "c.yaml:1: name: must be text, not 5: write it in quotes"),
    "curve_one": (
        HEAD + "curve_public: abc\n" + TAIL,
        "c.yaml:3: curve_public: curve_secret is missing; `polyphase keys curve` creates both",
    ),
}


@pytest.mark.parametrize(("text", "said"), BAD.values(), ids=BAD)
def test_what_is_said(tmp_path: Path, text: str, said: str) -> None:
    found = "\n".join(line if line in said else shortened(line) for line in said_of(tmp_path, text).split("\n"))
    assert found == said


def shortened(line: str) -> str:
    line = re.sub(r"must be one of apertus, .*, not", "must be one of …, not", line)  # of vLLM's parsers
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
def test_no_secret_is_repeated(tmp_path: Path, text: str) -> None:
    said = said_of(tmp_path, HEAD + text + TAIL)
    assert said.startswith("c.yaml")
    assert "271828" not in said


def test_a_good_file_is_not_spoken_of(tmp_path: Path) -> None:
    assert said_of(tmp_path, HEAD + TAIL) == ""


@pytest.mark.parametrize(
    ("section", "key", "kind"), [("gateway", "prot", GatewaySection), ("monitor", "x", MonitorSection)]
)
def test_every_key_that_may_be_given_is_listed(tmp_path: Path, section: str, key: str, kind: type[Section]) -> None:
    listed = said_of(tmp_path, f"{HEAD}{section}: {{{key}: 1}}\n{TAIL}").partition(" Known: ")[2].split(", ")
    assert listed == sorted(listed)
    assert set(listed) == {key for key, given_by in kind.key_kinds().items() if given_by in ACCEPTED}


def test_a_key_by_way_of_an_anchor_stands_where_the_anchor_does(tmp_path: Path) -> None:
    text = HEAD + "instances:\n  - &one\n    id: p\n    role: prefill\n    chunk_size: big\n  - <<: *one\n    id: d\n"
    assert said_of(tmp_path, text).startswith("c.yaml:7: instances.p.chunk_size: ")
    first_good = text.replace("chunk_size: big", "chunk_size: 1").replace("    id: d", "    id: d\n    role: both")
    assert said_of(tmp_path, first_good).startswith("c.yaml:10: instances.d.role: ")


def test_a_model_of_the_command_line_is_not_looked_for_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(HEAD + TAIL)
    cluster = cluster_of(UpOptions(file, model="models/hole"))
    with pytest.raises(InvalidRequest) as error:
        preflight(cluster, make_plan(cluster, tmp_path / "data"), str(file))
    assert error.value.message.startswith("--model: there is no folder")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as error:
        load_cluster(Path("laptp"))
    assert error.value.message.startswith("laptp: there is no such file; did you mean laptop? Shipped files: ")


def test_an_id_with_dots(tmp_path: Path) -> None:
    text = HEAD + "instances:\n  - id: p.0\n    role: prefill\n    chunk_size: big\n"
    assert said_of(tmp_path, text).startswith("c.yaml:6: instances.p.0.chunk_size: ")
